// All workers, including those without layers, and the commands for admins.

import { ask, orderAfter, say } from "./dialogs.js";
import { fill, h, set, text } from "./dom.js";
import { bytes, layers, plural, rate, seconds, share } from "./format.js";
import { VirtualRows } from "./virtual.js";
import { badge, button, empty, field, heading, headOf, scroller, setBadge } from "./widgets.js";

const STEERING = [
  ["drain", "Drain", "Its layers go to others while answers run; it gets none until it is uncordoned."],
  ["cordon", "Cordon", "It keeps what it holds, and gets no further layers."],
  ["uncordon", "Uncordon", "It may get layers again, with the next plan."],
];
const COLUMNS = ["Worker", "Verdict", "Layers", "Standby", "Evidence", "Host", "Device", "Memory", "KV", "Round trip"];
COLUMNS.push("Tokens/s", ""); // for small screens, which do not show all columns; and the commands

export function mount(root, store, api) {
  const actions = new Actions(api);
  const reason = h("p", { class: "hint", id: "workers-reason" });
  const num = h("span", { class: "hint" });
  const join = button("Join a worker", () => actions.join());
  const rebalance = button("Rebalance", () => actions.rebalance());
  const body = h("tbody");
  const table = h("table", { class: "workers as-cards" }, headOf("Workers", COLUMNS), body);
  const list = scroller("Workers, scrolls", table);
  const nothing = empty(
    "No worker is here", "Start one with ", h("code", {}, "swarm worker"), " on any machine that reaches the broker.",
  );
  fill(root, heading("Workers", num, rebalance, join), reason, nothing, list);

  const rows = new VirtualRows(list, body, {
    columns: COLUMNS.length, keyOf: (row) => row.incarnation,
    make: () => makeRow(actions, (incarnation) => store.view?.workers?.[incarnation]),
    update: (element, row) => updateRow(element, row, mayAct(store), store),
  });
  store.subscribe(["workers", "me", "connection", "rates"], ({ view }) => {
    const all = Object.values(view?.workers ?? {}).sort(byLayers);
    text(num, plural(all.filter(isHere).length, "worker"));
    nothing.hidden = all.length > 0 || !view || view.status?.state === "serving"; // their report follows
    list.hidden = all.length === 0;
    text(reason, whyNot(store));
    reason.hidden = !reason.textContent;
    for (const each of [join, rebalance]) set(each, lockedBy(mayAct(store)));
    rows.show(all);
  });
}

// Workers that have left or were put out are shown for a while, without commands.
const isHere = ({ state }) => state !== "left" && state !== "out";

const holdsLayers = ({ layers: range }) => Boolean(range && range[1] > range[0]);

const mayAct = ({ me, connection }) => Boolean(me?.admin) && connection === "live";

function whyNot({ me, connection, problem }) {
  if (me && !me.admin)
    return "This key can only view. Changes need an admin's key (swarmctl keys add NAME --admin).";
  return connection === "reconnecting" ? `No commands until this page is live again. ${problem}` : "";
}

const lockedBy = (may) => ({ disabled: !may, "aria-describedby": may ? null : "workers-reason" });

function byLayers(a, b) {
  const first = (row) => (holdsLayers(row) ? row.layers[0] : Infinity);
  return (
    first(a) - first(b) ||
    a.name.localeCompare(b.name, "en", { numeric: true }) ||
    a.incarnation.localeCompare(b.incarnation)
  );
}

function makeRow(actions, current) {
  const element = h("tr");
  const row = () => current(element.dataset.incarnation);
  const name = h("th", { scope: "row" });
  const cells = COLUMNS.slice(2, -1).map((words) => h("td", { "data-name": words }));
  cells[2].className = "long";
  const buttons = [
    ...STEERING.map((order) => button(order[1], () => actions.steer(order, row()), { tone: "small" })),
    button("Stop worker", () => actions.stop(row()), { tone: "small danger" }),
  ];
  element.append(name, h("td", {}, badge("")), ...cells, h("td", {}, h("div", { class: "actions" }, buttons)));
  element.parts = { name, badge: element.querySelector(".badge"), cells, buttons };
  return element;
}

function updateRow(element, row, may, { view, isFresh }) {
  const { name, badge: verdict, cells, buttons } = element.parts;
  set(element, { "data-incarnation": row.incarnation, "data-worker": row.name, "data-state": row.verdict });
  set(name, { id: `worker-${row.incarnation}`, title: row.incarnation });
  text(name, row.name);
  const said = isHere(row) ? row.verdict : row.state;
  setBadge(verdict, said, row.steered ? `${said}, ${row.steered}` : said);
  const words = [
    layers(row.layers), (row.standby ?? []).map(layers).join(", ") || "none", row.evidence, row.host,
    [row.device, row.dtype].filter(Boolean).join(" "), `${bytes(row.resident_bytes)} of ${bytes(row.memory_bytes)}`,
    share(row.kv_used, row.kv_capacity), seconds(row.round_trip_s),
    holdsLayers(row) ? `${rate(isFresh ? view.rates?.tokens_per_s : null)} tokens/s` : "",
  ];
  words.forEach((value, index) => text(cells[index], value));
  set(cells[2], { title: row.evidence });
  const [drain, cordon, uncordon] = buttons;
  for (const each of buttons) each.hidden = !isHere(row);
  if (row.steered && row.steered !== "excluded") cordon.hidden = true; // an excluded worker can be cordoned, too
  else uncordon.hidden = true;
  if (row.steered?.startsWith("drain")) drain.hidden = true;
  for (const each of buttons) set(each, { ...lockedBy(may), "aria-describedby": may ? name.id : "workers-reason" });
}

// Each command is confirmed first, with a description of its effect.
class Actions {
  #api;

  constructor(api) {
    this.#api = api;
  }

  #order(question, verb, body) {
    return orderAfter(this.#api, question, verb, body);
  }

  steer([verb, label, words], row) {
    if (!row) return gone();
    const title = `${label} ${row.name}?`;
    return this.#order({ title, words, yes: `Yes, ${verb} ${row.name}`, isGrave: false }, verb, { worker: row.name });
  }

  async stop(row) {
    if (!row) return gone();
    const force = h("input", { type: "checkbox" });
    const words = "Its layers go to others first, then its process ends.";
    const more = [h("label", { class: "check" }, force, "End it even if no other worker can take its layers")];
    if (!(await ask({ title: `Stop ${row.name}?`, words, yes: `Yes, stop ${row.name}`, more }))) return null;
    return this.#order(null, "stop", { worker: row.name, force: force.checked });
  }

  async join() {
    const count = h("input", { type: "number", min: 1, max: 64, value: 1, inputmode: "numeric" });
    const words = "More processes on the gateway's machine. They get layers as soon as a better plan uses them.";
    const more = [field("How many", count)];
    if (!(await ask({ title: "Join a worker?", words, yes: "Yes, join", isGrave: false, more }))) return null;
    return this.#order(null, "join", { count: Math.max(1, Math.round(Number(count.value)) || 1) });
  }

  rebalance() {
    const words = "A plan is made from what is measured now. Layers may move; answers pause for a moment and continue.";
    return this.#order({ title: "Rebalance?", words, yes: "Yes, rebalance", isGrave: false }, "rebalance", {});
  }
}

function gone() {
  say("This worker is no longer connected.", { isError: true });
  return null;
}
