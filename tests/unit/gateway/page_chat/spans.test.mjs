import assert from "node:assert/strict";
import { test } from "node:test";

import * as spans from "../../../../swarm/gateway/console/page/spans.js";

const PAGE_OF = [
  ["w0", [0, 3]],
  ["w1", [3, 6]],
];

// A token of which each stage computes `compute_s`; the rest as given.
function token(index, compute_s, more = {}) {
  const parts = { queue_s: 0, wire_s: 0.001, wait_s: 0, sample_s: 0, broker_s: 0.0005, unaccounted_s: 0, ...more };
  const stages = PAGE_OF.map(([worker, layers]) => ({
    worker,
    layers,
    wait_s: 0,
    compute_s,
    sample_s: 0,
    wire_bytes: 9,
  }));
  const total_s = Object.values(parts).reduce((sum, value) => sum + value, 2 * compute_s);
  return { index, began_s: index / 100, total_s, ...parts, compute_s: 2 * compute_s, stages };
}

function sequence(tokens, workers = PAGE_OF) {
  const sum = (field) => tokens.reduce((total, each) => total + each[field], 0);
  const fields = ["total_s", "queue_s", "wire_s", "wait_s", "compute_s", "sample_s", "broker_s", "unaccounted_s"];
  const stages = workers.map(([worker, layers]) => ({
    worker,
    layers,
    wait_s: 0,
    compute_s: sum("compute_s") / 2,
    sample_s: 0,
    wire_bytes: 9,
  }));
  const sums = Object.fromEntries(fields.map((field) => [field, sum(field)]));
  return { num_tokens: tokens.length, num_traced: tokens.length, sums, stages, tokens };
}

function spansOf(...tokens) {
  const found = new spans.Spans();
  found.add(sequence(tokens));
  return found;
}

test("a token's spans stand in the order in which they happened, and add up to its time", () => {
  const found = spansOf(token(0, 0.004, { queue_s: 0.002, sample_s: 0 }));
  const told = found.spansOf(found.tokens[0]);
  assert.deepEqual(
    told.map((span) => spans.doing(span)),
    ["queueing", "on the wire", "computing in w0 (layers 0–2)", "computing in w1 (layers 3–5)", "in the broker"],
  );
  const sum = told.reduce((total, span) => total + span.seconds, 0);
  assert.ok(Math.abs(sum - found.tokens[0].total_s) < 1e-9);
});

test("reports that list the newest tokens are put together, and the last one is taken anew", () => {
  const found = spansOf(token(0, 0.002), token(1, 0.002));
  assert.equal(found.add(sequence([token(0, 0.002), token(1, 0.003), token(2, 0.002)])), true);
  assert.deepEqual(
    found.tokens.map(({ index }) => index),
    [0, 1, 2],
  );
  assert.ok(Math.abs(found.tokens[1].total_s - 0.0075) < 1e-9);
  assert.equal(found.add(sequence([token(0, 0.002), token(1, 0.003), token(2, 0.002)])), false);
});

test("a report without tokens, as of a request of long ago, takes none away", () => {
  const found = spansOf(token(0, 0.002), token(1, 0.002));
  found.add({ num_tokens: 2 });
  assert.equal(found.tokens.length, 2);
});

test("tokens are bounded: the first and the newest stay", () => {
  const found = new spans.Spans();
  for (let at = 0; at < 9000; at += 900) {
    found.add(sequence([token(0, 0.001), ...Array.from({ length: 901 }, (_, n) => token(at + n + 1, 0.001))]));
  }
  assert.equal(found.tokens.length, spans.MOST_TOKENS);
  assert.deepEqual([found.tokens[0].index, found.tokens.at(-1).index], [0, 9001]);
  assert.equal(found.numLetGo, 9002 - spans.MOST_TOKENS);
});

test("the slowest token and the slowest part are named in words", () => {
  const found = spansOf(token(0, 0.01), token(1, 0.002), token(2, 0.002, { queue_s: 0.25 }), token(3, 0.002));
  const words = spans.inWords(found, (index) => (index === 2 ? " cat" : ""));
  assert.deepEqual(
    words.map((line) => line.replaceAll("\u202f", " ")),
    [
      "To the first token: 21.5 ms, the largest part computing (20.0 ms, longest in w0).",
      "The slowest after it, token 3 “\u2068 cat\u2069”: 256 ms, the largest part queueing (250 ms).",
      "Over all tokens the largest part was queueing: 250 ms, 87 %; then computing 32.0 ms, on the wire 4.00 ms.",
    ],
  );
  assert.match(spans.tokenInWords(found, found.tokens[1]), /^Token 2: 5\.50.ms: on the wire 1\.00.ms, computing in w0/);
});

test("computing as a whole stands beside the wire as a whole, not worker by worker", () => {
  const [first, all] = spans.inWords(spansOf(token(0, 0.003, { wire_s: 0.005 })));
  assert.match(first, /the largest part computing \(6\.00.ms, longest in w0\)/);
  assert.match(all, /largest part was computing: 6\.00.ms, 52.%, longest in w0; then on the wire 5\.00.ms/);
});

test("of nothing nothing is said", () => {
  assert.deepEqual(spans.inWords(new spans.Spans()), []);
  assert.deepEqual(new spans.Spans().totals, []);
});

test("guessed tokens are counted in words", () => {
  const found = new spans.Spans();
  const guesses = { proposed: 20, accepted: 12, accepted_lengths: { 0: 1, 4: 3 } };
  found.add({ num_tokens: 1, num_traced: 1, sums: { total_s: 1 }, stages: [], tokens: [token(0, 0.003, {})], ...guesses });
  assert.equal(
    spans.inWords(found).at(-1),
    "Of 20 guessed tokens 12 were right: 4.0 tokens in each of 4 steps with guesses.",
  );
});

test("thousands of tokens share columns, each told by its slowest", () => {
  const tokens = Array.from({ length: 3000 }, (_, index) => token(index, index === 1234 ? 0.009 : 0.001));
  const { columns, perColumn } = spans.columnsOf(tokens, 600);
  assert.equal(perColumn, 15);
  assert.equal(columns.length, 200);
  assert.ok(columns.some(({ token: { index }, first, last }) => index === 1234 && first <= 1234 && 1234 <= last));
  assert.equal(spans.columnsOf(tokens.slice(0, 3), 600).perColumn, 1);
});

test("one token that towers above the others does not flatten them", () => {
  const tokens = [token(0, 1), ...Array.from({ length: 40 }, (_, index) => token(index + 1, 0.001))];
  assert.ok(spans.scaleOf(tokens) < 0.01);
  const even = Array.from({ length: 40 }, (_, index) => token(index, 0.001));
  assert.equal(spans.scaleOf(even), even[0].total_s);
  assert.equal(spans.scaleOf([]), 0);
});
