import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer, pieceOf } from "../../../../swarm/gateway/console/page/reading.js";

const CHAT = { path: "/v1/chat/completions", body: { n: 2 } };
const RAW = { path: "/v1/completions", body: {} };

const said = (content, { index = 0, reason = null, logprobs = null } = {}) =>
  JSON.stringify({ choices: [{ index, delta: { content }, logprobs, finish_reason: reason }] });
const wrote = (text, logprobs = null) =>
  JSON.stringify({ choices: [{ index: 0, text, logprobs, finish_reason: null }] });
const error = (message, code) => JSON.stringify({ error: { message, code } });

function streaming(request = RAW) {
  const answer = new Answer(request, 0);
  answer.opened("8f3c", 10);
  return answer;
}

test("each continuation has its own text, pieces and end", () => {
  const answer = streaming(CHAT);
  answer.take({ id: "8f3c:1.0.0", data: said("Hel") }, 20);
  answer.take({ id: "8f3c:1.1.0", data: said("Good", { index: 1 }) }, 21);
  answer.take({ id: "8f3c:2.1.0", data: said("lo 😀") }, 22);
  answer.take({ id: "8f3c:3.1.0", data: said("", { reason: "stop" }) }, 23);
  assert.deepEqual(
    answer.choices.map(({ text, reason }) => [text, reason]),
    [
      ["Hello 😀", "stop"],
      ["Good", null],
    ],
  );
  assert.deepEqual(
    [0, 1].map((at) => pieceOf(answer.choices[0], at)),
    ["Hel", "lo 😀"],
  );
  assert.equal(answer.firstAt, 20);
  assert.equal(answer.state, "streaming");
});

test("thinking is shown before the answer", () => {
  const answer = streaming(CHAT);
  const thought = { choices: [{ index: 0, delta: { reasoning_content: "Hm. ", reasoning: "Hm. " } }] };
  answer.take({ id: "8f3c:1.0.0", data: said("") }, 20);
  answer.take({ id: "8f3c:2.0.0", data: JSON.stringify(thought) }, 20);
  answer.take({ id: "8f3c:3.0.0", data: said("Yes.") }, 21);
  assert.equal(answer.choices[0].text, "Hm. Yes.");
});

test("usage is taken, and DONE is the end", () => {
  const answer = streaming();
  answer.take({ id: "8f3c:1.1", data: JSON.stringify({ choices: [], usage: { completion_tokens: 3 } }) }, 20);
  answer.take({ id: "8f3c:1.2", data: "[DONE]" }, 30);
  assert.deepEqual([answer.state, answer.usage.completion_tokens, answer.endedAt], ["ended", 3, 30]);
});

test("alternatives are read from both forms", () => {
  const chat = streaming(CHAT);
  const entry = {
    token: " a",
    logprob: -0.1,
    bytes: [],
    top_logprobs: [
      { token: " a", logprob: -0.1 },
      { token: " b", logprob: -3 },
    ],
  };
  chat.take({ id: "8f3c:1.0.0", data: said(" a", { logprobs: { content: [entry] } }) }, 20);
  assert.deepEqual(chat.choices[0].chances, [
    {
      token: " a",
      logprob: -0.1,
      others: [
        [" a", -0.1],
        [" b", -3],
      ],
    },
  ]);
  const raw = streaming();
  const told = { tokens: [" x"], token_logprobs: [-2], top_logprobs: [{ " y": -0.5, " x": -2 }], text_offset: [0] };
  raw.take({ id: "8f3c:1.0", data: wrote(" x", told) }, 20);
  assert.deepEqual(raw.choices[0].chances, [
    {
      token: " x",
      logprob: -2,
      others: [
        [" y", -0.5],
        [" x", -2],
      ],
    },
  ]);
});

test("a token without text of its own is a piece when its chance is told, and none when it isn't", () => {
  const answer = streaming();
  const told = { tokens: ["bytes:\\xf0"], token_logprobs: [-1], top_logprobs: [{}] };
  answer.take({ id: "8f3c:1.0", data: wrote("", told) }, 20);
  answer.take({ id: "8f3c:2.0", data: wrote("") }, 21);
  assert.deepEqual(answer.choices[0].ends, [0]);
});

test("a break is gone on with behind the last event, and waits longer each time", () => {
  const answer = streaming();
  answer.take({ id: "8f3c:1.0", data: wrote("One") }, 20);
  assert.equal(answer.broke(null, 100), 0.25);
  assert.equal(answer.state, "broken");
  assert.equal(answer.resumption, "/v1/streams/8f3c%3A1.0");
  assert.equal(answer.broke({ status: 0, message: "nobody answers" }, 400), 0.5);
  assert.equal(answer.broke({ status: 503, message: "no broker" }, 1000), 1);
  assert.equal(answer.words, "no broker");
  answer.opened("other", 2000);
  answer.take({ id: "8f3c:2.0", data: wrote(" day") }, 2010);
  assert.deepEqual(
    [answer.state, answer.choices[0].text, answer.requestId, answer.numBreaks],
    ["streaming", "One day", "8f3c", 1],
  );
  assert.equal(answer.broke(null, 3000), 0.25); // something new came between
  assert.equal(answer.numBreaks, 2);
});

