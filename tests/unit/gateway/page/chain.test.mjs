import assert from "node:assert/strict";
import { test } from "node:test";

import { numLayers, place, rowOf, stagesOf, tally, turn } from "../../../../swarm/gateway/console/page/chain_layout.js";

const row = (name, layers, more = {}) => ({
  name,
  incarnation: `${name}-1`,
  state: "member",
  verdict: "well",
  evidence: "idle",
  layers,
  ...more,
});
const view = (more = {}) => ({
  plan: {
    stages: [
      ["w2", [0, 3]],
      ["w0", [3, 6]],
      ["w1", [6, 8]],
    ].map(([worker, layers]) => ({ worker, layers })),
  },
  workers: { "w0-1": row("w0", [3, 6]), "w1-1": row("w1", [6, 8]), "w2-1": row("w2", [0, 3]) },
  recovery: null,
  recoveries: [],
  ...more,
});
const told = (stages) => stages.map(({ worker, state, number, isGone }) => [worker, state, isGone ? "gone" : number]);

test("stages come in the plan's order with their workers' verdicts", () => {
  const stages = stagesOf(view(), [], 100);
  assert.deepEqual(told(stages), [
    ["w2", "well", 1],
    ["w0", "well", 2],
    ["w1", "well", 3],
  ]);
  assert.deepEqual(
    stages.map(({ key }) => key),
    ["w2-1", "w0-1", "w1-1"],
  );
  assert.equal(numLayers(view()), 8);
});

test("of two lives of one worker the one that is here and has the layers is shown", () => {
  const workers = {
    old: row("w0", [3, 6], { incarnation: "old", state: "lost", verdict: "dead" }),
    young: row("w0", [3, 6], { incarnation: "young" }),
  };
  assert.equal(rowOf(workers, "w0", [3, 6]).incarnation, "young");
  assert.equal(rowOf(workers, "w9", [3, 6]), null);
});

test("a stage goes dark as soon as its worker is dead, or gone, or a recovery names it", () => {
  const before = stagesOf(view(), [], 100);
  const dead = view();
  dead.workers["w0-1"] = row("w0", [3, 6], { verdict: "dead", evidence: "its connection closed" });
  assert.deepEqual(told(stagesOf(dead, before, 101))[1], ["w0", "lost", 2]);
  const gone = view({ recovery: { workers: ["w0"], evidence: "w0: its connection closed" } });
  delete gone.workers["w0-1"];
  const shown = stagesOf(gone, before, 101);
  assert.deepEqual(told(shown)[1], ["w0", "lost", 2]);
  assert.equal(shown[1].key, "w0-1"); // the same card goes dark
  assert.equal(shown[1].row.name, "w0"); // what was known of it stays
  assert.equal(shown[1].evidence, "w0: its connection closed");
});

test("the next life of a worker that died, which holds nothing yet, does not make its stage well", () => {
  const before = stagesOf(view(), [], 100);
  const again = view({ recovery: { workers: ["w0"], evidence: "w0: its connection closed" } });
  delete again.workers["w0-1"];
  again.workers["w0-2"] = row("w0", null, { incarnation: "w0-2", resident_bytes: 0 });
  const [, lost] = stagesOf(again, before, 101);
  assert.deepEqual([lost.key, lost.state, lost.row.incarnation], ["w0-1", "lost", "w0-1"]);
});

test("before anything serves, the stages of the plan that is being prepared are shown", () => {
  const stages = view().plan.stages;
  const shown = stagesOf(view({ plan: { stages: [], coming: { stages } } }), [], 1);
  assert.deepEqual(
    shown.map(({ worker }) => worker),
    ["w2", "w0", "w1"],
  );
});

test("after the new plan the lost stage stays at its place for some seconds, without a number, then goes", () => {
  const before = stagesOf(view(), [], 100);
  const after = view({ recoveries: [{ workers: ["w0"], evidence: "w0: its connection closed", began_at: 100.5 }] });
  after.plan = {
    stages: [
      { worker: "w2", layers: [0, 6] },
      { worker: "w1", layers: [6, 8] },
    ],
  };
  delete after.workers["w0-1"];
  const soon = stagesOf(after, before, 101);
  assert.deepEqual(told(soon), [
    ["w2", "well", 1],
    ["w0", "lost", "gone"],
    ["w1", "well", 2],
  ]);
  const later = stagesOf(after, soon, 106.9);
  assert.deepEqual(told(later)[1], ["w0", "lost", "gone"]);
  assert.deepEqual(told(stagesOf(after, later, 107.1)), [
    ["w2", "well", 1],
    ["w1", "well", 2],
  ]);
});

test("one that was drained leaves no ghost", () => {
  const before = stagesOf(view(), [], 100);
  const after = view();
  after.plan = {
    stages: [
      { worker: "w2", layers: [0, 6] },
      { worker: "w1", layers: [6, 8] },
    ],
  };
  assert.deepEqual(told(stagesOf(after, before, 101)), [
    ["w2", "well", 1],
    ["w1", "well", 2],
  ]);
});

test("a worker that came back under its name in the recovery's plan is well", () => {
  const again = view({ recovery: { workers: ["w0"], evidence: "" } });
  again.workers = { ...again.workers, "w0-2": row("w0", [3, 6], { incarnation: "w0-2" }) };
  delete again.workers["w0-1"];
  assert.deepEqual(told(stagesOf(again, [], 101))[1], ["w0", "well", 2]);
});

test("no plan, no stages", () => {
  assert.deepEqual(stagesOf(view({ plan: null }), [], 1), []);
  assert.deepEqual(stagesOf(null, [], 1), []);
  assert.equal(numLayers(null), 0);
});

test("states are counted, well first", () => {
  const stages = ["lost", "well", "slow", "well"].map((state) => ({ state }));
  assert.deepEqual(tally(stages), [
    ["well", 2],
    ["lost", 1],
    ["slow", 1],
  ]);
});

test("cards get places in rows that are as even as can be, each its own, the broker at both ends", () => {
  for (let num = 1; num <= 12; num += 1) {
    for (const width of [360, 700, 1024, 1440, 2560]) {
      const { columns, isNarrow, cells, begin, end } = place(num, width);
      const all = [begin, ...cells, end].map(({ column, row }) => `${column} ${row}`);
      assert.equal(new Set(all).size, num + 2, `${num} in ${width}`);
      assert.ok(isNarrow || columns <= Math.max(1, Math.floor((width - 152) / 264)));
      assert.ok(cells.every(({ column }) => column <= columns + 1));
    }
  }
  assert.equal(place(7, 1440).columns, 4); // four and three, not five and two... as even as the width allows
  assert.equal(place(3, 360).isNarrow, true);
});

test("a turn visits link, stage, link and so on, without a hole, whatever the speed", () => {
  for (const num of [1, 3, 12, 100]) {
    const { links, stages, milliseconds, speed } = turn(num, 5000);
    const parts = links.flatMap((link, index) => (stages[index] ? [link, stages[index]] : [link]));
    assert.equal(parts[0].from, 0);
    assert.equal(parts.at(-1).to, 1);
    parts.slice(1).forEach((part, index) => assert.equal(part.from, parts[index].to));
    assert.ok(milliseconds >= 900 && milliseconds <= 6000 && speed <= 2.5);
  }
});
