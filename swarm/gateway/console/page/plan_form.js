// "What if" form: assume that workers are gone or added, assign layers manually, preview the plan, and apply it.

import { numLayers } from "./chain_layout.js";
import { ask, say, told } from "./dialogs.js";
import { fill, h, keyed, set, text } from "./dom.js";
import { layers } from "./format.js";
import { compared, readCap, readPin, remedies, waitsSupposed } from "./plan_words.js";
import { button, field, heading, headOf, scroller } from "./widgets.js";

const ONLY_SUPPOSED = "Workers that are only assumed gone, or assumed here, can't be applied: drain or join them.";
const SETTINGS_ALONE = "Plans follow the settings alone again.";
const BY_HAND = "It replaces what was applied before, until the broker restarts.";
const CHANGED = "The form has changed since the request: its result is not shown. Try it once more.";
const IMPOSSIBLE = "There is no such plan to apply.";
const MOVES = "Layers may move; answers pause for a moment and continue.";

export class Supposing {
  #store;
  #api;
  #body = h("tbody");
  #objective = select([["", "As it is"], ["throughput", "Throughput"], ["latency", "Latency"]]);
  #more = h("input", { type: "number", min: 0, max: 64, value: 0, inputmode: "numeric" });
  #like = select([]);
  #result = h("div", { class: "supposed", "aria-live": "polite" });
  #tries = h("button", { type: "submit", class: "primary" }, "Try");
  #apply = button("Apply", () => this.#applied());
  #reason = h("span", { class: "hint", id: "plan-reason" });
  #isBusy = false;
  #isImpossible = false; // the previewed plan
  #isTouched = false; // edited by the user: do not overwrite it with the applied values
  #numChanges = 0; // detects that the form has changed while an answer was on its way
  #hand = "";

