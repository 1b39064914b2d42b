import assert from "node:assert/strict";
import { test } from "node:test";

import { factsOf } from "../../../../swarm/gateway/console/page/facts.js";

const answered = (firstAt, endedAt) => ({
  askedAt: 1000, firstAt, endedAt, numBreaks: 0, numPieces: 7, request: { body: { seed: 1 } }, requestId: "",
  choices: [{ text: "seven", reason: "stop" }], isOver: true, usage: { prompt_tokens: 3, completion_tokens: 7 },
});

test("an answer's rate is that of its tokens since the first one came", () => {
  assert.match(factsOf(answered(1111, 1611), 2048), /14 tokens\/s/);
});

test("tokens that came all at once have no rate", () => {
  const facts = factsOf(answered(1111, 1112), 2048);
  assert.doesNotMatch(facts, /tokens\/s/);
  assert.match(facts, /answer 7 tokens .* first token 111\u202fms/);
});
