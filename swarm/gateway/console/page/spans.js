// Where each token's time went: a trace as spans of time by hop, what is slowest in words, and how two traces differ.
// Pure.

import { layers as rangeOf, layerWord, quoted, seconds, share } from "./format.js";

// In the order in which they happen: {name, field: of reports, label, doing, meaning, isOfStage: told for each apart}.
export const PARTS = [
  ["queue", "queue", "queueing", "in no step: waiting for room or a turn"],
  ["wire", "wire", "on the wire", "between broker and stages: sockets, networks, encoding"],
  ["wait", "waiting", "waiting", "in a stage, behind other steps", true],
  ["compute", "compute", "computing", "in the layers", true],
  ["sample", "sampling", "sampling", "from logits to tokens", true],
  ["broker", "broker", "in the broker", "from the answer to the reader's socket"],
  ["unaccounted", "unaccounted", "unaccounted for", "the rest: the stages' bookkeeping"],
].map(([name, label, doing, meaning, isOfStage = false]) => {
  return { name, field: `${name}_s`, label, doing, meaning, isOfStage };
});
const BEFORE = PARTS.filter(({ name }) => name === "queue" || name === "wire");
const OF_STAGE = PARTS.filter(({ isOfStage }) => isOfStage);
const BEHIND = PARTS.filter(({ name }) => name === "broker" || name === "unaccounted");

export const MOST_TOKENS = 4000; // the oldest are let go of: a chart of more is no clearer

// The trace of one continuation, put together from reports that each list the first and the last thousand tokens.
export class Spans {
  lanes = []; // {part, worker, layers}: a part, in a stage if it is of one
  tokens = []; // {index, began_s, total_s, lengths: seconds by lane}
  numTokens = 0; // that the broker has drawn
  numTraced = 0; // whose times it knows
  sums = null;
  stages = [];
  numLetGo = 0;
  #laneAt = new Map();

  // Take `report.sequences[n]`. Returns whether anything is new.
  add(sequence) {
    const before = `${this.tokens.length}/${this.tokens.at(-1)?.total_s}/${sequence.num_tokens}`;
    this.numTokens = sequence.num_tokens ?? this.numTokens;
    this.numTraced = sequence.num_traced ?? this.numTraced;
    this.sums = sequence.sums ?? this.sums;
    this.stages = sequence.stages ?? this.stages;
    if (sequence.tokens?.length > 0) this.tokens.pop(); // it may not have been sent yet when it was told
    const last = this.tokens.at(-1)?.index ?? -1;
    for (const token of sequence.tokens ?? []) if (token.index > last) this.tokens.push(this.#read(token));
    if (this.tokens.length > MOST_TOKENS)
      this.numLetGo += this.tokens.splice(1, this.tokens.length - MOST_TOKENS).length;
    return before !== `${this.tokens.length}/${this.tokens.at(-1)?.total_s}/${this.numTokens}`;
  }

  #read(token) {
    const lengths = [];
    const put = (part, value, stage) => {
      if (value > 0) lengths[this.#lane(part, stage)] = value;
    };
    for (const part of BEFORE) put(part, token[part.field]);
    for (const stage of token.stages ?? []) for (const part of OF_STAGE) put(part, stage[part.field], stage);
    for (const part of BEHIND) put(part, token[part.field]);
    return { index: token.index, began_s: token.began_s, total_s: token.total_s, lengths };
  }

  #lane(part, stage) {
    const key = stage ? `${part.name}/${stage.worker}/${stage.layers}` : part.name;
    const known = this.#laneAt.get(key);
    if (known !== undefined) return known;
    this.#laneAt.set(key, this.lanes.length);
    return this.lanes.push({ part, worker: stage?.worker ?? "", layers: stage?.layers ?? null }) - 1;
  }

  // A token's spans in the order in which they happened: [{part, worker, layers, seconds}].
  spansOf(token) {
    const found = [];
    token.lengths.forEach((length, lane) => found.push({ ...this.lanes[lane], seconds: length }));
    const rank = (span) => (span.part.isOfStage ? 2 : PARTS.indexOf(span.part) < 2 ? PARTS.indexOf(span.part) : 4);
    return found.sort((a, b) => rank(a) - rank(b) || (a.layers?.[0] ?? 0) - (b.layers?.[0] ?? 0) || inOrder(a, b));
  }

