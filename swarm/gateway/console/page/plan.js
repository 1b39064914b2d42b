// The active plan with predicted and measured times; or why there is none, and the remedies.

import { fill, h, keyed, text } from "./dom.js";
import { bytes, count, layers, plural, rate, seconds } from "./format.js";
import { drawSentences, Supposing, whyNot } from "./plan_form.js";
import { epochWords, handWords } from "./plan_words.js";
import { heading, headOf, scroller } from "./widgets.js";

const COLUMNS = ["Worker", "Layers", "Weights", "Predicted", "Measured", "Load", "KV capacity"];

const OF_THE_NOTE = "swarmctl plan --apply"; // the sentence for terminals that duplicates the note shown here
const UNTIL = "It applies until the broker restarts, or until Clear and Apply.";

export function mount(root, store, api) {
  const facts = h("dl", { class: "plan-facts" });
  const why = h("ul", { class: "why" });
  const said = h("b");
  const byHand = h("p", { class: "by-hand", role: "note" }, said, UNTIL);
  const lacking = h("div", { class: "lacking", role: "note" });
  const body = h("tbody");
  const table = h("table", {}, headOf("Stages of the plan", COLUMNS, (at) => at > 1), body);
  const stages = scroller("Stages of the plan, scrolls", table);
  const epoch = h("span", { class: "hint" });
  const supposing = new Supposing(store, api);
  const inForce = h(
    "div", { class: "plan-now" }, lacking, byHand, facts, stages,
    h("details", { open: true }, h("summary", {}, "Reasons"), why),
  );
  fill(root, heading("Plan", epoch), h("div", { class: "plan" }, inForce, supposing.root));
  store.subscribe(["plan", "status"], ({ view }) => {
    const plan = view?.plan;
    const isServing = view?.status?.state === "serving"; // the condition that an older plan report waited for is met
    const waits = view?.status?.waits_for || (isServing ? "" : plan?.waits_for) || "";
    text(epoch, epochWords(plan, view?.status));
    lacking.hidden = !waits;
    if (waits) fill(lacking, whyNot(waits));
    const hand = handWords(plan?.by_hand);
    byHand.hidden = hand === "";
    text(said, hand && `Manual plan: ${hand}. `);
    const hasStages = (plan?.stages ?? []).length > 0;
    for (const part of [facts, stages, why.parentElement]) part.hidden = !hasStages;
    drawFacts(facts, plan);
    keyed(body, plan?.stages ?? [], (stage) => `${stage.worker} ${stage.layers}`, makeRow, updateRow);
    drawSentences(why, (plan?.why ?? []).filter((words) => !words.includes(OF_THE_NOTE)));
  });
}

// Both times are for the same number of sequences: with more steps in flight there are more sequences.
const withOneMore = ({ like, step_s: then, now_step_s: now, sequences }) =>
  `${seconds(then)} a step instead of ${seconds(now)}, for ${sequences} sequences, with one more like ${like}`;

function drawFacts(list, plan) {
  const forecast = plan?.forecast ?? {};
  const measured = plan?.measured ?? {};
  const rows = [
    ["Objective", plan?.objective ?? "–"],
    ["Tokens/s", `${rate(forecast.tokens_per_second)} predicted`],
    ["One step", `${seconds(measured.step_s)} measured, ${seconds(forecast.step_s)} predicted at full load`],
    ["Slowest stage", forecast.bottleneck ?? "–"],
    ["With one more", forecast.one_more ? withOneMore(forecast.one_more) : "–"],
  ];
  keyed(
    list, rows, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (element, [, value]) => text(element.lastElementChild, value),
  );
}

const makeRow = () =>
  h("tr", {}, h("th", { scope: "row" }), h("td"), Array.from({ length: 5 }, () => h("td", { class: "num" })));

function updateRow(element, stage) {
  const cells = [
    stage.worker, layers(stage.layers), bytes(stage.weight_bytes), seconds(stage.predicted_s),
    stage.seen_steps ? `${seconds(stage.seen_s)} over ${plural(stage.seen_steps, "step")}` : "no steps yet",
    seconds(stage.load_s), `${count(stage.kv_capacity)} positions`,
  ];
  cells.forEach((value, index) => text(element.children[index], value));
}
