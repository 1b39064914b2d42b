import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError } from "../../../../swarm/gateway/console/page/api.js";
import { LONG } from "../../../../swarm/gateway/console/page/examples.js";
import { Talk } from "../../../../swarm/gateway/console/page/talk.js";

import { pathOf } from "../../../../swarm/gateway/console/page/thread.js";

const MODEL = { id: "village", chat: true, context: 2048 };
const said = (at, content) => ({
  id: `8f3c:${at}.0`,
  data: JSON.stringify({ choices: [{ index: 0, delta: { content } }] }),
});
const DONE = { id: "8f3c:9.1", data: "[DONE]" };
const soon = (ms = 5) => new Promise((resolve) => setTimeout(resolve, ms));

// Answers each stream by the next of `scripts`, and notes what was asked. A script is a function of {onEvent, signal}.
class FakeApi {
  asked = [];
  orders = [];
  constructor(...scripts) {
    this.scripts = scripts;
  }

  async stream(path, { onOpen, onEvent, onPiece, signal, method = "GET", body }) {
    this.asked.push({ path, method, body: body && JSON.parse(body) });
    const script = this.scripts.shift();
    if (script instanceof Error) throw script;
    onOpen({ headers: new Map([["x-request-id", "8f3c"]]) });
    onPiece();
    await script({ onEvent, signal });
  }

  async order(verb, body) {
    this.orders.push([verb, body]);
    this.onOrder?.();
  }
}

class FakeStorage {
  kept = new Map();
  getItem(name) {
    return this.kept.get(name) ?? null;
  }
  setItem(name, value) {
    if (value.length > (this.most ?? Infinity)) throw new DOMException("full", "QuotaExceededError");
    this.kept.set(name, value);
  }
  removeItem(name) {
    this.kept.delete(name);
  }
}

const play =
  (...events) =>
  async ({ onEvent }) =>
    events.forEach(onEvent);

// Sends some events, and then nothing until it is let go of.
const hang =
  (...events) =>
  ({ onEvent, signal }) =>
    new Promise((_, refuse) => {
      events.forEach(onEvent);
      signal.addEventListener("abort", () => refuse(new DOMException("let go", "AbortError")));
    });

function talkWith(api, storage = new FakeStorage()) {
  const talk = new Talk(api, { storage });
  talk.model = MODEL;
  return talk;
}

async function over(talk) {
  for (let waited = 0; talk.isBusy; waited += 1) {
    assert.ok(waited < 1000, "the answer never ends");
    await soon();
  }
  await soon();
}

test("turns are kept, and the chosen continuation is the next prompt's past", async () => {
  const api = new FakeApi(play(said(1, "Hello!"), DONE), play(said(1, "I am well."), DONE));
  const talk = talkWith(api);
  talk.drafts.chat = "Hi";
  talk.generate();
  assert.equal(talk.drafts.chat, "");
  await over(talk);
  talk.drafts.chat = "How are you?";
  talk.generate();
  await over(talk);
  assert.deepEqual(api.asked[1].body.messages, [
    { role: "user", content: "Hi" },
    { role: "assistant", content: "Hello!" },
    { role: "user", content: "How are you?" },
  ]);
  assert.equal(talk.answer.choices[0].text, "I am well.");
});

test("where a drawing takes long, most of the time is left to all else", async () => {
  const talk = talkWith(new FakeApi());
  let spent = 0;
  talk.subscribe(() => {
    const began = performance.now();
    while (performance.now() < began + 30);
    spent += performance.now() - began;
  });
  const began = performance.now();
  while (performance.now() < began + 600) {
    talk.changed();
    await soon(1);
  }
  assert.ok(spent >= 30);
  assert.ok(spent < 0.5 * (performance.now() - began), `${spent} ms of ${performance.now() - began}`);
  talk.save(); // its timer is ended
});

test("a conversation outlives a plain prompt between two of its turns", async () => {
  const api = new FakeApi(play(said(1, "Hello!"), DONE), play(said(1, "plain"), DONE), play(said(1, "Well."), DONE));
  const talk = talkWith(api);
  for (const [mode, draft] of [
    ["chat", "Hi"],
    ["raw", "Once"],
    ["chat", "How are you?"],
  ]) {
    talk.mode = mode;
    talk.drafts[mode] = draft;
    talk.generate();
    await over(talk);
  }
  assert.deepEqual(
    api.asked[2].body.messages.map(({ content }) => content),
    ["Hi", "Hello!", "How are you?"],
  );
});

