import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "../../../../swarm/gateway/console/page/format.js";

const plain = (words) => words.replaceAll("\u202f", " ");
const told = (name, ...values) => values.map((value) => plain(format[name](value)));

test("times have three figures that count, from microseconds to days", () => {
  assert.deepEqual(told("seconds", 0, 0.00023526, 0.0019328, 0.099, 0.9996, 1.5, 12.34, 99.96, 3725, 100_000), [
    "0 ms",
    "235 µs",
    "1.93 ms",
    "99.0 ms",
    "1.00 s",
    "1.50 s",
    "12.3 s",
    "1 min 40 s",
    "1 h 2 min",
    "1 d 3 h",
  ]);
});

test("nothing is ever shown as 1000 of a unit that has a next one", () => {
  for (const name of ["seconds", "bytes", "short"]) {
    for (let value = 1e-6; value < 1e9; value *= 1.0007) {
      const told = plain(format[name](value));
      const [, number, unit] = /^([\d.]+) ?(\w*)/.exec(told);
      assert.ok(Number(number) < 1000 || ["d", "TiB", "M"].includes(unit), `${name}(${value}) = ${told}`);
    }
  }
});

test("bytes, counts and shares", () => {
  assert.deepEqual(told("bytes", 0, 999, 1000, 350_253_056, 5_251_135_624), [
    "0 B",
    "999 B",
    "0.977 KiB",
    "334 MiB",
    "4.89 GiB",
  ]);
  assert.deepEqual(told("count", 7, 1281440, 853728.4), ["7", "1 281 440", "853 728"]);
  assert.deepEqual(told("short", 64, 853728, 1281440, 2.5), ["64", "854 k", "1.28 M", "2.50"]);
  assert.deepEqual(
    [plain(format.share(64, 854144)), plain(format.share(1, 2)), format.share(1, 0)],
    ["<1 %", "50 %", "–"],
  );
});

test("what is unknown is a dash, never NaN", () => {
  for (const name of ["seconds", "bytes", "count", "short", "rate", "figures", "duration"]) {
    for (const value of [null, undefined, NaN, Infinity, "5"]) assert.equal(format[name](value), "–", name);
  }
});

test("layers are told with their last one", () => {
  assert.deepEqual([[0, 3], [5, 6], [4, 4], null].map(format.layers), ["0–2", "5", "none", "none"]);
});

test("an axis drops zeros that say nothing, and only these", () => {
  assert.deepEqual(["20.0 ms", "4.00", "2.50 s", "200", "1 k", "0.500 s", "10.05 s"].map(format.trimmed), [
    "20 ms",
    "4",
    "2.5 s",
    "200",
    "1 k",
    "0.5 s",
    "10.05 s",
  ]);
});

test("one and many", () => {
  assert.deepEqual(
    [format.plural(1, "stage"), format.plural(0, "stage"), plain(format.plural(1200, "line"))],
    ["1 stage", "0 stages", "1 200 lines"],
  );
});
