import assert from "node:assert/strict";
import { test } from "node:test";

import { problemsOf, requestOf } from "../../../../swarm/gateway/console/page/ask.js";
import { EXAMPLES, LONG, valuesFor } from "../../../../swarm/gateway/console/page/examples.js";
import { countedOf, isCutByContext, roomOf, roomWords } from "../../../../swarm/gateway/console/page/room.js";

const CHAT = { context: 2048, mode: "chat", draft: "", system: "", turns: [], counted: null, wanted: 200 };
const words = (room) => roomWords(room).replaceAll("\u202f", "");

test("what a prompt takes is told before anything was counted, about", () => {
  assert.equal(roomOf({ ...CHAT, context: null }), null);
  const about = { isExact: false, isCertain: false, isAlone: true, level: "roomy" };
  const nothing = { used: 0, past: 0, left: 2048, context: 2048, ...about };
  assert.deepEqual(roomOf(CHAT), nothing);
  const raw = roomOf({ ...CHAT, mode: "raw", draft: "x".repeat(400), turns: [{ content: "of a chat" }] });
  assert.deepEqual([raw.used, raw.level], [100, "roomy"]);
  assert.equal(words(raw), "About 1900 of 2048 tokens left");
  const system = roomOf({ ...CHAT, system: "x".repeat(400), draft: "x".repeat(40) });
  assert.equal(system.used, 100 + 10 + 2 * 6);
});

test("what an answer's report counted is not guessed again, only what came after it", () => {
  const turns = [{ content: "x".repeat(1500) }, { content: "x".repeat(378) }];
  const ends = Array.from({ length: 50 }, (_, index) => index);
  const answer = { usage: { prompt_tokens: 900, completion_tokens: 51 }, choices: [{ ends }] };
  const counted = countedOf(answer, 0, turns);
  assert.deepEqual(counted, { numTurns: 2, tokens: 951, each: 2 });
  assert.equal(roomOf({ ...CHAT, turns, counted }).used, 951);
  const later = roomOf({ ...CHAT, turns: [...turns, { content: "x".repeat(20) }], draft: "x".repeat(20), counted });
  assert.equal(later.used, 951 + 2 * (10 + 6));
  // Another conversation, shorter than what was counted.
  assert.equal(roomOf({ ...CHAT, turns: [{ content: "x".repeat(40) }], counted }).used, 20 + 6);
  const two = countedOf({ ...answer, choices: [answer.choices[0], { ends: [1, 2] }] }, 1, turns);
  assert.equal(two.tokens, 902);
  assert.equal(countedOf(answer, 0, [{ content: "Hi" }]).each, 4); // too little to go by
});

test("where little is left it is said in time, and where nothing is, what to do", () => {
  const at = (tokens, more = {}) => roomOf({ ...CHAT, turns: [{}], counted: { numTurns: 1, tokens, each: 4 }, ...more });
  assert.equal(at(1800).level, "roomy");
  assert.equal(at(1900).level, "short");
  assert.equal(words(at(1900)), "About 140 of 2048 tokens left: the answer may be cut.");
  assert.equal(at(1500, { wanted: 600 }).level, "short");
  assert.equal(at(900, { wanted: 100_000 }).level, "roomy");
  assert.equal(at(900, { wanted: 0 }).level, "roomy");
  assert.deepEqual([at(2048).level, at(9999).left], ["full", 0]);
  assert.equal(words(at(2048)), "The model's context of 2048 tokens is full: begin a new conversation.");
  const guessed = at(2000, { draft: "x".repeat(400) });
  assert.equal(words(guessed), "This may be too long for the model's 2048 tokens: begin a new conversation.");
});

test("what the gateway has counted is told to the token", () => {
  const room = roomOf({ ...CHAT, draft: "x".repeat(4000), exact: 1234 });
  assert.deepEqual([room.used, room.isExact], [1234, true]);
  assert.equal(words(room), "814 of 2048 tokens left");
  const full = roomOf({ ...CHAT, draft: "x".repeat(4000), turns: [{ content: "Hi" }], exact: 2205 });
  assert.equal(words(full), "2205 tokens are too long for the model's 2048 tokens: begin a new conversation.");
});

test("where a new conversation would be no help, none is advised", () => {
  const draft = "x".repeat(4 * 2048);
  const counted = { numTurns: 1, tokens: 2048, each: 4 };
  for (const more of [{ draft }, { draft, turns: [{}], counted }, { draft, mode: "raw" }]) {
    const room = roomOf({ ...CHAT, ...more });
    assert.ok(room.isAlone);
    assert.equal(words(room), "This may be too long for the model's 2048 tokens: shorten the prompt.");
  }
});

test("an answer that its context cut is told from one that its length cut", () => {
  const cut = (prompt, tokens, reason) =>
    isCutByContext(
      { usage: { prompt_tokens: prompt, completion_tokens: tokens }, choices: [{ reason, ends: [] }] },
      2048,
    );
  assert.equal(cut(2000, 48, "length"), true);
  assert.equal(cut(2000, 20, "length"), false);
  assert.equal(cut(2000, 48, "stop"), false);
  assert.equal(isCutByContext({ usage: null, choices: [] }, 2048), false);
});

test("every example is a request that can be sent, and leaves nothing of the one before", () => {
  const before = { ...LONG.values, schema: '{"type": "object"}', seed: "7", system: "Be kind.", priority: "low" };
  for (const example of EXAMPLES) {
    const values = valuesFor(example, before, 2048);
    assert.deepEqual(problemsOf(values), {}, example.name);
    assert.deepEqual([values.system, values.priority, values.seed], ["Be kind.", "low", undefined]);
    const { body } = requestOf({ ...example, values, model: "m", messages: [], seed: 1 });
    assert.equal(body.response_format?.type, { JSON: "json_schema", "A long story": "regex" }[example.name]);
    assert.equal(body.min_tokens === body.max_tokens, example === LONG);
  }
  assert.equal(valuesFor(LONG, {}, 2048).max_tokens, "2016");
  assert.equal(valuesFor(LONG, {}, 131072).max_tokens, "4000");
  assert.equal(valuesFor(LONG, {}, null).max_tokens, "3968");
});