test("a stream that breaks is gone on with behind its last event, and the request is sent once", async () => {
  const api = new FakeApi(
    play(said(1, "One")),
    new ApiError("The gateway does not answer."),
    play(said(2, " day"), DONE),
  );
  const talk = talkWith(api);
  talk.drafts.chat = "Hi";
  talk.generate();
  await over(talk);
  assert.equal(talk.answer.choices[0].text, "One day");
  assert.deepEqual(
    api.asked.map(({ method, path }) => `${method} ${path}`),
    ["POST /v1/chat/completions", "GET /v1/streams/8f3c%3A1.0", "GET /v1/streams/8f3c%3A1.0"],
  );
});

test("a reload goes on with what was kept", async () => {
  const storage = new FakeStorage();
  const before = talkWith(new FakeApi(hang(said(1, "One"))), storage);
  before.drafts.chat = "Hi";
  before.repeats = true;
  before.generate();
  await soon();
  before.save(); // as leaving the page does
  const api = new FakeApi(play(said(2, " day"), DONE));
  const after = new Talk(api, { storage });
  assert.equal(after.repeats, true, "until Stop, and not until a reload");
  after.repeats = false;
  await over(after);
  assert.deepEqual([after.answer.choices[0].text, after.turns.length], ["One day", 1]);
  assert.equal(api.asked[0].path, "/v1/streams/8f3c%3A1.0");
  before.stop(); // ends the test's own stream
});

test("stop tells the swarm, which ends the stream", async () => {
  let end;
  const api = new FakeApi(
    ({ onEvent }) =>
      new Promise((resolve) => {
        onEvent(said(1, "One"));
        end = () => {
          onEvent({ id: null, data: JSON.stringify({ error: { message: "cancelled", code: "RequestCancelled" } }) });
          resolve();
        };
      }),
  );
  api.onOrder = () => end();
  const talk = talkWith(api);
  talk.drafts.chat = "Hi";
  talk.generate();
  await soon();
  talk.stop();
  await over(talk);
  assert.deepEqual(api.orders, [["cancel", { request: "8f3c" }]]);
  assert.deepEqual([talk.answer.state, talk.answer.choices[0].text, talk.isStopping], ["stopped", "One", false]);
});

test("stop lets go of the stream where the swarm can't be told, and says so", async () => {
  const api = new FakeApi(hang(said(1, "One")));
  api.onOrder = () => {
    throw new ApiError("The gateway does not answer.");
  };
  const talk = talkWith(api);
  talk.drafts.chat = "Hi";
  talk.generate();
  await soon();
  talk.stop();
  await over(talk);
  assert.equal(talk.answer.state, "stopped");
  assert.match(talk.notice, /could not be stopped: The gateway does not answer\./);
});

test("a refused prompt goes back into the box, with the reason beside the button", async () => {
  const talk = talkWith(new FakeApi(play(said(1, "Hello!"), DONE), new ApiError("max_tokens: too many", 400)));
  talk.drafts.chat = "Hi";
  talk.generate();
  await over(talk);
  talk.drafts.chat = "And you?";
  talk.generate();
  await over(talk);
  assert.deepEqual([talk.answer, talk.notice], [null, "max_tokens: too many"]);
  assert.equal(talk.drafts.chat, "And you?");
  assert.deepEqual(
    talk.turns.map(({ content }) => content),
    ["Hi", "Hello!"],
  );
});

const ask = async (talk, words) => {
  talk.drafts.chat = words;
  talk.generate();
  await over(talk);
};
const shown = (talk) => pathOf(talk.record.thread).map(({ content }) => content);

test("another answer stands beside the first one, and either can be shown and gone on with", async () => {
  const api = new FakeApi(play(said(1, "One"), DONE), play(said(1, "Two"), DONE), play(said(1, "Three"), DONE));
  const talk = talkWith(api);
  await ask(talk, "Hi");
  talk.retry();
  await over(talk);
  assert.deepEqual(shown(talk), ["Hi", "Two"]);
  assert.notEqual(api.asked[0].body.seed, api.asked[1].body.seed);
  assert.deepEqual(api.asked[0].body.messages, api.asked[1].body.messages);
  const first = Object.values(talk.thread.turns).find(({ content }) => content === "One");
  talk.show(first);
  assert.deepEqual([shown(talk), talk.answer], [["Hi", "One"], null]);
  await ask(talk, "And?");
  assert.deepEqual(
    api.asked[2].body.messages.map(({ content }) => content),
    ["Hi", "One", "And?"],
  );
});

