import assert from "node:assert/strict";
import { test } from "node:test";

import { merge } from "../../../../swarm/gateway/console/page/patch.js";

// Appendix A of RFC 7396: the standard's own cases.
const CASES = [
  [{ a: "b" }, { a: "c" }, { a: "c" }],
  [{ a: "b" }, { b: "c" }, { a: "b", b: "c" }],
  [{ a: "b" }, { a: null }, {}],
  [{ a: "b", b: "c" }, { a: null }, { b: "c" }],
  [{ a: ["b"] }, { a: "c" }, { a: "c" }],
  [{ a: "c" }, { a: ["b"] }, { a: ["b"] }],
  [{ a: { b: "c" } }, { a: { b: "d", c: null } }, { a: { b: "d" } }],
  [{ a: [{ b: "c" }] }, { a: [1] }, { a: [1] }],
  [
    ["a", "b"],
    ["c", "d"],
    ["c", "d"],
  ],
  [{ a: "b" }, ["c"], ["c"]],
  [{ a: "foo" }, null, null],
  [{ a: "foo" }, "bar", "bar"],
  [{ e: null }, { a: 1 }, { e: null, a: 1 }],
  [[1, 2], { a: "b", c: null }, { a: "b" }],
  [{}, { a: { bb: { ccc: null } } }, { a: { bb: {} } }],
];

for (const [target, patch, wanted] of CASES) {
  test(`${JSON.stringify(patch)} onto ${JSON.stringify(target)} gives ${JSON.stringify(wanted)}`, () => {
    assert.deepEqual(merge(target, patch), wanted);
  });
}

test("what is patched is not changed, and what a patch doesn't touch keeps its identity", () => {
  const before = { workers: { a: { verdict: "well" }, b: { verdict: "well" } }, plan: { epoch: 1 } };
  const copy = structuredClone(before);
  const after = merge(before, { workers: { a: { verdict: "slow" } } });
  assert.deepEqual(before, copy);
  assert.equal(after.workers.a.verdict, "slow");
  assert.equal(after.workers.b, before.workers.b);
  assert.equal(after.plan, before.plan);
  assert.notEqual(after.workers, before.workers);
});

test("a worker called __proto__ is a worker like any other", () => {
  const patch = JSON.parse('{"workers": {"__proto__": {"verdict": "well"}, "constructor": {"verdict": "slow"}}}');
  const after = merge({ workers: {} }, patch);
  assert.deepEqual(Object.keys(after.workers), ["__proto__", "constructor"]);
  assert.equal({}.verdict, undefined);
  assert.equal(after.workers.constructor.verdict, "slow");
});
