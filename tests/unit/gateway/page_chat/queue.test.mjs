import assert from "node:assert/strict";
import { test } from "node:test";

import * as queue from "../../../../swarm/gateway/console/page/queue.js";

const row = (request_id, state, more = {}) => ({
  request_id,
  state,
  num_prompt: 100,
  num_prompt_computed: 100,
  num_tokens: 5,
  max_tokens: 20,
  n: 1,
  class: "normal",
  tenant: "http",
  ...more,
});
const plain = (words) => words.replaceAll("\u202f", " ");

test("those under way come first by age, the ended ones the latest first", () => {
  const view = {
    requests: {
      a: row("a", "waiting", { began_at: 5 }),
      b: row("b", "running", { began_at: 9 }),
      c: row("c", "running", { began_at: 7 }),
    },
    ended: { d: row("d", "ended", { ended_at: 1 }), e: row("e", "ended", { ended_at: 2 }) },
  };
  assert.deepEqual(
    queue.rowsOf(view).map(({ request_id }) => request_id),
    ["c", "b", "a", "e", "d"],
  );
  assert.deepEqual(
    queue.rowsOf(view, " QUEUED ").map(({ request_id }) => request_id),
    ["a"],
  );
  assert.deepEqual(queue.rowsOf(null), []);
  assert.equal(plain(queue.summaryOf({ ...view, requests_more: 1200 })), "2 running, 1 queued, 1 200 more not listed");
});

test("a long prompt tells how much of it is computed, then the answer how far it is", () => {
  const reading = row("a", "running", { num_tokens: 0, num_prompt: 1000, num_prompt_computed: 250 });
  assert.equal(queue.stateOf(reading), "reading the prompt");
  assert.deepEqual(
    { ...queue.progressOf(reading), words: plain(queue.progressOf(reading).words) },
    { label: "prompt", words: "250 of 1 000 prompt tokens", part: 0.25 },
  );
  assert.deepEqual(queue.progressOf(row("a", "running", { n: 2 })), {
    label: "answer",
    words: "5 of 40 tokens",
    part: 0.125,
  });
  assert.equal(queue.progressOf(row("a", "ended")).part, null);
});

test("a broker that does not tell the prompt's progress leaves the part unknown", () => {
  assert.equal(queue.progressOf(row("a", "running", { num_tokens: 0, num_prompt_computed: undefined })).part, null);
});

test("who asks is told without the broker's prefixes", () => {
  const names = ["key:alice", "http", "", "client 7a8ba883c91cb8dc", "other"].map((tenant) => queue.whoOf({ tenant }));
  assert.deepEqual(names, ["alice", "this machine", "this machine", "client 7a8ba883", "other"]);
});

test("ends and ages in words", () => {
  assert.equal(queue.stateOf(row("a", "ended", { reasons: ["stop", "stop", null] })), "ended: stop");
  assert.equal(plain(queue.ageOf(row("a", "running", { began_at: 10 }), 75)), "1 min 5 s");
  assert.equal(plain(queue.ageOf(row("a", "ended", { ended_at: 10 }), 12)), "2 s ago");
  assert.equal(queue.ageOf(row("a", "running"), 12), "");
});
