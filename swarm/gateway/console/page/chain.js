// The chain of stages in order: cards for up to a dozen, tiles for more, with steps moving through them.

import { MOST_CARDS, numLayers, place, stagesOf, tally, turn } from "./chain_layout.js";
import { orderAfter } from "./dialogs.js";
import { fill, h, keyed, set, text } from "./dom.js";
import { plural, rate } from "./format.js";
import { Pulses } from "./pulses.js";
import { makeCard, makeLink, updateCard, updateLink } from "./stage_card.js";
import { Tiles } from "./stage_tiles.js";
import { empty, heading } from "./widgets.js";

const WHY_NONE = { locked: "This gateway needs a key: press “Key” above." };
const SUMMARY = "A step computes one token of each running answer, through all stages";
const AGAIN_MS = 1000; // redraw while lost stages are shown, since they disappear after a while without any update

// `isShort`: in a narrow place, where a changing summary would move what is below.
export function mount(root, store, api, { isShort = false } = {}) {
  new Chain(root, store, api, isShort);
}

class Chain {
  #root;
  #isShort;
  #store;
  #api;
  #shown = [];
  #summary = h("span", { class: "chain-summary", title: SUMMARY });
  #body = h("div", {});
  #cards;
  #tiles;
  #form = "";
  #timer = 0;

  constructor(root, store, api, isShort) {
    this.#root = root;
    this.#isShort = isShort;
    this.#store = store;
    this.#api = api;
    this.#cards = new Cards((worker) => this.#kill(worker));
    this.#tiles = new Tiles((worker) => this.#kill(worker));
    fill(root, heading("Stages", this.#summary), this.#body);
    const parts = [
      "plan", "workers", "links", "rates", "recovery", "recoveries", "status", "me", "connection", "away_s",
    ];
    store.subscribe(parts, () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  #draw() {
    const { view, me, connection } = this.#store;
    if (this.#root.clientWidth === 0) return this.#cards.rest(); // not shown: drawn as soon as it is
    if (!view) {
      const why = WHY_NONE[connection];
      return why ? this.#show(why, empty("No data from the swarm yet", why)) : this.#show("not-yet", notYet());
    }
    this.#shown = stagesOf(view, this.#shown, this.#store.now());
    clearTimeout(this.#timer);
    if (this.#shown.some((stage) => stage.isGone)) this.#timer = setTimeout(() => this.#draw(), AGAIN_MS);
    const rates = this.#store.isFresh ? (view.rates ?? {}) : {}; // do not animate outdated rates
    text(this.#summary, summaryOf(view, this.#shown, this.#store.isFresh, this.#isShort));
    const none = this.#shown.length === 0 && whyNone(view);
    if (none) return this.#show(none.textContent || "not-yet", none);
    const form = this.#shown.length > MOST_CARDS ? this.#tiles : this.#cards;
    this.#show(form === this.#tiles ? "tiles" : "cards", form.root);
    const canKill = Boolean(me?.is_demo && me?.admin);
    const isMoving = rates.steps_per_s > 0 && !this.#shown.some((stage) => stage.state === "lost");
    const about = { view, rates, isMoving, total: numLayers(view), canKill, isLive: connection === "live" };
    return form.draw(this.#shown, about);
  }

  #show(form, element) {
    if (this.#form === form) return;
    this.#form = form;
    fill(this.#body, element);
  }

  #kill(worker) {
    const words =
      "Its process ends immediately, as in a crash. Others take its layers, and answers continue where they were.";
    const question = { title: `Kill ${worker}?`, words, yes: `Yes, kill ${worker}` };
    return orderAfter(this.#api, question, "kill", { worker });
  }
}

const notYet = () => h("div", { class: "not-yet" });

function summaryOf(view, shown, isFresh, isShort) {
  const states = tally(shown);
  if (states.length === 0) return "";
  const all =
    states.length === 1 && states[0][0] === "well"
      ? "all well"
      : states.map(([state, num]) => `${num} ${state}`).join(", ");
  if (isShort) return all;
  const speed = view.rates?.steps_per_s;
  const steps = !isFresh ? ", as last reported" : speed > 0 ? ` · ${rate(speed)} steps/s` : "";
  const num = shown.filter((stage) => !stage.isGone).length;
  return `${plural(num, "stage")}, ${plural(numLayers(view), "layer")} · ${all}${steps}`;
}

function whyNone(view) {
  const { state = "serving" } = view.status ?? {};
  if (state === "serving") return notYet(); // its plan follows
  const waits = view.status?.waits_for || view.plan?.waits_for || "the broker gives no reason";
  const numWorkers = Object.keys(view.workers ?? {}).length;
  return numWorkers === 0
    ? empty(
        "No worker is here", `Waiting: ${waits}. Start one with `, h("code", {}, "swarm worker"),
        ", or under Workers with “Join a worker”.",
      )
    : empty("The model is not split into stages yet", `Waiting: ${waits}. The Plan tab shows remedies.`);
}

class Cards {
  #pulses = new Pulses();
  #onKill;
  #begin = endOf("Broker", "sends steps");
  #end = endOf("Broker", "takes tokens");

  constructor(onKill) {
    this.#onKill = onKill;
    this.root = h("ol", { class: "chain" });
    this.#end.prepend(makeLink());
  }

  draw(shown, about) {
    const grid = place(shown.length, this.root.parentElement.clientWidth);
    set(this.root, { "data-narrow": grid.isNarrow, vars: { "--columns": grid.columns } });
    const items = [
      { key: "begin", cell: grid.begin }, ...shown.map((stage, index) => ({ ...stage, cell: grid.cells[index] })),
    ];
    items.push({ key: "end", cell: grid.end });
    const before = (index) => items[index - 1].worker ?? "broker";
    keyed(this.root, items, (item) => item.key, (item) => this.#make(item), (element, item, index) => {
      set(element, { vars: { "--column": item.cell.column, "--at-row": item.cell.row } });
      const link = element.querySelector(".link");
      const isLost = [item, items[index - 1]].some((one) => one?.state === "lost");
      const state = { isLost, isBusy: about.rates.steps_per_s > 0 && !isLost };
      if (link) updateLink(link, about.view.links?.[`${before(index)}>${item.worker ?? "broker"}`], state);
      if (item.worker) updateCard(element.querySelector(".stage"), item, about);
    });
    this.#move(shown, about);
  }

  rest() {
    this.#pulses.show([], [], null);
  }

  #make(item) {
    if (item.key === "begin") return this.#begin;
    if (item.key === "end") return this.#end;
    return h("li", { class: "chain-stage" }, makeLink(), makeCard(() => this.#onKill(item.worker)));
  }

  #move(shown, about) {
    const links = [...this.root.querySelectorAll(".link-pulse")];
    const glows = [...this.root.querySelectorAll(".stage-glow")];
    this.#pulses.show(links, glows, about.isMoving ? turn(shown.length, about.rates.steps_per_s) : null);
  }
}

const endOf = (name, words) =>
  h("li", { class: "chain-end" }, h("div", { class: "chain-broker" }, h("b", {}, name), h("span", {}, words)));
