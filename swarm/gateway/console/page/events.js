// The events, newest first: workers, recoveries, plans, problems.

import { fill, h, keyed, set, text } from "./dom.js";
import { clock } from "./format.js";
import { empty, heading } from "./widgets.js";

const SHOWN = 100;
const GRAVE = /lost|failed|problem|died|dead|silent|hung|lied|begun/;
const GOOD = /ended|^serving|joined|solved|recovered/;

export function mount(root, store) {
  const search = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter events" });
  const list = h("ol", { class: "happened", tabindex: 0, "aria-label": "Events, newest first" });
  const nothing = empty("No events yet", "Changes of workers, recoveries and plans appear here.");
  fill(root, heading("Events", search), nothing, list);
  const draw = () => {
    const wanted = search.value.trim().toLowerCase();
    const all = numbered(store.events).filter(({ event }) => matches(event, wanted));
    const isEmpty = all.length === 0;
    nothing.hidden = !isEmpty || !store.view;
    list.hidden = isEmpty;
    text(nothing.firstElementChild, store.events.length ? "No matching events" : "No events yet");
    keyed(
      list, all.slice(-SHOWN).reverse(), ({ number }) => number, make, (element, { event }) => update(element, event),
    );
  };
  search.addEventListener("input", draw);
  store.subscribe(["events"], draw);
}

// The store keeps only the latest events, so each is identified by its object.
const numbers = new WeakMap();
let counted = 0;

function numbered(events) {
  return events.map((event) => {
    if (!numbers.has(event)) numbers.set(event, (counted += 1));
    return { event, number: numbers.get(event) };
  });
}

const matches = (event, wanted) => !wanted || `${event.event} ${event.text}`.toLowerCase().includes(wanted);

const make = () =>
  h(
    "li", {}, h("span", { class: "happened-mark", "aria-hidden": "true" }), h("time"),
    h("span", { class: "happened-text" }),
  );

function update(element, event) {
  const kind = GRAVE.test(event.event) ? "grave" : GOOD.test(event.event) ? "good" : "plain";
  set(element, { "data-kind": kind });
  text(element.children[0], { grave: "✕", good: "●", plain: "–" }[kind]);
  text(element.children[1], clock(event.time) || "earlier");
  text(element.children[2], event.text);
}