test("before an event has come the answer is read from its beginning", () => {
  const answer = streaming();
  answer.broke(null, 50);
  assert.equal(answer.resumption, "/v1/streams/8f3c");
});

test("a request that the gateway has not answered is not asked for again", () => {
  const answer = new Answer(RAW, 0);
  assert.equal(answer.broke({ status: 0, message: "The gateway does not answer." }, 10), null);
  assert.deepEqual([answer.state, answer.words], ["failed", "The gateway does not answer."]);
  assert.equal(answer.numBreaks, 0); // nothing had begun that could have been gone on with
});

test("what the swarm has forgotten has failed, in words", () => {
  const answer = streaming();
  answer.broke(null, 50);
  assert.equal(answer.broke({ status: 404, message: "not known" }, 60), null);
  assert.match(answer.words, /no longer has this answer/);
});

test("a refusal ends it with the gateway's words; a missing key does not", () => {
  const answer = streaming();
  assert.equal(answer.broke({ status: 401, message: "a key" }, 50), 0.25);
  assert.equal(answer.broke({ status: 400, message: "no such event" }, 60), null);
  assert.equal(answer.words, "no such event");
});

test("it is given up after three minutes of breaks, not of waiting in an open stream", () => {
  const answer = streaming();
  assert.equal(answer.broke(null, 600_000), 0.25); // ten minutes of heartbeats: a long prompt
  assert.equal(answer.broke(null, 600_000 + 179_000), 0.5);
  assert.equal(answer.broke(null, 600_000 + 181_000), null);
  assert.match(answer.words, /180 seconds/);
});

test("an error in the stream ends it in words, and the DONE behind it changes nothing", () => {
  const answer = streaming();
  answer.take({ id: null, data: error("response_format: Invalid type", "grammar") }, 20);
  answer.take({ id: null, data: "[DONE]" }, 21);
  assert.deepEqual([answer.state, answer.words], ["failed", "response_format: Invalid type"]);
});

test("a broker that is away ends the stream, not the answer", () => {
  const answer = streaming();
  answer.take({ id: null, data: error("no broker answers", "Unavailable") }, 20);
  answer.take({ id: null, data: "[DONE]" }, 21);
  assert.equal(answer.isOver, false);
  assert.equal(answer.broke(null, 22), 0.25);
  answer.opened("8f3c", 300);
  answer.take({ id: "8f3c:1.1", data: "[DONE]" }, 310);
  assert.equal(answer.state, "ended");
});

test("another tab that reads it is told, and it can be taken back", () => {
  const answer = streaming();
  answer.take({ id: "8f3c:1.0", data: wrote("One") }, 20);
  answer.take({ id: null, data: error("somebody else reads this answer now", "ReadElsewhere") }, 30);
  assert.equal(answer.state, "elsewhere");
  assert.equal(answer.broke(null, 31), null);
  answer.takenBack();
  assert.deepEqual([answer.isOver, answer.resumption], [false, "/v1/streams/8f3c%3A1.0"]);
});

test("a cancelled request is a stopped answer", () => {
  const answer = streaming();
  answer.take({ id: null, data: error("cancelled", "RequestCancelled") }, 20);
  assert.equal(answer.state, "stopped");
});

test("a reload keeps everything and goes on behind the last event", () => {
  const answer = streaming(CHAT);
  answer.take({ id: "8f3c:1.0.0", data: said("One") }, 20);
  const again = Answer.restored(JSON.parse(JSON.stringify(answer.kept())));
  assert.deepEqual(
    [again.state, again.choices[0].text, again.resumption],
    ["broken", "One", "/v1/streams/8f3c%3A1.0.0"],
  );
  again.opened("8f3c", 100);
  again.take({ id: "8f3c:2.0.0", data: said(" day") }, 110);
  again.take({ id: "8f3c:2.0.2", data: "[DONE]" }, 120);
  assert.deepEqual([again.choices[0].text, again.state], ["One day", "ended"]);
});

test("a reload before the gateway has answered is a failure, in words", () => {
  const again = Answer.restored(JSON.parse(JSON.stringify(new Answer(RAW, 0).kept())));
  assert.equal(again.state, "failed");
  assert.match(again.words, /before the gateway had answered/);
});

test("pieces and text are bounded", () => {
  const answer = streaming();
  for (let at = 0; at < 20_010; at += 1) answer.take({ id: `8f3c:${at}.0`, data: wrote("x") }, at);
  assert.equal(answer.choices[0].ends.length, 20_000);
  assert.equal(answer.choices[0].text.length, 20_010);
  const long = "y".repeat(3_000_000);
  answer.take({ id: "8f3c:30000.0", data: wrote(long) }, 1);
  answer.take({ id: "8f3c:30001.0", data: wrote(long) }, 2);
  assert.deepEqual([answer.choices[0].text.length, answer.isCut], [3_020_010, true]);
});
