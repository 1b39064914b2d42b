import assert from "node:assert/strict";
import { test } from "node:test";

import * as ask from "../../../../swarm/gateway/console/page/ask.js";

const made = (values, more = {}) =>
  ask.requestOf({
    mode: "raw",
    values: { ...ask.DEFAULTS, ...values },
    model: "village",
    prompt: "One",
    seed: 7,
    ...more,
  }).body;

test("fields become numbers, and empty ones are left to the API", () => {
  const body = made({ max_tokens: "12", temperature: "0", top_p: " 0.9 ", top_k: "40", min_p: "", n: "4" });
  assert.deepEqual(body, {
    model: "village",
    prompt: "One",
    max_tokens: 12,
    temperature: 0,
    top_p: 0.9,
    top_k: 40,
    n: 4,
    seed: 7,
    stream: true,
    stream_options: { include_usage: true },
    keep_s: 60,
  });
});

test("a seed that was given is kept, one continuation and the normal class are not said", () => {
  const body = made({ seed: "0", n: "1", priority: "normal" });
  assert.equal(body.seed, 0);
  assert.equal("n" in body || "priority" in body, false);
  assert.equal(made({ priority: "low" }).priority, "low");
});

test("penalties, stops, a schema and confidence are told in the API's forms", () => {
  const values = {
    presence_penalty: "0.5",
    frequency_penalty: "-1",
    repetition_penalty: "1.1",
    stop: "END\n\\n\\n",
    schema: '{"type": "object"}',
  };
  const body = made(values, { confidence: true });
  assert.deepEqual([body.presence_penalty, body.frequency_penalty, body.repetition_penalty], [0.5, -1, 1.1]);
  assert.deepEqual(body.stop, ["END", "\n\n"]);
  assert.deepEqual(body.response_format, {
    type: "json_schema",
    json_schema: { name: "answer", schema: { type: "object" } },
  });
  assert.equal(body.logprobs, 5);
  const chat = made({}, { mode: "chat", messages: [], confidence: true });
  assert.deepEqual([chat.logprobs, chat.top_logprobs, "prompt" in chat], [true, 5, false]);
});

test("the same request can be had with confidence", () => {
  const request = ask.requestOf({ mode: "chat", values: ask.DEFAULTS, model: "m", messages: [], seed: 7 });
  assert.equal(ask.hasConfidence(request), false);
  const again = ask.withConfidence(request);
  assert.equal(ask.hasConfidence(again), true);
  assert.equal(again.body.seed, 7);
});

test("what is wrong is said by field, in words", () => {
  const problems = ask.problemsOf({
    max_tokens: "0",
    temperature: "warm",
    top_p: "0",
    n: "1.5",
    seed: "1e300",
    schema: "{",
    stop: "x\n".repeat(17),
  });
  assert.equal(problems.max_tokens, "Max tokens goes from 1 to 1000000.");
  assert.equal(problems.temperature, "Temperature: “warm” is not a number.");
  assert.equal(problems.top_p, "Top p must be above 0.");
  assert.equal(problems.n, "Continuations is a whole number.");
  assert.match(problems.seed, /goes from 0 to/);
  assert.match(problems.stop, /at most 16/);
  assert.match(problems.schema, /not valid JSON/);
  assert.deepEqual(ask.problemsOf(ask.DEFAULTS), {});
});

test("where an answer may end is told as vLLM calls it, and what can't be had together is said", () => {
  const body = made({ min_tokens: "100", ignore_eos: "yes" });
  assert.deepEqual([body.min_tokens, body.ignore_eos], [100, true]);
  assert.equal("min_tokens" in made({}) || "ignore_eos" in made({}), false);
  const problems = (values) => ask.problemsOf({ ...ask.DEFAULTS, ...values });
  assert.match(problems({ min_tokens: "201" }).min_tokens, /more than Max tokens/);
  assert.deepEqual(problems({ min_tokens: "201", max_tokens: "" }), {});
  assert.match(problems({ ignore_eos: "yes", schema: "{}" }).ignore_eos, /form/);
  assert.match(problems({ regex: "a+", schema: "{}" }).regex, /one form/);
  assert.deepEqual(made({ regex: " a+ " }).response_format, { type: "regex", regex: "a+" });
});

test("a schema that does not parse has its place told", () => {
  const { problem } = ask.readSchema('{\n  "type": objct\n}');
  assert.match(problem, /^JSON schema: not valid JSON( at line 2, column \d+)?\.$/);
  assert.match(ask.readSchema("[1]").problem, /a schema is an object/);
  assert.match(ask.readSchema("7").problem, /a schema is an object/);
  assert.deepEqual(ask.readSchema("true"), { schema: true });
  assert.deepEqual(ask.readSchema("  "), {});
});

test("stop strings are lines, with signs for what a line can't hold", () => {
  assert.deepEqual(ask.stopsOf("a b\n\n\\t\n\\\\n"), ["a b", "\t", "\\n"]);
});

test("a conversation begins with what the system says, if it says anything", () => {
  const turns = [{ role: "user", content: "Hi", more: 1 }];
  assert.deepEqual(ask.messagesOf(" ", turns), [{ role: "user", content: "Hi" }]);
  assert.equal(ask.messagesOf("Be kind.", turns)[0].role, "system");
});
