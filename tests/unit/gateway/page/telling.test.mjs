import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError, Api } from "../../../../swarm/gateway/console/page/api.js";
import { Live, waitAfter } from "../../../../swarm/gateway/console/page/live.js";
import { MOST_LINES, foundIn, timeOf, withOlder } from "../../../../swarm/gateway/console/page/pages.js";
import { told } from "../../../../swarm/gateway/console/page/dialogs.js";
import { Store } from "../../../../swarm/gateway/console/page/store.js";
import { Latest, keyOf, rowsOf, tookOf } from "../../../../swarm/gateway/console/page/phases.js";

import { compared, epochWords, handWords, readCap, readPin, remedies, waitsSupposed } from "../../../../swarm/gateway/console/page/plan_words.js";

const RECOVERY = {
  cause: "w0 was lost",
  phases: [
    { name: "verdict", took_s: 0.04, predicted_s: null, state: "done" },
    { name: "plan", took_s: 0.01, predicted_s: null, state: "done" },
    { name: "load", took_s: null, predicted_s: 0.05, state: "runs" },
  ],
};

test("a recovery's phases lie one after the other on one line of time; those not told yet wait", () => {
  const rows = rowsOf(RECOVERY);
  assert.deepEqual(
    rows.map(({ state }) => state),
    ["done", "done", "runs", "waits", "waits", "waits"],
  );
  assert.deepEqual(rows.map(({ from, to }) => [from, to].map((share) => share.toFixed(2))).slice(0, 3), [
    ["0.00", "0.40"],
    ["0.40", "0.50"],
    ["0.50", "1.00"],
  ]);
});

test("what it took counts from the verdict on, as the report's total does", () => {
  assert.equal(tookOf(RECOVERY), 0.01);
  assert.equal(tookOf({ ...RECOVERY, total_s: 0.2 }), 0.2);
  assert.equal(rowsOf({})[0].from, 0);
  assert.equal(keyOf({ key: "7.5", epoch: 0, cause: "w1 was lost" }), keyOf({ key: "7.5", epoch: 3, cause: "w1, w2" }));
  assert.notEqual(keyOf({ epoch: 2, began_at: null }), keyOf({ epoch: 3, began_at: null }));
});

test("where no plan is possible the ways out are named, those that fit what is waited for", () => {
  const ways = (words) => remedies(words).map(({ what }) => what);
  assert.deepEqual(ways("other pins or caps: with those of [plan], the layers can't be laid out over w0 4 MiB"), [
    "Remove the pins and caps",
  ]);
  assert.deepEqual(ways("900 more MiB memory: village needs 4 MiB"), ["Add memory", "Use a smaller dtype"]);
  assert.deepEqual(ways("open routes between the workers: w1 can't reach w2"), ["Open the ports"]);
  assert.deepEqual(ways("a worker besides w0, w1, which must not be used"), ["Let more workers be used"]);
  assert.deepEqual(ways(""), []);
  const supposed = waitsSupposed("a worker besides w0, which must not be used", { without: ["w0"], exclude: [] });
  assert.equal(supposed, "a worker besides w0, which is assumed gone");
  assert.deepEqual(ways(supposed), ["Assume fewer gone"]);
  assert.deepEqual(remedies(undefined), []);
});

test("a plan whose successor is in force says so", () => {
  const plan = { epoch: 5, state: "in force" };
  const status = { state: "serving", epoch: 6 };
  assert.equal(epochWords({ ...plan, epoch: 6 }, status), "epoch 6, in force");
  assert.equal(epochWords(plan, status), "plan of epoch 5; epoch 6 is active, its report follows");
  assert.equal(epochWords({ state: "preparing" }, status), "preparing; epoch 6 is active, its report follows");
  assert.equal(epochWords(plan, { state: "preparing", epoch: 6 }), "epoch 5, in force");
  assert.deepEqual([epochWords(null, null), epochWords({ state: "coming" }, null)], ["no plan", "coming"]);
});

test("a plan that was laid down by hand is told part by part", () => {
  const hand = { pins: { w0: [0, 3], w3: [7, 8] }, caps: { w1: 1 }, exclude: ["w2"], objective: "latency" };
  assert.equal(
    handWords(hand).replaceAll("\u202f", " "),
    "w0 holds only layers 0–2; w3 holds only layer 7; w1 holds at most 1 layer; w2 gets none; the objective is latency",
  );
  assert.deepEqual([handWords(undefined), handWords({})], ["", ""]);
});

test("pins and caps are read as they are written, and refused with the worker's name", () => {
  assert.deepEqual(
    [readPin("w1", "0-10"), readPin("w1", " 4 – 4 "), readPin("w1", "7")],
    [
      [0, 11],
      [4, 5],
      [7, 8],
    ],
  );
  assert.throws(() => readPin("w1", "9-2"), /For w1, the last layer comes before/);
  assert.throws(() => readPin("w1", "all"), /For w1/);
  assert.equal(readCap("w1", " 12 "), 12);
  assert.throws(() => readCap("w1", "0"), /For w1/);
});

