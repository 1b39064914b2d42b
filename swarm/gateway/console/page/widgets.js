// Building blocks of the page: badge, meter, field, empty state, tabs.

import { h, set, svg, text, unique } from "./dom.js";
import { keep, recall } from "./keeping.js";

const TAB = "swarm.tab";

// Tone of each verdict. Its shape is visible without colour, its word without either.
const STATES = {
  well: "well serving live member done equal",
  warn: "slow blocked cordoned draining drained waiting reconnecting away",
  busy: "loading preparing runs connecting recovering",
  bad: "silent hung dead lied lost failed differs",
};
const TONES = Object.fromEntries(
  Object.entries(STATES).flatMap(([tone, states]) => states.split(" ").map((state) => [state, tone])),
);
const SHAPES = {
  well: "M6 1.2a4.8 4.8 0 1 0 0 9.6a4.8 4.8 0 1 0 0-9.6z", warn: "M6 .8 11.6 11H.4z", busy: "M6 .6 11.4 6 6 11.4.6 6z",
  bad: "M1.4 0 6 4.6 10.6 0 12 1.4 7.4 6 12 10.6 10.6 12 6 7.4 1.4 12 0 10.6 4.6 6 0 1.4z", none: "M1 4.8h10v2.4H1z",
};

export const toneOf = (state) => TONES[state] ?? "none";

export function badge(state = "", word = state) {
  const element = h(
    "span", { class: "badge" }, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path")), h("span"),
  );
  return setBadge(element, state, word);
}

export function setBadge(element, state, word = state) {
  const tone = toneOf(state);
  set(element, { "data-tone": tone });
  set(element.querySelector("path"), { d: SHAPES[tone] });
  text(element.lastElementChild, word);
  return element;
}

// What units and columns measure, as tooltips.
const UNITS = {
  Memory: "Memory of the process, of what the machine has",
  KV: "Keys and values: positions of running requests that are remembered, of those that fit",
  "KV capacity": "Positions of requests that the stage can remember",
  "Round trip": "Time of a message to the broker and back",
  "Tokens/s": "Tokens generated per second by all requests",
  Tokens: "Tokens generated per second by all requests",
  "To the first token": "Median time from a request to its first token",
  "Between tokens": "Median time from one token of a request to its next one",
  Predicted: "Time of a step as the plan expects it",
  Measured: "Time of a step: one token of each running request",
  Standby: "Layers that are loaded to take over at once",
};
export const unitOf = (words) => UNITS[words] ?? null;

// `isNumber(index)`: whether a column has numbers.
export const headOf = (caption, columns, isNumber = () => false) => {
  const cell = (words, at) =>
    h(
      "th", { scope: "col", class: isNumber(at) ? "num" : null, title: unitOf(words) },
      words || h("span", { class: "unseen" }, "Actions"),
    );
  return [h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, columns.map(cell)))];
};

// A table that scrolls by itself, also by keys.
export const scroller = (label, table, more = "") =>
  h("div", { class: `scroller ${more}`.trim(), tabindex: 0, role: "group", "aria-label": label }, table);

// The used share of a whole. `title`: what it measures.
export function meter(label, title = unitOf(label)) {
  const name = h("span", { class: "meter-name", title }, label);
  const words = h("span", { class: "meter-words" });
  const bar = h("div", {
    class: "meter-bar", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
  });
  return h("div", { class: "meter" }, name, words, bar);
}

export function setMeter(element, { value, most, words }) {
  const part = most > 0 && value >= 0 ? Math.min(1, value / most) : 0;
  text(element.querySelector(".meter-words"), words);
  set(element.querySelector(".meter-bar"), {
    "aria-valuenow": Math.round(part * 100), "aria-valuetext": words, "data-high": part > 0.9,
    vars: { "--fill": part.toFixed(4) },
  });
  return element;
}

// Screen readers announce the hint with the control.
export function field(label, control, { hint = "", isWide = false } = {}) {
  control.id ||= unique("field");
  const said = hint ? h("p", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (said) set(control, { "aria-describedby": said.id });
  return h("div", { class: isWide ? "field wide" : "field" }, h("label", { for: control.id }, label), control, said);
}

export const button = (words, onclick, { tone = "", ...more } = {}) =>
  h("button", { type: "button", class: tone, onclick, ...more }, words);

export const empty = (title, ...words) =>
  h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, ...words));

export const heading = (words, ...right) =>
  h("div", { class: "heading" }, h("h2", {}, words), h("div", { class: "heading-right" }, ...right));

// Make role=tablist follow the usual keys; the open tab survives a reload.
export function tabs(root) {
  const all = [...root.querySelectorAll("[role=tab]")];
  const choose = (tab, { focus = false } = {}) => {
    for (const each of all) {
      const isOpen = each === tab;
      set(each, { "aria-selected": isOpen ? "true" : "false", tabindex: isOpen ? 0 : -1 });
      document.getElementById(each.getAttribute("aria-controls")).hidden = !isOpen;
    }
    if (focus) tab.focus();
    keep(sessionStorage, TAB, tab.id);
    root.dispatchEvent(new CustomEvent("tab", { detail: tab.getAttribute("aria-controls").replace("panel-", "") }));
  };
  for (const tab of all) tab.addEventListener("click", () => choose(tab));
  root.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const next = neighbour(all, event.target, event.key);
    if (!next) return;
    event.preventDefault();
    choose(next, { focus: true });
  });
  choose(all.find((tab) => tab.id === recall(sessionStorage, TAB)) ?? all[0]);
  return { open: (name) => choose(all.find((tab) => tab.id === `tab-${name}`)) };
}

function neighbour(all, tab, key) {
  const at = all.indexOf(tab);
  const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 };
  return at < 0 || !(key in moves) ? null : all[(moves[key] + all.length) % all.length];
}
