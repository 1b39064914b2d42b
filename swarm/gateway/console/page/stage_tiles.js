// Many stages: one tile each, in the model's order, and the card of the selected one below.

import { h, keyed, set, text } from "./dom.js";
import { layers } from "./format.js";
import { makeCard, updateCard } from "./stage_card.js";
import { badge, setBadge } from "./widgets.js";

const STEP_MS = 120;
const TURN_STEPS = 48; // number of moves in which a step passes all tiles, however many there are

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Tiles {
  #onKill;
  #chosen = null;
  #last = null;
  #timer = 0;
  #at = 0;
  #lit = null;
  #list = h("ol", { class: "tiles" });
  #detail = h("div");
  #card;

  constructor(onKill) {
    this.#onKill = onKill;
    this.#card = makeCard(() => this.#onKill(this.#card.dataset.worker));
    this.#card.parts.glow.remove();
    this.#detail.append(this.#card);
    this.root = h("div", { class: "tiles-and-detail" }, this.#list, this.#detail);
    this.#list.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(shown, about) {
    this.#last = [shown, about];
    this.#move(about.isMoving && !still.matches);
    const chosen =
      shown.find((stage) => stage.key === this.#chosen) ?? shown.find((stage) => stage.state !== "well") ?? shown[0];
    keyed(
      this.#list, shown, (stage) => stage.key, (stage) => this.#make(stage),
      (element, stage) => this.#update(element, stage, stage === chosen),
    );
    updateCard(this.#card, chosen, about);
  }

  #make(stage) {
    const tile = h("button", { type: "button", class: "tile", onclick: () => this.#choose(stage.key) });
    tile.append(
      h("b"), badge(""), h("span", { class: "tile-layers" }), h("i", { class: "tile-fill", "aria-hidden": "true" }),
    );
    return h("li", {}, h("article", {}, tile));
  }

  // Light one tile at a time: a hundred separate animations would keep a processor busy.
  #move(isMoving) {
    if (isMoving === (this.#timer !== 0)) return;
    clearInterval(this.#timer);
    this.#timer = isMoving ? setInterval(() => this.#step(), STEP_MS) : 0;
    if (!isMoving) this.#lit?.removeAttribute("data-lit");
  }

  #step() {
    if (document.hidden || !this.root.isConnected) return;
    const tiles = this.#list.children;
    this.#at = (this.#at + Math.ceil(tiles.length / TURN_STEPS)) % tiles.length;
    this.#lit?.removeAttribute("data-lit");
    this.#lit = tiles[this.#at]?.querySelector(".tile") ?? null;
    this.#lit?.setAttribute("data-lit", "");
  }

  #update(element, stage, isChosen) {
    const name = `${stage.isGone ? "Lost stage" : `Stage ${stage.number}`}: ${stage.worker}`;
    set(element.firstElementChild, { "aria-label": name, "data-worker": stage.worker, "data-state": stage.state });
    const tile = element.querySelector(".tile");
    const [worker, state, range] = tile.children;
    text(worker, stage.worker);
    setBadge(state, stage.state, stage.state);
    text(range, `L${layers(stage.stage.layers)}`);
    const part = stage.row?.kv_capacity ? stage.row.kv_used / stage.row.kv_capacity : 0;
    set(tile, {
      "aria-pressed": isChosen ? "true" : "false", tabindex: isChosen ? 0 : -1, vars: { "--fill": part.toFixed(3) },
    });
  }

  #choose(key) {
    this.#chosen = key;
    this.draw(...this.#last);
  }

  #key(event) {
    const tiles = [...this.#list.querySelectorAll(".tile")];
    const at = tiles.indexOf(event.target);
    const inRow = Math.max(1, tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length);
    const moves = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + inRow, ArrowUp: at - inRow, Home: 0, End: tiles.length - 1,
    };
    const next = at < 0 ? undefined : tiles[moves[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  }
}