test("a supposed plan is compared with that in force", () => {
  const now = {
    forecast: { tokens_per_second: 760, step_s: 0.0105, bottleneck: "w2" },
    stages: [{ worker: "w2", layers: [0, 8] }],
  };
  const [speed, step, , stages] = compared(now, { tokens_per_second: 500, step_s: 0.016, stages: [] });
  assert.deepEqual(speed, ["Tokens/s", "760", "500"]);
  assert.equal(step[2].replaceAll("\u202f", " "), "16.0 ms");
  assert.deepEqual(stages, ["Stages", "w2 0–7", "none"]);
  assert.equal(compared(null, {}).length, 4);
  const more = { tokens_per_second: 1500, step_s: 0.0053, now_step_s: 0.00525, stages: [] };
  const [faster, shorter] = compared(now, more); // for more sequences at a time than are planned for now
  assert.deepEqual(
    faster.map((each) => each.replaceAll("\u202f", " ")),
    ["Tokens/s", "1.52 k", "1.50 k"],
  );
  assert.equal(shorter[1].replaceAll("\u202f", " "), "5.25 ms");
});

test("pages of a log are put before those that are there, and never more than can be held", () => {
  const page = (from) => Array.from({ length: 200 }, (_, index) => from + index);
  let lines = page(10_000);
  for (let number = 1; number <= 20; number += 1) lines = withOlder(lines, page(10_000 - 200 * number));
  assert.equal(lines.length, MOST_LINES);
  assert.equal(lines[0], 6000);
});

test("what a search found is told by what was looked through", () => {
  assert.equal(foundIn(1, false, false), "1 line, newest last, from the beginning");
  assert.equal(foundIn(200, true, true), "200 lines that match, newest last");
  assert.match(foundIn(0, true, true), /have not been searched/);
  assert.equal(foundIn(0, true, false), "No matching lines.");
  assert.equal(foundIn(0, false, false), "This log is empty.");
});

test("what an order came to begins with a capital, but for a worker's name", () => {
  assert.equal(told({ text: "the request 8f3c is ended" }), "The request 8f3c is ended.");
  assert.equal(told({ text: "a worker is started" }), "A worker is started.");
  assert.equal(told({ text: "w0 gets no new layers", body: { lasts: "until then" } }), "w0 gets no new layers. It lasts until then.");
});

test("the time of a line is that of its day, whether it was told as text or as seconds", () => {
  assert.deepEqual(["2026-11-24T19:33:06.123456Z", 0, undefined, "noon"].map(timeOf), [
    "19:33:06.123",
    "00:00:00.000",
    "",
    "noon",
  ]);
});

test("after failures the wait grows to a bound, and differs from tab to tab", () => {
  const waits = [0, 1, 2, 3, 10, 1000].map((failures) => waitAfter(failures, 1));
  assert.deepEqual(waits, [0.25, 0.5, 1, 2, 5, 5]);
  assert.equal(waitAfter(3, 0), 1);
});

test("a tab that rested tries again until the gateway can be reached", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  globalThis.document = Object.assign(new EventTarget(), { hidden: false });
  globalThis.addEventListener = () => {};
  t.after(() => (delete globalThis.document, delete globalThis.addEventListener));
  const look = (hidden) => {
    document.hidden = hidden;
    document.dispatchEvent(new Event("visibilitychange"));
  };
  const pass = async (seconds) => {
    for (let passed = 0; passed < seconds; passed += 1) {
      t.mock.timers.tick(1000);
      await new Promise(setImmediate);
    }
  };
  const store = new Store(() => {});
  let [tries, isThere] = [0, true];
  const stream = (path, { onEvent, signal }) =>
    new Promise((_, refuse) => {
      tries += 1;
      if (!isThere) return refuse(new ApiError("too many consoles are open", 503));
      signal.addEventListener("abort", () => refuse(new DOMException("let go", "AbortError")));
      onEvent({ event: "snapshot", data: "{}", id: "1" });
    });
  new Live({ stream }, store).start();
  await pass(1);
  assert.equal(store.connection, "live");
  look(true);
  await pass(90);
  assert.deepEqual([store.connection, tries], ["paused", 1]);
  isThere = false;
  look(false);
  await pass(30);
  assert.ok(tries > 4, `${tries} tries`);
  assert.deepEqual([store.connection, store.problem], ["reconnecting", "too many consoles are open"]);
  isThere = true;
  await pass(6);
  assert.deepEqual([store.connection, store.problem], ["live", ""]);
});

class FakeStorage extends Map {
  getItem(key) {
    return this.get(key) ?? null;
  }
  setItem(key, value) {
    this.set(key, value);
  }
  removeItem(key) {
    this.delete(key);
  }
}

