import assert from "node:assert/strict";
import { test } from "node:test";

import * as certainty from "../../../../swarm/gateway/console/page/certainty.js";

const chance = (token, share, others = []) => ({
  token,
  logprob: Math.log(share),
  others: others.map(([text, value]) => [text, Math.log(value)]),
});

test("steps of certainty", () => {
  const steps = [1, 0.9, 0.899, 0.5, 0.3, 0.1].map((share) => certainty.stepOf(chance("x", share)).name);
  assert.deepEqual(steps, ["sure", "sure", "likely", "likely", "unsure", "unlikely"]);
  assert.equal(certainty.stepOf({ logprob: -9999 }).name, "unlikely");
  assert.equal(certainty.stepOf({ logprob: NaN }).name, "unlikely");
});

test("alternatives stand by their shares, the chosen one among them", () => {
  const found = certainty.alternativesOf(
    chance(" a", 0.1, [
      [" b", 0.6],
      [" c", 0.2],
    ]),
  );
  assert.deepEqual(
    found.map(({ token, isChosen }) => [token, isChosen]),
    [
      [" b", false],
      [" c", false],
      [" a", true],
    ],
  );
  assert.ok(Math.abs(certainty.restOf(found) - 0.1) < 1e-9);
  const listed = certainty.alternativesOf(
    chance(" b", 0.6, [
      [" b", 0.6],
      [" c", 0.2],
    ]),
  );
  assert.equal(listed.filter(({ isChosen }) => isChosen).length, 1);
});

test("what is white gets a sign", () => {
  assert.deepEqual(["", " a", "\n\n", "a\tb", "a b"].map(certainty.visible), ["nothing", "␣a", "⏎⏎", "a⇥b", "a b"]);
});

test("a token and a continuation in words", () => {
  const words = certainty
    .inWords(
      chance(" a", 0.62, [
        [" a", 0.62],
        [" b", 0.2],
      ]),
    )
    .replaceAll("\u202f", " ");
  assert.equal(words, "“\u2068␣a\u2069”: 62 %, likely; else “\u2068␣b\u2069” 20 %");
  const told = certainty.summary([chance(" a", 0.9), null, chance(" b", 0.1)]).replaceAll("\u202f", " ");
  assert.equal(told, "2 tokens, 30 % on (geometric) average, 1 of them below 50 %; the least sure: “\u2068␣b\u2069” 10 %.");
  assert.equal(certainty.summary([]), "");
});
