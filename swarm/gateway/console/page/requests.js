// Requests, queued and running. Only visible rows of a long list are drawn.

import { orderAfter } from "./dialogs.js";
import { fill, h, set, text } from "./dom.js";
import { ageOf, progressOf, rowsOf, shortId, stateOf, summaryOf, whoOf } from "./queue.js";
import { VirtualRows } from "./virtual.js";
import { button, empty, heading, headOf, meter, scroller, setMeter } from "./widgets.js";

const COLUMNS = ["Request", "Who", "Class", "State", "Progress", "Age", ""];

export function mount(root, store, api) {
  const summary = h("span");
  const filter = h("input", {
    type: "search", placeholder: "Find", "aria-label": "Find requests", oninput: () => draw(),
  });
  const nothing = empty(
    "No requests", "All requests to this swarm are listed here while in progress, and for a while after.",
  );
  nothing.hidden = true; // until this tab is drawn
  const body = h("tbody");
  const head = headOf("Requests", COLUMNS, (at) => COLUMNS[at] === "Age");
  const table = h("table", { class: "requests as-cards" }, head, body);
  const list = scroller("List of requests", table, "requests-scroller");
  const rows = new VirtualRows(list, body, {
    columns: COLUMNS.length, keyOf: (row) => row.request_id, make: (row) => makeRow(row, store, api),
    update: (element, row) => updateRow(element, row, store),
  });
  fill(root, heading("Requests", summary, filter), nothing, list);

  const draw = () => {
    if (!root.offsetParent) return; // in a closed tab
    const found = rowsOf(store.view, filter.value);
    text(summary, summaryOf(store.view));
    const isEmpty = found.length === 0;
    nothing.hidden = !isEmpty || !store.view;
    text(nothing.firstElementChild, filter.value ? "No matching requests" : "No requests");
    list.hidden = isEmpty;
    rows.show(found);
  };
  store.subscribe(["requests", "ended", "requests_more", "connection"], draw);
  new ResizeObserver(draw).observe(root);
  const showAges = () => body.querySelectorAll("tr[data-request]").forEach((row) => showAge(row, store));
  setInterval(() => root.offsetParent && showAges(), 1000);
}

function makeRow(first, store, api) {
  const id = first.request_id;
  const cancel = button("Cancel", () => cancelAfter(id, store, api), {
    tone: "small", "aria-label": `Cancel ${shortId(first)}`,
  });
  const trace = button("Trace", () => dispatchEvent(new CustomEvent("trace", { detail: id })), {
    tone: "quiet small", "aria-label": `Trace of ${shortId(first)}`,
  });
  const cells = {
    id: h("th", { scope: "row", class: "mono", title: id }, shortId(first)), who: h("td", { class: "long" }),
    class: h("td"), state: h("td"), progress: h("td", { class: "progress-cell" }, meter("")),
    age: h("td", { class: "num" }), actions: h("td", {}, h("div", { class: "actions" }, trace, cancel)),
  };
  const row = h("tr", { "data-request": id }, Object.values(cells));
  row.parts = { ...cells, cancel };
  return row;
}

function updateRow(element, row, store) {
  const { who, class: level, state, progress, cancel } = element.parts;
  element.row = row;
  set(element, { "data-state": row.state });
  text(who, whoOf(row));
  text(level, row.class ?? "");
  text(state, stateOf(row) + (row.preempted ? `, preempted ${row.preempted}×` : ""));
  showProgress(progress.firstElementChild, progressOf(row));
  cancel.hidden = row.state === "ended";
  cancel.disabled = store.connection !== "live";
  showAge(element, store);
}

function showProgress(element, { label, words, part }) {
  text(element.firstElementChild, label);
  setMeter(element, { value: part ?? 0, most: 1, words });
  const bar = element.lastElementChild;
  bar.hidden = part === null;
  set(bar, { "aria-label": `${label} of this request`, "data-high": null });
}

function showAge(element, store) {
  text(element.parts.age, ageOf(element.row, store.now()));
}

async function cancelAfter(id, store, api) {
  const row = store.view?.requests?.[id];
  const words = row
    ? `${whoOf(row)} has ${progressOf(row).words}. The tokens so far stay with the reader; the rest is not generated.`
    : "";
  await orderAfter(api, { title: `Cancel request ${id.slice(0, 8)}?`, words, yes: "Yes, cancel it" }, "cancel", {
    request: id,
  });
}