const answering =
  (status, body, asked = []) =>
  async (path, init) => {
    asked.push([path, init]);
    return new Response(typeof body === "string" ? body : JSON.stringify(body), { status });
  };

test("the key goes along in a header, never in the address, and lasts in the tab", async () => {
  const asked = [];
  const storage = new FakeStorage();
  const api = new Api({ storage, fetcher: answering(200, {}, asked) });
  await api.get("/console/me");
  api.setKey(" secret ");
  await api.post("/console/orders", { verb: "drain" });
  assert.equal(asked[0][1].headers.Authorization, undefined);
  assert.equal(asked[1][1].headers.Authorization, "Bearer secret");
  assert.ok(asked.every(([path]) => !path.includes("secret")));
  assert.equal(new Api({ storage }).key, "secret");
  api.setKey("");
  assert.equal(storage.size, 0);
});

test("refusals become errors with the gateway's words; a refused key asks for another", async () => {
  const api = new Api({ storage: new FakeStorage(), fetcher: answering(401, { error: { message: "no such key" } }) });
  const asked = [];
  api.onRefused = (words) => asked.push(words);
  await assert.rejects(
    api.get("/x"),
    (error) => error instanceof ApiError && error.status === 401 && error.message === "no such key",
  );
  api.setKey("wrong");
  await assert.rejects(api.get("/x"));
  assert.deepEqual(asked, ["", "no such key"]); // without a key there is nothing to complain of
});

test("an answer that is no JSON, and none at all, are told in words", async () => {
  const storage = new FakeStorage();
  await assert.rejects(new Api({ storage, fetcher: answering(502, "<h1>bad</h1>") }).get("/x"), /refused this \(502/);
  await assert.rejects(new Api({ storage, fetcher: answering(200, "<h1>") }).get("/x"), /not JSON/);
  const dead = async () => {
    throw new TypeError("fetch failed");
  };
  await assert.rejects(new Api({ storage, fetcher: dead }).get("/x"), /does not answer/);
  const broken = async () => ({ ok: true, json: () => Promise.reject(new TypeError("network error")) });
  await assert.rejects(
    new Api({ storage, fetcher: broken }).order("drain"),
    (error) => error instanceof ApiError && /broke off/.test(error.message),
  );
});

test("an order is waited for as long as layers may take to be handed over", async (t) => {
  const deadlines = [];
  t.mock.method(AbortSignal, "timeout", (ms) => deadlines.push(ms) && new AbortController().signal);
  const api = new Api({ storage: new FakeStorage(), fetcher: async () => new Response("{}") });
  await api.get("/console/me");
  await api.order("stop", { worker: "w0" });
  assert.deepEqual(deadlines, [30_000, 130_000]);
});

test("a stream gives its events in order, and is let go of when its reader fails", async () => {
  const api = new Api({
    storage: new FakeStorage(),
    fetcher: answering(200, "data: 1\n\nid: a\nevent: delta\ndata: 2\n\n"),
  });
  const events = [];
  await api.stream("/console/live", { onEvent: (event) => events.push(event) });
  assert.deepEqual(
    events.map(({ event, data, id }) => [event, data, id]),
    [
      ["message", "1", null],
      ["delta", "2", "a"],
    ],
  );
  const failing = () => {
    throw new SyntaxError("no JSON");
  };
  await assert.rejects(api.stream("/console/live", { onEvent: failing }), SyntaxError);
});

test("in short is told what runs, and for a while what has just ended; nothing of before the page", () => {
  const [old, fresh] = [{ cause: "w0 was lost", began_at: 1 }, { cause: "w1 was lost", began_at: 100.5, total_s: 1 }];
  const latest = new Latest();
  assert.equal(latest.of({ recovery: null, recoveries: [old] }, 100), null);
  assert.equal(latest.of({ recovery: fresh, recoveries: [old] }, 101), fresh);
  assert.equal(latest.of({ recovery: null, recoveries: [fresh, old] }, 102), fresh);
  assert.equal(latest.of({ recovery: null, recoveries: [fresh, old] }, 110), fresh);
  assert.equal(latest.of({ recovery: null, recoveries: [fresh, old] }, 115), null);
  const rested = new Latest();
  assert.equal(rested.of({ recovery: null, recoveries: [old] }, 50), null);
  assert.equal(rested.of({ recovery: null, recoveries: [fresh, old] }, 3700), null, "over for an hour");
  const early = new Latest();
  assert.equal(early.of({ recovery: null, recoveries: null }, 99), null);
  assert.equal(early.of({ recovery: null, recoveries: [old] }, 100), null, "of before the page, told late");
  const first = new Latest();
  assert.equal(first.of({ recovery: null, recoveries: [] }, 1), null);
  assert.equal(first.of({ recovery: null, recoveries: [fresh] }, 102), fresh, "over before anybody saw it run");
});