test("another answer that fails leaves the former one", async () => {
  const talk = talkWith(new FakeApi(play(said(1, "One"), DONE), new ApiError("busy", 400)));
  await ask(talk, "Hi");
  talk.retry();
  await over(talk);
  assert.deepEqual([shown(talk), talk.notice, talk.drafts.chat], [["Hi", "One"], "busy", ""]);
});

test("an edited prompt is asked with what came before it, and the former one is kept", async () => {
  const api = new FakeApi(...["One", "Two", "Three"].map((words) => play(said(1, words), DONE)));
  const talk = talkWith(api);
  await ask(talk, "Hi");
  await ask(talk, "And?");
  talk.edit(talk.turns[0]);
  assert.equal(talk.draft, "Hi");
  talk.drafts.chat = "Hello";
  talk.generate();
  await over(talk);
  assert.deepEqual(
    api.asked[2].body.messages.map(({ content }) => content),
    ["Hello"],
  );
  assert.deepEqual([shown(talk), talk.editing], [["Hello", "Three"], 0]);
  talk.show(Object.values(talk.thread.turns).find(({ content }) => content === "Hi"));
  assert.deepEqual(shown(talk), ["Hi", "One", "And?", "Two"]);
});

test("a branch is a conversation of its own, and the first one is as it was", async () => {
  const kept = new Map();
  const talk = talkWith(new FakeApi(...["One", "Two"].map((words) => play(said(1, words), DONE))));
  talk.onKeep = (record) => kept.set(record.id, record);
  await ask(talk, "Hi");
  await ask(talk, "And?");
  const { id } = talk;
  talk.branch(talk.turns[1]);
  assert.notEqual(talk.id, id);
  assert.deepEqual(shown(talk), ["Hi", "One"]);
  talk.open(kept.get(id));
  assert.deepEqual(shown(talk), ["Hi", "One", "And?", "Two"]);
  assert.equal(kept.size, 2);
});

test("reasoning is kept apart from the answer, and is not sent again", async () => {
  const thought = { id: "8f3c:0.0", data: JSON.stringify({ choices: [{ index: 0, delta: { reasoning: "Hm." } }] }) };
  const api = new FakeApi(play(thought, said(1, "Yes."), DONE), play(said(1, "No."), DONE));
  const talk = talkWith(api);
  await ask(talk, "Is it?");
  await ask(talk, "Sure?");
  assert.deepEqual(
    api.asked[1].body.messages.map(({ content }) => content),
    ["Is it?", "Yes.", "Sure?"],
  );
  assert.equal(talk.turns[1].thought, "Hm.");
});

test("continuations become alternatives, of which the chosen one is shown", async () => {
  const two = (at, index, content) => ({
    id: `8f3c:${at}.0`,
    data: JSON.stringify({ choices: [{ index, delta: { content } }] }),
  });
  const talk = talkWith(new FakeApi(play(two(1, 0, "One"), two(2, 1, "Two"), DONE), play(said(1, "Well."), DONE)));
  talk.values = { ...talk.values, n: "2" };
  await ask(talk, "Hi");
  talk.values = { ...talk.values, n: "1" };
  await ask(talk, "And?");
  assert.deepEqual(shown(talk), ["Hi", "One", "And?", "Well."]);
  assert.equal(Object.values(talk.thread.turns).filter(({ parent }) => parent === 1).length, 2);
});

test("the same answer is asked for with its confidence by its seed", async () => {
  const api = new FakeApi(play(said(1, "One"), DONE), play(said(1, "One"), DONE));
  const talk = talkWith(api);
  talk.mode = "raw";
  talk.drafts.raw = "Once upon a time";
  talk.generate();
  await over(talk);
  talk.askForConfidence();
  await over(talk);
  assert.equal(api.asked[0].body.seed, api.asked[1].body.seed);
  assert.deepEqual([api.asked[0].body.logprobs, api.asked[1].body.logprobs], [undefined, 5]);
});