  constructor(store, api) {
    this.#store = store;
    this.#api = api;
    const columns = ["Worker", "Holds", "Assume it is gone", "No layers", "Only layers", "At most"];
    const table = h("table", {}, headOf("What each worker should get", columns), this.#body);
    const form = h(
      "form",
      { class: "what-if" },
      h(
        "div", { class: "fields" }, field("Objective", this.#objective), field("More workers", this.#more),
        field("Each like", this.#like),
      ),
      scroller("What each worker should get, scrolls", table),
      h(
        "div", { class: "actions" }, this.#tries, this.#apply, button("Clear", () => this.#clear(), { tone: "quiet" }),
        this.#reason,
      ),
      this.#result,
    );
    form.addEventListener("input", () => this.#changed());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try();
    });
    this.root = h("div", {}, heading("What if", h("span", { class: "hint" }, "Try changes nothing")), form);
    store.subscribe(["workers", "me", "plan", "connection"], () => this.#draw());
  }

  #changed() {
    this.#isTouched = true;
    this.#isImpossible = false;
    this.#numChanges += 1;
    this.#tell(this.#isBusy ? CHANGED : "");
    this.#drawApply();
  }

  #tell(words) {
    fill(this.#result, words ? h("p", { class: "quiet-words" }, words) : null);
  }

  // Show the applied manual plan in the form, so that Apply modifies it instead of dropping it.
  #drawHand() {
    const hand = this.#store.view?.plan?.by_hand ?? null;
    const now = JSON.stringify([hand, [...this.#body.children].map((row) => row.dataset.worker)]);
    if (this.#isTouched || now === this.#hand) return;
    this.#hand = now;
    set(this.#objective, { value: hand?.objective ?? "" });
    for (const row of this.#body.children) {
      const name = row.dataset.worker;
      const [, none, pin, cap] = row.querySelectorAll("input");
      none.checked = (hand?.exclude ?? []).includes(name);
      set(pin, { value: hand?.pins?.[name] ? layers(hand.pins[name]) : "" });
      set(cap, { value: hand?.caps?.[name] ?? "" });
    }
  }

  #draw() {
    const { view } = this.#store;
    const workers = Object.values(view?.workers ?? {}).filter((row) => row.state === "member");
    const total = numLayers(view);
    const names = [...new Map(workers.map((row) => [row.name, row])).values()].sort(byName);
    keyed(this.#body, names, (row) => row.name, makeRow, (element, row) => {
      text(element.children[1], layers(row.layers));
      set(element.children[4].firstElementChild, { placeholder: total > 0 ? layers([0, total]) : "" });
    });
    keyed(
      this.#like, [{ name: "" }, ...names], (row) => row.name,
      (row) => h("option", { value: row.name }, row.name || "First stage"), () => {},
    );
    this.#drawHand();
    this.#drawApply();
  }

  #drawApply() {
    const { me, connection } = this.#store;
    const why = !me?.admin ? "This requires an admin's key." : this.#isImpossible ? IMPOSSIBLE : "";
    const cant = this.#isBusy || connection !== "live" || !me?.admin;
    const said = { "aria-describedby": why ? "plan-reason" : null };
    set(this.#tries, { disabled: cant, ...said });
    set(this.#apply, { disabled: cant || this.#isImpossible, ...said });
    text(this.#reason, why);
  }

  #read() {
    const wanted = { without: [], one_more: null, objective: this.#objective.value, pins: {}, caps: {}, exclude: [] };
    const more = Math.round(Number(this.#more.value)) || 0;
    if (more > 0) wanted.one_more = { count: more, like: this.#like.value };
    for (const row of this.#body.children) {
      const name = row.dataset.worker;
      const [gone, none, pin, cap] = row.querySelectorAll("input");
      if (gone.checked) wanted.without.push(name);
      if (none.checked) wanted.exclude.push(name);
      if (pin.value.trim()) wanted.pins[name] = readPin(name, pin.value);
      if (cap.value.trim()) wanted.caps[name] = readCap(name, cap.value);
    }
    return wanted;
  }

  async #try() {
    await this.#guarded(async () => {
      const wanted = this.#read();
      this.#tell("Computing …");
      const plan = await this.#api.post("/console/plan", wanted);
      return () => this.#show(plan, wanted);
    });
  }

  async #applied() {
    await this.#guarded(async () => {
      const { without, one_more: more, ...suppose } = this.#read();
      if (without.length || more) throw new RangeError(ONLY_SUPPOSED);
      const byHand = [suppose.objective, suppose.exclude, Object.keys({ ...suppose.pins, ...suppose.caps })];
      const question = `${byHand.every((each) => each.length === 0) ? SETTINGS_ALONE : BY_HAND} ${MOVES}`;
      if (!(await ask({ title: "Apply this?", words: question, yes: "Yes, apply", isGrave: false }))) return () => {};
      this.#tell("Applying …");
      const words = told(await this.#api.order("plan", { suppose }));
      say(words);
      return () => {
        fill(this.#result, h("p", {}, words));
        this.#isTouched = false;
      };
    });
  }

  // `act` returns a function that shows its result, which is used only if the form is unchanged.
  async #guarded(act) {
    if (this.#isBusy) return;
    const [asked, focused] = [this.#numChanges, document.activeElement];
    const isOld = () => asked !== this.#numChanges;
    this.#setBusy(true);
    try {
      const show = await act();
      if (!isOld()) show();
    } catch (error) {
      if (error.name !== "ApiError" && !(error instanceof RangeError)) throw error;
      if (isOld()) say(error.message, { isError: true });
      else fill(this.#result, h("p", { class: "problem" }, error.message));
    } finally {
      this.#setBusy(false);
      if (document.activeElement === document.body) focused?.focus(); // a disabled button loses the focus
    }
  }

  #setBusy(isBusy) {
    this.#isBusy = isBusy;
    this.#drawApply();
  }

  #show(plan, wanted) {
    const now = this.#store.view?.plan;
    this.#isImpossible = plan.state === "no plan";
    this.#drawApply();
    if (this.#isImpossible) {
      const waits = waitsSupposed(plan.waits_for ?? "", wanted);
      return fill(this.#result, h("h3", {}, "No plan is possible"), whyNot(waits));
    }
    const rows = compared(now, plan).map(([what, before, after]) =>
      h("tr", {}, h("th", { scope: "row" }, what), h("td", {}, before), h("td", {}, after)),
    );
    const why = h("ul", { class: "why" });
    drawSentences(why, plan.why ?? []);
    return fill(
      this.#result, h("h3", {}, `This ${plan.state ?? "would be made"}`),
      h("table", { class: "compared" }, headOf("The plan now and then", ["What", "Now", "Then"]), h("tbody", {}, rows)),
      why,
    );
  }

  #clear() {
    this.#objective.value = "";
    this.#more.value = 0;
    this.#like.value = "";
    for (const input of this.#body.querySelectorAll("input")) {
      if (input.type === "checkbox") input.checked = false;
      else input.value = "";
    }
    this.#changed();
  }
}

const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });

const select = (options) =>
  h("select", {}, options.map(([value, words]) => h("option", { value }, words)));

function makeRow(row) {
  const labelled = (words, attributes) =>
    h("td", {}, h("input", { "aria-label": `${words}: ${row.name}`, ...attributes }));
  return h(
    "tr", { "data-worker": row.name }, h("th", { scope: "row" }, row.name), h("td"),
    labelled("Assume it is gone", { type: "checkbox" }), labelled("No layers", { type: "checkbox" }),
    labelled("Only layers", { type: "text", size: 6, maxlength: 15 }),
    labelled("At most", { type: "text", inputmode: "numeric", placeholder: "–", size: 4, maxlength: 5 }),
  );
}

export function whyNot(waits) {
  const ways = remedies(waits).map(({ what, how }) => h("li", {}, h("b", {}, what), " ", how));
  return [h("p", {}, h("b", {}, "Waiting for "), waits, "."), ways.length ? h("ul", {}, ways) : null];
}

export function drawSentences(list, sentences) {
  keyed(list, sentences, (words) => words, (words) => h("li", {}, words), () => {});
}
