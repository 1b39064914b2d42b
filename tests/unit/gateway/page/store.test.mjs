import assert from "node:assert/strict";
import { test } from "node:test";

import { NAMES, SECONDS, Series } from "../../../../swarm/gateway/console/page/series.js";
import { Store } from "../../../../swarm/gateway/console/page/store.js";

// A store whose frames come when the test says so.
function made() {
  const frames = [];
  const store = new Store((draw) => frames.push(draw));
  return { store, frames, frame: () => frames.splice(0).forEach((draw) => draw()) };
}

test("however many deltas come, a part is drawn once a frame, and only if it is concerned", () => {
  const { store, frames, frame } = made();
  const drawn = [];
  store.subscribe(["workers"], ({ view }) => drawn.push(["workers", view?.workers]));
  store.subscribe(["plan", "me"], () => drawn.push(["plan"]));
  frame();
  drawn.length = 0;
  store.replace({ workers: { a: 1 }, plan: null });
  for (let number = 2; number < 50; number += 1) store.patch({ workers: { a: number } });
  assert.equal(frames.length, 1);
  frame();
  assert.deepEqual(drawn, [["workers", { a: 49 }], ["plan"]]);
  store.patch({ workers: { a: null } });
  frame();
  assert.deepEqual(drawn.slice(2), [["workers", {}]]);
});

test("a part of the view that a snapshot no longer has is drawn too", () => {
  const { store, frame } = made();
  store.replace({ recovery: { cause: "w1 was lost" } });
  let seen = "never";
  store.subscribe(["recovery"], ({ view }) => (seen = view.recovery ?? null));
  frame();
  store.replace({ plan: {} });
  frame();
  assert.equal(seen, null);
});

test("one part that fails doesn't keep the others from drawing", () => {
  const { store, frame } = made();
  const told = [];
  globalThis.reportError = (error) => told.push(error.message);
  let isDrawn = false;
  store.subscribe(["me"], () => {
    throw new Error("can't draw");
  });
  store.subscribe(["me"], () => (isDrawn = true));
  frame();
  delete globalThis.reportError;
  assert.deepEqual([told, isDrawn], [["can't draw"], true]);
});

test("a view is fresh while the gateway sends and hears the broker", () => {
  const { store } = made();
  store.setConnection("live");
  assert.equal(store.isFresh, false); // nothing is known yet
  store.replace({ away_s: null });
  assert.equal(store.isFresh, true);
  store.patch({ away_s: 3 });
  assert.equal(store.isFresh, false);
  store.patch({ away_s: null });
  store.setConnection("reconnecting");
  assert.equal(store.isFresh, false);
});

test("who has unsubscribed is drawn no more", () => {
  const { store, frame } = made();
  let num = 0;
  const stop = store.subscribe(["me"], () => (num += 1));
  frame();
  stop();
  store.setMe({ admin: true });
  frame();
  assert.equal(num, 1);
});

test("a delta before any snapshot is refused, so that the reader begins anew", () => {
  assert.throws(() => made().store.patch({ plan: 1 }), SyntaxError);
});

test("only so many events are kept, the newest", () => {
  const { store } = made();
  for (let number = 0; number < 3000; number += 1) store.happened([{ number }]);
  assert.equal(store.events.length, 500);
  assert.equal(store.events.at(-1).number, 2999);
});

test("the series never grow beyond their window, and time never goes back", () => {
  const series = new Series();
  for (let at = 1; at <= 2000; at += 1) series.add(at, { tokens_per_s: at, queued: 0 });
  series.add(1500, { tokens_per_s: -1 });
  assert.equal(series.at.length, SECONDS);
  assert.deepEqual([series.at[0], series.at.at(-1), series.values.tokens_per_s.at(-1)], [1701, 2000, 2000]);
  assert.equal(series.values.first_token_s.at(-1), null);
  for (const name of NAMES) assert.equal(series.values[name].length, SECONDS);
});

test("values from before a long pause go when they are older than the window", () => {
  const series = new Series();
  series.replace({ at: [100, 101, 102], queued: [1, 2, 3] });
  series.add(401.5, { queued: 4 });
  assert.deepEqual(
    [series.at, series.values.queued],
    [
      [102, 401.5],
      [3, 4],
    ],
  );
});

test("series of a snapshot that are of unequal lengths are fitted to their times", () => {
  const series = new Series();
  series.replace({ at: [1, 2, 3], tokens_per_s: [7, 8], queued: [1, 2, 3, 4] });
  assert.deepEqual(series.values.tokens_per_s, [null, 7, 8]);
  assert.deepEqual(series.values.queued, [2, 3, 4]);
  assert.deepEqual(series.values.first_token_s, [null, null, null]);
  series.replace({});
  assert.deepEqual([series.at, series.values.queued], [[], []]);
});

test("a tick adds to the charts only while somebody sends, and nothing of before while the broker is away", (t) => {
  t.mock.timers.enable({ apis: ["Date"], now: 10_000 });
  const { store } = made();
  store.replace({ rates: { tokens_per_s: 5 } });
  store.tick();
  assert.equal(store.series.at.length, 0);
  store.setConnection("live");
  t.mock.timers.setTime(11_000);
  store.tick();
  store.patch({ away_s: 2 });
  t.mock.timers.setTime(12_000);
  store.tick();
  const { at, values } = store.series;
  assert.deepEqual([at, values.tokens_per_s], [[11, 12], [5, null]]);
});

test("a gateway whose clock differs moves the charts on, and is what moments are reckoned by", (t) => {
  t.mock.timers.enable({ apis: ["Date"], now: 10_000 });
  const { store } = made();
  store.setConnection("live");
  for (const at of [400, 5]) {
    store.replace({ at, rates: { tokens_per_s: 1 }, series: { at: [at - 1, at] } });
    t.mock.timers.tick(1000);
    store.tick();
    assert.deepEqual([store.now(), store.series.at], [at + 1, [at - 1, at, at + 1]]);
  }
});

test("a clock that was set is noticed, adds no point, and is not told twice", (t) => {
  t.mock.timers.enable({ apis: ["Date"], now: 10_000 });
  const { store } = made();
  store.setConnection("live");
  store.replace({ rates: {} });
  const told = [500, 3_600_000, 500, -3_600_000, 500].map((step) => {
    t.mock.timers.setTime(Date.now() + step);
    return Boolean(store.tick());
  });
  assert.deepEqual(told, [false, true, false, true, false]);
  assert.ok(store.series.at.length <= 3);
  store.setConnection("paused"); // nobody looks: what it will be told when somebody does is soon enough
  t.mock.timers.setTime(Date.now() + 3_600_000);
  assert.equal(store.tick(), false);
});

test("why it can't connect is told beside the connection, until it can", () => {
  const { store, frame } = made();
  const told = [];
  store.subscribe(["connection"], ({ connection, problem }) => told.push([connection, problem]));
  for (const said of [["reconnecting", "too many"], ["reconnecting", "too many"], ["reconnecting", ""], ["live"]]) {
    store.setConnection(...said);
    frame();
  }
  assert.deepEqual(told, [["reconnecting", "too many"], ["reconnecting", ""], ["live", ""]]);
});
