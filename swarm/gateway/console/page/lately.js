// Summary of a recovery below the stages: after “Kill this worker”, the user sees its phases and the continuing answer
// without scrolling. The Recovery card has the details.

import { h, keyed, set, text } from "./dom.js";
import { seconds } from "./format.js";
import { keyOf, rowsOf } from "./phases.js";

const LINGER_S = 12;
const MOST_WORDS = 120; // characters from the end of the answer

export function lately(store, talk) {
  const what = h("p", { class: "lately-what" });
  const phases = h("ol", { class: "lately-phases" });
  const end = h("p", { class: "lately-end quiet-words", dir: "auto" });
  const element = h("div", { class: "lately", role: "group", "aria-label": "Recovery summary" }, what, phases, end);
  const latest = new Latest();
  let timer = 0;
  const draw = () => {
    const { view } = store;
    const shown = view && latest.of(view, store.now());
    element.hidden = !shown;
    clearTimeout(timer);
    if (!shown) return;
    timer = setTimeout(draw, LINGER_S * 1000);
    text(what, shown.sentence || `${shown.cause}.`);
    keyed(
      phases,
      rowsOf(shown),
      ({ name }) => name,
      () => h("li", {}, h("span"), " ", h("b")),
      (row, { name, state, took_s: took }) => {
        set(row, { "data-state": state });
        text(row.firstElementChild, `${{ done: "✓", runs: "…", waits: "·" }[state] ?? "·"} ${name}`);
        text(row.lastElementChild, state === "done" ? seconds(took) : "");
      },
    );
    drawEnd();
  };
  const drawEnd = () => element.hidden || text(end, lastWords(talk.answer?.choices[talk.chosen]?.text ?? ""));
  store.subscribe(["recovery", "recoveries"], draw);
  talk.subscribe(drawEnd);
  return element;
}

// Selects the recovery to show: a running one, or the last one for a while after its end; none from before the page was
// opened.
export class Latest {
  #known = null;
  #until = 0;

  of(view, now) {
    if (!view.recoveries) return view.recovery ?? null; // no report of recoveries has arrived yet
    const last = view.recoveries[0] ?? null;
    const key = last === null ? "" : keyOf(last);
    if (this.#known !== null && key !== this.#known)
      this.#until = (last?.began_at ?? now) + (last?.total_s ?? 0) + LINGER_S;
    this.#known = key;
    return view.recovery ?? (now < this.#until ? last : null);
  }
}

// Return the end of a text, starting at a word.
export function lastWords(all, most = MOST_WORDS) {
  const words = all.slice(-2 * most).replace(/\s+/g, " ").trim();
  if (words.length <= most) return words;
  const cut = words.slice(-most);
  return `… ${cut.slice(cut.indexOf(" ") + 1)}`;
}