  // The sums over all traced tokens, in the same form: by the broker's own sums, which know tokens that are not listed.
  get totals() {
    if (!this.sums) return [];
    const whole = PARTS.filter(({ isOfStage }) => !isOfStage).map((part) => ({
      part,
      worker: "",
      layers: null,
      seconds: this.sums[part.field] ?? 0,
    }));
    const ofStages = this.stages.flatMap((stage) =>
      OF_STAGE.map((part) => ({ part, worker: stage.worker, layers: stage.layers, seconds: stage[part.field] ?? 0 })),
    );
    return [...whole.slice(0, 2), ...ofStages, ...whole.slice(2)].filter(({ seconds: length }) => length > 0);
  }
}

const inOrder = (a, b) => PARTS.indexOf(a.part) - PARTS.indexOf(b.part);
const longest = (spans) => spans.reduce((most, span) => (span.seconds > (most?.seconds ?? 0) ? span : most), null);

// "computing in w1 (layers 6–7)", "queueing"
export function doing({ part, worker, layers }) {
  if (!part.isOfStage) return part.doing;
  return `${part.doing} in ${worker}${layers ? ` (${layerWord(layers)} ${rangeOf(layers)})` : ""}`;
}

export const sumByPart = (spans) =>
  PARTS.map((part) => ({
    part,
    seconds: spans.filter((span) => span.part === part).reduce((sum, span) => sum + span.seconds, 0),
  }));

// --- the slowest, in words

export function slowestToken(tokens) {
  return tokens.reduce((most, token) => (token.total_s > (most?.total_s ?? -1) ? token : most), null);
}

// What a reader wants to know first. `textOf(index)` is a token's text, "" where it isn't known.
export function inWords(spans, textOf = () => "") {
  if (spans.tokens.length === 0) return [];
  const words = [];
  const tell = (what, token) =>
    words.push(`${what}: ${seconds(token.total_s)}, the largest part ${largest(spans, token)}.`);
  const [first] = spans.tokens;
  if (first.index === 0) tell("To the first token", first);
  const slowest = slowestToken(spans.tokens.filter(({ index }) => index > 0));
  if (slowest) tell(`The slowest after it, ${named(slowest, textOf)}`, slowest);
  const [most, ...others] = largestFirst(spans.totals);
  if (most) {
    const told = [seconds(most.seconds), share(most.seconds, spans.sums.total_s), where(most)];
    const ofAll = told.filter(Boolean).join(", ");
    const rest = others.slice(0, 2).map(({ part, seconds: length }) => `${part.doing} ${seconds(length)}`);
    const then = rest.length > 0 ? `; then ${rest.join(", ")}` : "";
    words.push(`Over all tokens the largest part was ${most.part.doing}: ${ofAll}${then}.`);
  }
  return words;
}

function largest(spans, token) {
  const [most] = largestFirst(spans.spansOf(token));
  if (!most) return "not accounted for";
  return `${most.part.doing} (${[seconds(most.seconds), where(most)].filter(Boolean).join(", ")})`;
}

// Each part as a whole, over all stages, so that like is compared with like; and in which stage it took longest.
const largestFirst = (spans) =>
  sumByPart(spans)
    .filter(({ seconds: length }) => length > 0)
    .sort((a, b) => b.seconds - a.seconds)
    .map((whole) => ({ ...whole, slowest: longest(spans.filter(({ part }) => part === whole.part)) }));

const where = ({ part, slowest }) => (part.isOfStage ? `longest in ${slowest.worker}` : "");

export function named({ index }, textOf = () => "") {
  const text = textOf(index);
  return text ? `token ${index + 1} ${quoted(text)}` : `token ${index + 1}`;
}

const WORTH_TELLING = 0.01; // of a token's time: what is less is told together

// One token with its hops, for who hears or points at it.
export function tokenInWords(spans, token, textOf) {
  const parts = spans.spansOf(token).filter((span) => span.seconds >= WORTH_TELLING * token.total_s);
  const told = parts.map((span) => `${doing(span)} ${seconds(span.seconds)}`);
  const rest = parts.reduce((left, span) => left - span.seconds, token.total_s);
  if (told.length > 0 && rest > 0.001 * token.total_s) told.push(`all else ${seconds(rest)}`);
  return `${capital(named(token, textOf))}: ${seconds(token.total_s)}${told.length > 0 ? `: ${told.join(", ")}` : ""}.`;
}

export const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);

// --- the chart's columns

