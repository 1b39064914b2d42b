// Layout of the chain. Pure: takes a view and the stages shown before, and returns the stages to draw.

export const MOST_CARDS = 12; // beyond this, stages are drawn as tiles
const LINGER_S = 6; // seconds that a lost stage stays visible; most recoveries are faster than a viewer notices
const CARD_WIDTH = 264; // pixels, with the link before it
const END_WIDTH = 90;
const NARROW = 620;

// Of several incarnations with one name, prefer a current member with these layers.
export function rowOf(workers, name, layers) {
  const fits = (row) => (row.state === "member" ? 2 : 0) + (sameRange(row.layers, layers) ? 1 : 0);
  let best = null;
  for (const row of Object.values(workers ?? {})) {
    if (row.name === name && (best === null || fits(row) > fits(best))) best = row;
  }
  return best;
}

const sameRange = (a, b) => a?.[0] === b?.[0] && a?.[1] === b?.[1];

// The plan's stages with their workers' rows, and recently lost ones at their old places. `before`: the last result.
export function stagesOf(view, before, now) {
  const planned = stagesIn(view).map((stage) => planStage(view, stage, before, now));
  const shown = planned.map((stage) => stage.key);
  before.forEach((stage, index) => {
    if (shown.includes(stage.key) || !lingers(view, stage, now)) return;
    const ghost = {
      ...stage, state: "lost", isGone: true, lostAt: stage.lostAt ?? now, evidence: evidenceOf(view, stage),
    };
    planned.splice(Math.min(index, planned.length), 0, ghost);
  });
  let number = 0;
  return planned.map((stage) => (stage.isGone ? stage : { ...stage, number: (number += 1) }));
}

// While there is no active plan, those of the plan in preparation.
function stagesIn(view) {
  const plan = view?.plan;
  return plan?.stages?.length ? plan.stages : (plan?.coming?.stages ?? []);
}

function planStage(view, stage, before, now) {
  const known = before.find((other) => other.worker === stage.worker && !other.isGone);
  const found = rowOf(view.workers, stage.worker, stage.layers);
  const isAnother = found && known && found.incarnation !== known.key && !sameRange(found.layers, stage.layers);
  // the next incarnation is connected, but holds no layers yet
  const row = isAnother && isNamed(view, stage.worker) ? null : found;
  const isLost = row === null || isLostNow(view, row);
  return {
    key: row?.incarnation ?? known?.key ?? stage.worker, worker: stage.worker, stage, row: row ?? known?.row ?? null,
    state: isLost ? "lost" : row.verdict || "loading",
    evidence: isLost ? evidenceOf(view, { worker: stage.worker, row }) : row.evidence,
    lostAt: isLost ? (known?.lostAt ?? now) : null, isGone: false,
  };
}

const isNamed = (view, worker) => Boolean(view.recovery?.workers?.includes(worker));

// A recovery names workers, not incarnations: a worker that is a member again and well is a new incarnation.
const isLostNow = (view, row) =>
  (isNamed(view, row.name) && (row.state !== "member" || row.verdict !== "well")) ||
  ["dead", "silent", "hung", "lied", "failed", "differs", "left"].includes(row.verdict);

function lingers(view, stage, now) {
  const name = stage.worker;
  const wasLost = stage.lostAt !== null || isNamed(view, name) || isOfLast(view, name, now);
  return wasLost && now - (stage.lostAt ?? now) < LINGER_S;
}

function isOfLast(view, name, now) {
  const last = view.recoveries?.[0];
  return Boolean(last?.workers?.includes(name)) && now - (last.began_at ?? 0) < LINGER_S * 2;
}

function evidenceOf(view, { worker, row }) {
  const told = [view.recovery, view.recoveries?.[0]].find((one) => one?.workers?.includes(worker));
  return told?.evidence || row?.evidence || "it is not connected";
}

export const numLayers = (view) => Math.max(0, ...stagesIn(view).map((stage) => stage.layers[1]));

// [["well", 2], ["slow", 1]], well first.
export function tally(stages) {
  const counts = new Map();
  for (const { state } of stages) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].sort(([a], [b]) => (b === "well") - (a === "well") || a.localeCompare(b));
}

// Rows of about equal length, the broker at both ends. Columns count from 1.
export function place(num, width) {
  const isNarrow = width < NARROW;
  if (isNarrow) {
    const cells = Array.from({ length: num }, (_, index) => ({ column: 1, row: index + 2 }));
    return { columns: 1, isNarrow, cells, begin: { column: 1, row: 1 }, end: { column: 1, row: num + 2 } };
  }
  const fit = Math.max(1, Math.floor((width - 2 * END_WIDTH) / CARD_WIDTH));
  const rows = Math.max(1, Math.ceil(num / fit));
  const columns = Math.max(1, Math.ceil(num / rows));
  const cells = Array.from({ length: num }, (_, index) => ({
    column: (index % columns) + 2, row: Math.floor(index / columns) + 1,
  }));
  const last = cells.at(-1) ?? { column: 1, row: 1 };
  return { columns, isNarrow, cells, begin: { column: 1, row: 1 }, end: { column: last.column + 1, row: last.row } };
}

// The part of one cycle for each link and stage. Real steps take milliseconds; the animation has at most a few cycles
// per second, faster for a faster swarm.
export function turn(num, stepsPerSecond) {
  const slots = num * 3 + 1; // a link takes one slot, a stage two
  const part = (from, to) => ({ from: from / slots, to: to / slots });
  const links = Array.from({ length: num + 1 }, (_, index) => part(index * 3, index * 3 + 1));
  const stages = Array.from({ length: num }, (_, index) => part(index * 3 + 1, index * 3 + 3));
  const speed = Math.min(2.5, Math.max(0.5, 0.5 + Math.log10(Math.max(1, stepsPerSecond)) / 2));
  return { links, stages, milliseconds: Math.max(900, Math.min(6000, slots * 110)), speed };
}
