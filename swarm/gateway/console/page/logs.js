// Logs of the broker, the gateway and all workers, including ended ones; read backwards in pages.

import { fill, h, set, text } from "./dom.js";
import { bytes } from "./format.js";
import { foundIn, timeOf, withOlder } from "./pages.js";
import { button, empty, field, heading } from "./widgets.js";

const TYPING_MS = 300;

export function mount(root, store, api) {
  const logs = new Logs(api);
  const nothing = h("div");
  fill(root, heading("Logs", logs.again), nothing, logs.root);
  const why = () => {
    const { me } = store;
    if (me?.admin && me.has_logs) return null;
    if (!me) return h("div", { class: "not-yet" });
    if (!me.admin)
      return empty(
        "Logs are for admins", "They name all tenants' requests. Use a key made with ",
        h("code", {}, "swarmctl keys add NAME --admin"), ".",
      );
    return empty(
      "This gateway has no logs", h("code", {}, "swarm up"),
      " provides them; other swarms keep logs where their processes run.",
    );
  };
  const isOpen = () => !document.getElementById("panel-logs").hidden;
  const show = () => {
    const reason = why();
    nothing.hidden = reason === null;
    logs.root.hidden = logs.again.hidden = reason !== null;
    if (reason) fill(nothing, reason);
    else if (isOpen()) logs.open();
  };
  store.subscribe(["me"], show);
  document.getElementById("tabs").addEventListener("tab", ({ detail }) => detail === "logs" && show());
}

class Logs {
  #api;
  #process = h("select");
  #search = h("input", { type: "search", placeholder: "Words or fields", maxlength: 200 });
  #lines = h("ol", { class: "lines" });
  #scroller = h("div", {
    class: "scroller logs", tabindex: 0, role: "group", "aria-label": "Lines of the log, newest last",
  });
  #older = button("Older lines", () => this.#read(true), { tone: "small" });
  #state = h("p", { class: "hint", role: "status" });
  #shown = [];
  #before = null;
  #asked = 0;
  #timer = 0;

  constructor(api) {
    this.#api = api;
    this.again = button("Read again", () => this.open(true), { tone: "small" });
    this.#scroller.append(this.#older, this.#lines);
    this.root = h(
      "div", {},
      h("div", { class: "log-choice" }, field("Process", this.#process), field("Search", this.#search)), this.#state,
      this.#scroller,
    );
    this.#process.addEventListener("change", () => this.#read());
    this.#search.addEventListener("input", () => {
      this.#leave();
      this.#timer = setTimeout(() => this.#read(), TYPING_MS);
    });
  }

  async open(isAgain = false) {
    if (this.#process.options.length > 0 && !isAgain) return;
    const chosen = this.#process.value;
    await this.#guarded(async () => {
      const { processes } = await this.#api.get("/console/logs");
      const words = ({ name, alive, bytes: size }) => `${name} · ${bytes(size)}${alive ? "" : " · ended"}`;
      fill(this.#process, processes.map((each) => h("option", { value: each.name }, words(each))));
      if (processes.some(({ name }) => name === chosen)) this.#process.value = chosen;
    });
    if (this.#process.value) await this.#read();
    else text(this.#state, "No process has written a log yet.");
  }

  // The shown page belongs to another search or process, and must not be continued.
  #leave() {
    clearTimeout(this.#timer);
    this.#older.hidden = true;
    return (this.#asked += 1);
  }

  async #read(isOlder = false) {
    const asked = isOlder ? (this.#asked += 1) : this.#leave();
    const query = new URLSearchParams();
    if (this.#search.value.trim()) query.set("search", this.#search.value.trim());
    if (isOlder && this.#before !== null) query.set("before", this.#before);
    await this.#guarded(async () => {
      const page = await this.#api.get(`/console/logs/${encodeURIComponent(this.#process.value)}?${query}`);
      if (asked !== this.#asked) return; // another search has started meanwhile
      this.#shown = isOlder ? withOlder(this.#shown, page.lines) : page.lines;
      this.#before = page.before;
      this.#draw(isOlder);
    });
  }

  #draw(isOlder) {
    const fromEnd = this.#scroller.scrollHeight - this.#scroller.scrollTop;
    fill(this.#lines, this.#shown.map(lineOf));
    this.#older.hidden = this.#before === null;
    text(this.#state, foundIn(this.#shown.length, this.#search.value.trim() !== "", this.#before !== null));
    this.#scroller.scrollTop = isOlder ? this.#scroller.scrollHeight - fromEnd : this.#scroller.scrollHeight;
  }

  async #guarded(act) {
    try {
      await act();
      set(this.#state, { class: "hint" });
    } catch (error) {
      if (error.name !== "ApiError") throw error;
      set(this.#state, { class: "problem" });
      text(this.#state, error.message);
    }
  }
}

function lineOf(line) {
  const words = line.event || line.text;
  const fields = Object.entries(line.fields ?? {}).map(([key, value]) =>
    h(
      "span", { class: "line-field" }, `${key}=`, h("b", {}, typeof value === "string" ? value : JSON.stringify(value)),
    ),
  );
  return h(
    "li", { "data-level": line.level }, h("time", {}, timeOf(line.time)),
    h("span", { class: "line-level" }, line.level ?? ""),
    h("span", { class: "line-text" }, h("b", {}, words), fields.length ? " " : null, fields),
  );
}