// Columns of at least `narrowest` pixels: {token, first, last}, each of one token, or where there are more, of several
// told by their slowest. `scale` is the time at the top: what towers above all others (a first token with a long
// prompt) is cut.
export function columnsOf(tokens, width, narrowest = 3) {
  const room = Math.max(1, Math.floor(width / narrowest));
  const perColumn = Math.max(1, Math.ceil(tokens.length / room));
  const columns = [];
  for (let at = 0; at < tokens.length; at += perColumn) {
    const some = tokens.slice(at, at + perColumn);
    columns.push({ token: slowestToken(some), first: some[0].index, last: some.at(-1).index });
  }
  return { columns, perColumn, scale: scaleOf(tokens) };
}

export function scaleOf(tokens) {
  const totals = tokens.map(({ total_s }) => total_s).sort((a, b) => a - b);
  const tallest = totals.at(-1) ?? 0;
  const usual = totals[Math.floor((totals.length - 1) * 0.95)] ?? 0;
  return tallest > 3 * usual && totals.length > 4 ? 1.5 * usual : tallest;
}

// --- two traces

// {rows: [{label, first, second, difference}], words: […]} of two Spans. Times are per token, as answers differ in
// length.
export function differences(a, b, [nameA, nameB] = ["the first", "the second"]) {
  const rows = PARTS.map((part) => rowOf(part.label, perToken(a, part.field), perToken(b, part.field)));
  const whole = rowOf("each token", perToken(a, "total_s"), perToken(b, "total_s"));
  const first = rowOf("first token", a.tokens[0]?.total_s ?? null, b.tokens[0]?.total_s ?? null);
  const words = [
    speedWords(whole, nameA, nameB),
    causeWords(rows, whole),
    firstWords(first, nameA, nameB),
    ...stageWords(a, b, nameA, nameB),
  ];
  return { rows: [first, whole, ...rows], words: words.filter(Boolean) };
}

const rowOf = (label, first, second) => ({
  label,
  first,
  second,
  difference: first === null || second === null ? null : second - first,
});

const perToken = (spans, field) =>
  spans.sums && spans.numTraced > 0 ? (spans.sums[field] ?? 0) / spans.numTraced : null;

const ALIKE = 0.05; // a twentieth is what chance does

function speedWords({ first, second }, nameA, nameB) {
  if (first === null || second === null) return "One of the two has no times that are known.";
  const times = `${seconds(first)} and ${seconds(second)} a token`;
  if (Math.abs(second - first) <= ALIKE * first) return `Both took the same time: ${times}.`;
  const [slower, quicker] = second > first ? [nameB, nameA] : [nameA, nameB];
  const factor = Math.max(first, second) / Math.min(first, second);
  return `${capital(slower)} took ${factor.toFixed(factor < 9.95 ? 1 : 0)} times as long as ${quicker}: ${times}.`;
}

function causeWords(rows, whole) {
  if (whole.difference === null || Math.abs(whole.difference) <= ALIKE * whole.first) return "";
  const sign = Math.sign(whole.difference);
  const cause = rows.reduce((worst, row) => (sign * row.difference > sign * worst.difference ? row : worst));
  const against = `${seconds(cause.first)} against ${seconds(cause.second)}`;
  return `The largest part of the difference is ${cause.label}: ${against} a token.`;
}

function firstWords({ first, second, difference }, nameA, nameB) {
  if (difference === null || Math.abs(difference) <= ALIKE * Math.max(first, second)) return "";
  const later = difference > 0 ? nameB : nameA;
  return `The first token came ${seconds(Math.abs(difference))} later in ${later}.`;
}

// Who computed what, where that differs: a worker that died, a plan that changed.
function stageWords(a, b, nameA, nameB) {
  const [cutA, cutB] = [cutOf(a), cutOf(b)];
  if (cutA === cutB || cutA === "" || cutB === "") return [];
  return [`The layers were with others in ${nameA}: ${cutA}.`, `In ${nameB}: ${cutB}.`];
}

const MOST_NAMED = 6; // workers: more is no sentence

// "w0 had 0–2, then 0–3; w1 3–5": each worker's layers, in the order in which it came to them.
function cutOf({ stages }) {
  const held = new Map();
  for (const { worker, layers } of stages) {
    const ranges = held.get(worker) ?? [];
    if (ranges.at(-1) !== rangeOf(layers)) held.set(worker, [...ranges, rangeOf(layers)]);
  }
  const parts = [...held].map(([worker, ranges]) => `${worker} ${ranges.join(", then ")}`);
  const more = parts.length - MOST_NAMED;
  return more > 1 ? `${parts.slice(0, MOST_NAMED).join("; ")}; and ${more} more` : parts.join("; ");
}
