// Quotas and usage of the API keys. Never contains secrets: the gateway itself stores only hashes.

import { fill, h, keyed, set, text } from "./dom.js";
import { count } from "./format.js";
import { button, empty, heading, headOf, meter, scroller, setMeter } from "./widgets.js";

const COLUMNS = ["Key", "Permissions", "Requests a minute", "Concurrent", "Tokens today", "Created"];

export function mount(root, store, api) {
  const again = button("Read again", () => read(), { tone: "small" });
  const state = h("div");
  const body = h("tbody");
  const table = h("table", {}, headOf("Keys and their quotas", COLUMNS), body);
  const list = scroller("Keys and their quotas, scrolls", table);
  list.hidden = true;
  fill(root, heading("Keys", again), state, list);

  const show = (reason, keys = []) => {
    fill(state, reason);
    list.hidden = keys.length === 0;
    keyed(body, keys, (key) => key.name, makeRow, updateRow);
  };
  const read = async () => {
    if (!store.me) return show(h("div", { class: "not-yet" }));
    if (!store.me.admin)
      return show(
        empty("Keys are for admins", "Use a key made with ", h("code", {}, "swarmctl keys add NAME --admin"), "."),
      );
    try {
      const { keys } = await api.get("/console/keys");
      return show(keys.length ? null : none(), keys);
    } catch (error) {
      if (error.name !== "ApiError") throw error;
      return show(h("p", { class: "problem" }, error.message));
    }
  };
  store.subscribe(["me"], read);
  document.getElementById("tabs").addEventListener("tab", ({ detail }) => detail === "connect" && read());
}

const none = () =>
  empty(
    "There are no keys", "Without keys only this machine is served. ", h("code", {}, "swarmctl keys add NAME"),
    " makes the first one; with --admin it may change workers here.",
  );

function makeRow() {
  const cells = COLUMNS.slice(1).map(() => h("td"));
  const tokens = meter("Tokens today");
  tokens.classList.add("bare");
  cells[3].append(tokens);
  const element = h("tr", {}, h("th", { scope: "row" }), cells);
  element.parts = { tokens };
  return element;
}

const limit = (value) => (value ? count(value) : "no limit"); // 0: no limit is set

function updateRow(element, key) {
  const [name, may, minute, atOnce, , made] = element.children;
  text(name, key.name);
  text(may, key.admin ? "everything (admin)" : "use and view");
  text(minute, limit(key.rate_per_min));
  text(atOnce, `${count(key.under_way ?? 0)} of ${limit(key.concurrency)}`);
  const words = `${count(key.spent_today ?? 0)} of ${limit(key.tokens_per_day)}`;
  setMeter(element.parts.tokens, { value: key.spent_today ?? 0, most: key.tokens_per_day ?? 0, words });
  set(element.parts.tokens, { "data-open": !key.tokens_per_day });
  text(made, dayOf(key.created));
}

function dayOf(created) {
  if (typeof created === "number") return new Date(created * 1000).toLocaleDateString("en-CA");
  return String(created ?? "").slice(0, 10) || "–";
}
