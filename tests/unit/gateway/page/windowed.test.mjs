import assert from "node:assert/strict";
import { test } from "node:test";

import { windowed } from "../../../../swarm/gateway/console/page/windowed.js";

const of = (given) => windowed({ count: 1000, rowHeight: 40, scrollTop: 0, height: 400, ...given });

test("at the top the rows in sight are drawn, and a few more", () => {
  assert.deepEqual(of({}), { first: 0, last: 17, before: 0, after: 983 * 40 });
});

test("wherever it is scrolled to, all rows in sight are drawn, few others are, and the whole keeps its height", () => {
  for (let scrollTop = 0; scrollTop <= 40_000; scrollTop += 37) {
    const { first, last, before, after } = of({ scrollTop });
    const top = Math.min(scrollTop, 40_000 - 400);
    assert.ok(first * 40 <= top && last * 40 >= top + 400, `at ${scrollTop}`);
    assert.ok(last - first <= 23);
    assert.equal(before + (last - first) * 40 + after, 40_000);
  }
});

test("a list that has become shorter than what was scrolled to shows its end", () => {
  const { first, last } = of({ count: 3, scrollTop: 20_000 });
  assert.deepEqual([first, last], [0, 3]);
});

test("nothing to show, no height, and a scroll above the top are no errors", () => {
  assert.deepEqual(of({ count: 0 }), { first: 0, last: 0, before: 0, after: 0 });
  assert.deepEqual(of({ rowHeight: 0 }), { first: 0, last: 0, before: 0, after: 0 });
  assert.equal(of({ scrollTop: -90 }).first, 0);
});
