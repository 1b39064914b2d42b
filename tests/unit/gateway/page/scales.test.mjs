import assert from "node:assert/strict";
import { test } from "node:test";

import { axis, highestOf, nearest, segments, summary } from "../../../../swarm/gateway/console/page/scales.js";

test("an axis has few round steps and reaches the highest value", () => {
  for (let highest = 1e-5; highest < 1e6; highest *= 1.37) {
    const { ticks, top } = axis(highest);
    assert.ok(top >= highest * (1 - 1e-9) && top <= highest * 2.6, `${highest}: ${ticks}`);
    assert.ok(ticks.length >= 2 && ticks.length <= 4 && ticks[0] === 0);
  }
  assert.deepEqual(axis(118), { ticks: [0, 100, 200], top: 200 });
  assert.deepEqual(axis(0.021), { ticks: [0, 0.02, 0.04], top: 0.04 });
});

test("without any value there is an axis nevertheless", () => {
  assert.deepEqual(axis(0), { ticks: [0, 1], top: 1 });
  assert.equal(highestOf([null, null]), 0);
});

test("a line breaks where a value is missing and where nobody looked", () => {
  assert.deepEqual(segments([1, 2, 3, 4, 5, 60, 61], [9, 9, null, 9, 9, 9, 9]), [
    [0, 1],
    [3, 4],
    [5, 6],
  ]);
  assert.deepEqual(segments([], []), []);
  assert.deepEqual(segments([1], [null]), []);
});

test("the nearest time is found, at the ends too", () => {
  const at = [10, 11, 12, 20];
  assert.deepEqual(
    [-5, 10.4, 10.6, 15, 17, 99].map((time) => nearest(at, time)),
    [0, 0, 1, 2, 3, 3],
  );
  assert.equal(nearest([], 5), -1);
});

test("a series in words knows its lowest, highest and last value", () => {
  assert.deepEqual(summary([null, 4, 2, null, 3, null]), { lowest: 2, highest: 4, last: 3 });
  assert.equal(summary([null]), null);
});