test("what is copied asks for the answer that Send gets, and afterwards for the one it got", async () => {
  const api = new FakeApi(play(said(1, "One"), DONE));
  const talk = talkWith(api);
  talk.drafts.chat = "Hi";
  const before = talk.copied;
  talk.generate();
  await over(talk);
  assert.deepEqual(api.asked[0].body, before.body);
  assert.deepEqual(talk.copied.body, before.body);
  talk.drafts.chat = "And you?";
  assert.notEqual(talk.copied.body.seed, before.body.seed);
});

test("where storage is full, the text is kept without what is beside it; else nothing is", async () => {
  const storage = new FakeStorage();
  const talk = talkWith(new FakeApi(play(said(1, "One"), said(2, " day"), DONE)), storage);
  talk.drafts.chat = "Hi";
  talk.generate();
  await over(talk);
  const whole = storage.getItem("swarm.talk");
  storage.most = whole.length - 1;
  talk.save();
  const kept = JSON.parse(storage.getItem("swarm.talk")).answer.choices[0];
  assert.deepEqual([kept.text, kept.ends], ["One day", []]);
  storage.most = 10;
  talk.save();
  assert.equal(storage.getItem("swarm.talk"), null);
});

test("nothing is asked while something is wrong", () => {
  const api = new FakeApi();
  const talk = talkWith(api);
  talk.generate();
  assert.equal(talk.problems.prompt, "Write a prompt first.");
  talk.drafts.chat = "Hi";
  talk.values = { ...talk.values, max_tokens: "many" };
  talk.generate();
  assert.deepEqual([api.asked, Object.keys(talk.problems)], [[], ["max_tokens"]]);
});

test("a context that is full is told from the report, before and after it refuses", async () => {
  const usage = { id: "8f3c:2.0", data: JSON.stringify({ choices: [], usage: { prompt_tokens: 2000, completion_tokens: 40 } }) };
  const refusal = new ApiError("the prompt has 2060 tokens", 400, "context_length_exceeded");
  const talk = talkWith(new FakeApi(play(said(1, "Hello!"), usage, DONE), refusal));
  talk.drafts.chat = "Hi";
  talk.generate();
  await over(talk);
  assert.equal(talk.room.level, "short");
  talk.drafts.chat = "x".repeat(100);
  assert.equal(talk.room.level, "full");
  talk.generate();
  await over(talk);
  assert.deepEqual([talk.answer, talk.notice], [null, "the prompt has 2060 tokens"]);
  assert.equal(talk.room.level, "full"); // the turn is in the box again
  talk.startAnew();
  assert.equal(talk.room.level, "roomy");
});

test("an example takes the box, and the other kind of prompt keeps its words", () => {
  const talk = talkWith(new FakeApi());
  talk.drafts.chat = "half a thought";
  talk.take(LONG);
  assert.deepEqual([talk.mode, talk.draft, talk.drafts.chat], ["raw", LONG.prompt, "half a thought"]);
  assert.equal(talk.request.body.min_tokens, 2016);
});

test("what repeats is asked again when it has ended, with another seed, until Stop", async () => {
  const api = new FakeApi(play(said(1, "One"), DONE), play(said(1, "Two"), DONE), hang(said(1, "Three")));
  const talk = talkWith(api);
  talk.take(LONG);
  assert.equal(talk.repeats, true);
  talk.generate();
  for (let waited = 0; api.asked.length < 3; waited += 1) {
    assert.ok(waited < 1000, "it is not asked again");
    await soon();
  }
  const seeds = new Set(api.asked.map(({ body }) => body.seed));
  assert.deepEqual([seeds.size, new Set(api.asked.map(({ body }) => body.prompt)).size], [3, 1]);
  await soon();
  talk.stop();
  await over(talk);
  assert.deepEqual([talk.answer.state, api.asked.length], ["stopped", 3]);
});

test("Stop counts although the answer ends just then", async () => {
  let end;
  const ending = ({ onEvent }) => new Promise((resolve) => (end = () => resolve([said(1, "One"), DONE].forEach(onEvent))));
  const api = new FakeApi(ending, hang());
  const talk = talkWith(api);
  talk.take(LONG);
  talk.generate();
  await soon();
  talk.stop();
  end();
  await over(talk);
  assert.deepEqual([talk.answer.state, api.asked.length, talk.isStopping], ["ended", 1, false]);
});
