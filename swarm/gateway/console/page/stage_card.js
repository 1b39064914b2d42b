// One stage as a card, and the link before it.

import { h, set, svg, text } from "./dom.js";
import { bytes, layers, seconds, share, short } from "./format.js";
import { badge, button, meter, setBadge, setMeter } from "./widgets.js";

export function makeCard(onKill) {
  const parts = {
    glow: h("i", { class: "stage-glow", "aria-hidden": "true" }), number: h("span", { class: "stage-number" }),
    badge: badge(""), name: h("h3", { class: "stage-name" }), place: h("p", { class: "stage-place" }),
    ruler: h("div", { class: "ruler", "aria-hidden": "true" }), layers: h("p", { class: "stage-layers" }),
    memory: meter("Memory"), fill: meter("KV"), step: h("p", { class: "figure" }, h("b"), h("span")),
    evidence: h("p", { class: "stage-evidence" }),
    kill: button("Kill this worker", onKill, { tone: "danger small" }),
  };
  const card = h(
    "article", { class: "stage" }, parts.glow, h("div", { class: "stage-top" }, parts.number, parts.badge),
    h("div", { class: "stage-who" }, parts.name, parts.place), h("div", {}, parts.ruler, parts.layers),
    h("div", { class: "stage-meters" }, parts.memory, parts.fill),
    h("div", { class: "figures" }, parts.step),
    h("div", { class: "stage-foot" }, parts.evidence, parts.kill),
  );
  card.parts = parts;
  return card;
}

// `about`: {total: layers of the model, rates, canKill, isLive}.
export function updateCard(card, shown, about) {
  const { worker, stage, row, state, evidence, number, isGone } = shown;
  const parts = card.parts;
  const name = isGone ? `Lost stage: ${worker}` : `Stage ${number}: ${worker}`;
  set(card, { "aria-label": name, "data-worker": worker, "data-state": state, "data-gone": isGone });
  text(parts.number, isGone ? "Former stage" : `Stage ${number}`);
  setBadge(parts.badge, state, state);
  text(parts.name, worker);
  text(parts.place, placeOf(row, stage));
  drawRuler(parts.ruler, stage.layers, row?.standby ?? [], about.total);
  text(parts.layers, layersOf(stage, row, about.total));
  setMeter(parts.memory, {
    value: row?.resident_bytes, most: row?.memory_bytes,
    words: `${bytes(row?.resident_bytes)} of ${bytes(row?.memory_bytes)}`,
  });
  setMeter(parts.fill, fillOf(row, stage));
  text(parts.step.firstElementChild, seconds(stage.seen_s ?? stage.predicted_s));
  const predicted = stage.seen_s ? `a step; ${seconds(stage.predicted_s)} predicted` : "a step, as predicted";
  text(parts.step.lastElementChild, predicted);
  text(parts.evidence, [row?.steered, evidence].filter(Boolean).join(" · "));
  // one of many buttons: the accessible name needs the worker
  set(parts.kill, { "aria-label": `Kill this worker: ${worker}` });
  parts.kill.hidden = !about.canKill || isGone;
  parts.kill.disabled = state === "lost" || !about.isLive;
}

const placeOf = (row, stage) =>
  [row?.host, row?.device, row?.dtype, stage.by_relay ? "by relay" : ""].filter(Boolean).join(" · ") || "not connected";

function layersOf(stage, row, total) {
  const standby = (row?.standby ?? []).map(layers).join(", ");
  const [first, last] = stage.layers;
  const held = `${first === last - 1 ? "Layer" : "Layers"} ${layers(stage.layers)} of ${total}`;
  return standby ? `${held} · standby ${standby}` : held;
}

function fillOf(row, stage) {
  const most = row?.kv_capacity || stage.kv_capacity;
  const used = row?.kv_used;
  return { value: used, most, words: `${short(used)} of ${short(most)} · ${share(used, most)}` };
}

// The model as a line: layers in service are solid, standby layers hatched.
function drawRuler(ruler, held, standby, total) {
  const key = JSON.stringify([held, standby, total]);
  if (ruler.dataset.drawn === key) return;
  ruler.dataset.drawn = key;
  const span = ([from, to], kind) => h("i", { class: kind, vars: { "--from": from / total, "--to": to / total } });
  ruler.replaceChildren(...standby.map((range) => span(range, "warm")), span(held, "held"));
}

// The link from one stage to the next: latency above the line, rate below.
export function makeLink() {
  const parts = {
    latency: h("span", { class: "link-latency" }), rate: h("span", { class: "link-rate" }),
    pulse: h("i", { class: "link-pulse", "aria-hidden": "true" }),
  };
  const line = h(
    "span", { class: "link-line", "aria-hidden": "true" }, parts.pulse,
    svg("svg", { viewBox: "0 0 8 10", class: "link-head" }, svg("path", { d: "M1 1l6 4-6 4" })),
  );
  const link = h("div", { class: "link" }, parts.latency, line, parts.rate);
  link.parts = parts;
  return link;
}

export function updateLink(link, known, { isLost = false, isBusy = false } = {}) {
  text(link.parts.latency, known ? seconds(known.latency_s) : "");
  text(link.parts.rate, known?.bytes_per_s ? `${bytes(known.bytes_per_s)}/s` : "");
  set(link, {
    "data-lost": isLost, "data-busy": isBusy,
    title: known ? `${known.from} to ${known.to}: one way and back takes ${seconds(known.latency_s)}` : null,
  });
}
