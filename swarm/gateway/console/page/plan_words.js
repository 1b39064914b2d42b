// Texts about plans, and remedies where no plan is possible. Pure.

import { layers, layerWord, plural, rate, seconds } from "./format.js";

const REMEDIES = [
  [
    /pins? or caps?|another pin|other pins/, "Remove the pins and caps",
    "Clear “Only layers” and “At most” under What if, and press Apply; in the settings: plan.pins and plan.caps.",
  ],
  [
    /must not be used/, "Let more workers be used",
    "Remove what excludes them: “No layers” under What if, a cordon, or plan.exclude in the settings.",
  ],
  [
    /(supposed|assumed) gone/, "Assume fewer gone",
    "Untick “Assume it is gone” for one of them, or assume more workers.",
  ],
  [
    /memory|don't pack/, "Add memory",
    "Join a worker, or give these more: worker.memory_limit, a smaller worker.kv_share or plan.kv_positions.",
  ],
  [/memory/, "Use a smaller dtype", "worker.dtype = bfloat16 halves the weights of a float32 model."],
  [
    /open (ways|routes)|can't reach/, "Open the ports",
    "Allow worker.data_ports on the machines named, or the broker's own ports on its machine.",
  ],
  [/more of \d+ workers|1 more worker|no worker|nobody/, "Add workers",
    "Join a worker, or start one elsewhere with swarm worker."],
  [/quiet|load their layers|new plan/, "Wait a moment", "This passes by itself."],
];

export function remedies(waitsFor) {
  const found = REMEDIES.filter(([pattern]) => pattern.test(waitsFor ?? ""));
  return found.map(([, what, how]) => ({ what, how }));
}

// The broker reports workers assumed gone as workers that must not be used.
export function waitsSupposed(waitsFor, { without, exclude }) {
  if (without.length === 0 || exclude.length > 0) return waitsFor;
  return waitsFor.replace("which must not be used", `which ${without.length === 1 ? "is" : "are"} assumed gone`);
}

// "0-10" is the range [0, 11].
export function readPin(name, words) {
  const found = /^\s*(\d{1,6})(?:\s*[-–]\s*(\d{1,6}))?\s*$/.exec(words);
  if (!found) throw new RangeError(`For ${name}, layers are written like 0-10, not “${words}”.`);
  const [first, last] = [Number(found[1]), Number(found[2] ?? found[1])];
  if (last < first) throw new RangeError(`For ${name}, the last layer comes before the first.`);
  return [first, last + 1];
}

export function readCap(name, words) {
  if (!/^\s*[1-9]\d{0,4}\s*$/.test(words))
    throw new RangeError(`For ${name}, “at most” takes a number of layers from 1 on.`);
  return Number(words);
}

export function handWords(hand) {
  if (!hand) return "";
  const words = [
    ...Object.entries(hand.pins ?? {}).map(([name, of]) => `${name} holds only ${layerWord(of)} ${layers(of)}`),
    ...Object.entries(hand.caps ?? {}).map(([name, most]) => `${name} holds at most ${plural(most, "layer")}`),
    ...(hand.exclude ?? []).map((name) => `${name} gets none`),
    ...(hand.objective ? [`the objective is ${hand.objective}`] : []),
  ];
  return words.join("; ");
}

// The report of a new plan takes the broker a moment.
export function epochWords(plan, status) {
  const state = plan?.state ?? "no plan";
  const former = plan?.epoch ? `plan of epoch ${plan.epoch}` : state;
  if (status?.state === "serving" && status.epoch !== plan?.epoch)
    return `${former}; epoch ${status.epoch} is active, its report follows`;
  if (!plan?.epoch) return state;
  return `epoch ${plan.epoch}, ${state}`;
}

// [[what, now, then]], for the same number of sequences if the broker has computed that.
export function compared(now, then) {
  const forecast = then?.forecast ?? {};
  const before = { ...now?.forecast };
  const asMany = then?.now_step_s;
  const isLikeWork = (now?.objective ?? "") === (then?.objective ?? "");
  if (asMany && isLikeWork && before.step_s) {
    before.tokens_per_second *= before.step_s / asMany;
    before.step_s = asMany;
  }
  return [
    ["Tokens/s", rate(before.tokens_per_second), rate(forecast.tokens_per_second ?? then?.tokens_per_second)],
    ["One step", seconds(before.step_s), seconds(forecast.step_s ?? then?.step_s)],
    ["Slowest stage", before.bottleneck ?? "–", forecast.bottleneck ?? "–"], ["Stages", stagesIn(now), stagesIn(then)],
  ];
}

const stagesIn = (plan) =>
  (plan?.stages ?? []).map((stage) => `${stage.worker} ${layers(stage.layers)}`).join(", ") || "none";
