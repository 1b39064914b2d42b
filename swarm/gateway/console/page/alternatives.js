// Borders, certainty and alternatives of each token: shows a continuation as plain text, or token by token.

import { STEPS, alternativesOf, inWords, percent, restOf, stepOf, visible } from "./certainty.js";
import { fill, h, set, text, unique } from "./dom.js";
import { quoted } from "./format.js";
import { pieceOf } from "./reading.js";

const MOST_SPANS = 4000; // tokens of a continuation that are shown separately; the rest is plain text

export class TokenText {
  #output;
  #index;
  #how = "";
  #spanned = 0; // characters in the list of tokens
  #spans = null; // the list of tokens; null while the text is plain
  #numSpans = 0;
  #focused = 0;

  constructor(output, index) {
    this.#output = output;
    this.#index = index;
  }

  draw(choice, { withBorders, withCertainty }) {
    const isApart = (withBorders || withCertainty) && choice.ends.length > 0;
    const how = isApart ? "tokens" : "plain";
    if (how !== this.#how) this.#begin(how, choice);
    set(this.#output, { "data-borders": withBorders, "data-certainty": withCertainty });
    if (isApart) this.#addSpans(choice);
    this.#addText(choice);
  }

  #begin(how, choice) {
    this.#how = how;
    this.#spanned = this.#numSpans = this.#focused = 0;
    this.choice = choice;
    this.#spans = how === "tokens" ? this.#list() : null;
    fill(this.#output, this.#spans, document.createTextNode(""));
  }

  #list() {
    const list = h("span", {
      role: "listbox", "aria-label": `Tokens of continuation ${this.#index + 1}`, tabindex: 0, class: "tokens",
    });
    list.addEventListener("keydown", (event) => this.#move(event));
    list.addEventListener("focus", () => this.#focus(this.#focused));
    list.addEventListener("click", ({ target }) => target.role === "option" && this.#focus(Number(target.dataset.at)));
    return list;
  }

  #addSpans(choice) {
    this.choice = choice;
    const fresh = [];
    const stop = Math.min(choice.ends.length, MOST_SPANS);
    for (let at = this.#numSpans; at < stop; at += 1) fresh.push(this.#span(choice, at));
    this.#numSpans = stop;
    this.#spans.append(...fresh);
    this.#spanned = choice.ends[stop - 1] ?? 0;
  }

  #span(choice, at) {
    const piece = pieceOf(choice, at);
    const step = choice.chances[at] ? stepOf(choice.chances[at]).name : null;
    const label = piece.trim() === "" ? visible(piece) : null; // blanks have no accessible name of their own
    return h(
      "span",
      {
        role: "option", id: unique("token"), "data-at": at, "data-step": step, "aria-selected": "false",
        "aria-label": label,
      },
      piece,
    );
  }

  // All of a plain text, otherwise the part beyond the limit.
  #addText(choice) {
    const rest = this.#output.lastChild;
    const begin = this.#spans === null ? choice.numThought : this.#spanned; // reasoning is shown elsewhere
    const from = begin + rest.length;
    if (from < choice.text.length) rest.appendData(choice.text.slice(from));
  }

  #move(event) {
    const last = this.#numSpans - 1;
    const moves = {
      ArrowRight: this.#focused + 1, ArrowLeft: this.#focused - 1, Home: 0, End: last, ArrowDown: this.#unsure(1),
      ArrowUp: this.#unsure(-1),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#focus(Math.max(0, Math.min(last, moves[event.key])));
  }

  #unsure(step) {
    const { chances } = this.choice;
    for (let at = this.#focused + step; at >= 0 && at < this.#numSpans; at += step) {
      if (chances[at] && stepOf(chances[at]).least < 0.5) return at;
    }
    return this.#focused;
  }

  #focus(at) {
    const spans = this.#spans.children;
    if (at >= spans.length) return;
    spans[this.#focused]?.setAttribute("aria-selected", "false");
    this.#focused = at;
    spans[at].setAttribute("aria-selected", "true");
    set(this.#spans, { "aria-activedescendant": spans[at].id });
    spans[at].scrollIntoView({ block: "nearest" });
    const detail = { index: at, piece: pieceOf(this.choice, at), chance: this.choice.chances[at] };
    this.#output.dispatchEvent(new CustomEvent("token", { bubbles: true, detail }));
  }
}

export function alternativesPanel() {
  const title = h("p", { class: "alternatives-title", "aria-live": "polite" });
  const list = h("ol", { class: "alternatives-list" });
  const element = h(
    "div", { class: "alternatives", hidden: true, role: "group", "aria-label": "Alternatives" }, title, list,
  );
  const panel = { element, isOf: null };
  panel.show = (token, isOf = panel.isOf) => {
    panel.isOf = isOf;
    element.hidden = token === null;
    if (token === null) return;
    const { index, piece, chance } = token;
    text(title, `Token ${index + 1}: ${chance ? inWords(chance) : quoted(visible(piece))}`);
    fill(list, chance ? rowsOf(chance) : null);
  };
  return panel;
}

function rowsOf(chance) {
  const found = alternativesOf(chance);
  const rest = restOf(found);
  const row = (words, probability, isChosen) =>
    h(
      "li", { "data-chosen": isChosen }, h("bdi", { class: "mono" }, words),
      h("span", { class: "share-bar", vars: { "--fill": probability.toFixed(4) } }),
      h("span", { class: "num" }, percent(probability)),
      isChosen ? h("span", { class: "quiet-words" }, "chosen") : h("span"),
    );
  return [
    ...found.map((each) => row(visible(each.token), each.probability, each.isChosen)),
    rest > 0.001 ? row("all others", rest, false) : null,
  ];
}

export const certaintyLegend = () =>
  h(
    "ul",
    { class: "certainty-legend", "aria-label": "Underlines" },
    ...STEPS.map(({ name, words }) =>
      h("li", {}, h("span", { "data-step": name, class: "sample" }, "token"), ` ${words}`),
    ),
  );
