// Shows a recovery while it happens, phase by phase, and afterwards its summary.

import { fill, h, keyed, set, text } from "./dom.js";
import { LONG } from "./examples.js";
import { clock, plural, seconds, UNKNOWN } from "./format.js";
import { keyOf, rowsOf, tookOf } from "./phases.js";
import { talkOf } from "./talk.js";
import { badge, button, empty, heading, setBadge } from "./widgets.js";

const WHAT = "If a worker dies, this card shows phase by phase how the others take over.";
const WRITE_FIRST =
  "Write a long story, then press “Kill this worker” in a stage above, and watch: the answer continues.";
const KILL_NOW = "Now press “Kill this worker” in a stage above, and watch: the answer continues.";
// seconds; the phases of a recovery that had already ended are replayed within this time, in true proportion
const TOLD_S = 1.4;

export function mount(root, store, api) {
  const state = badge("none", UNKNOWN);
  const sentence = h("p", { class: "sentence", role: "status" });
  const cause = h("p", { class: "quiet-words" });
  const total = h("p", { class: "figure" }, h("b"), h("span"));
  const phases = h("ol", { class: "phases" });
  const earlier = h("ol", { class: "earlier" });
  const more = h("details", {}, h("summary", {}, "Earlier recoveries"), earlier);
  const told = h("div", { class: "recovery" }, sentence, cause, phases, total, more);
  const nothing = invitation(store, talkOf(store, api));
  fill(root, heading("Recovery", state), nothing.element, told);

  store.subscribe(["recovery", "recoveries", "me", "plan"], ({ view }) => {
    const running = view?.recovery ?? null;
    const shown = running ?? view?.recoveries?.[0] ?? null;
    told.hidden = shown === null;
    nothing.element.hidden = shown !== null || !view?.recoveries; // not reported yet
    nothing.draw();
    if (shown === null) return view?.recoveries && setBadge(state, "none", "none so far");
    setBadge(state, running ? "recovering" : "done", running ? "in progress" : "recovered");
    text(sentence, running ? `${running.cause}.` : shown.sentence || shown.cause);
    text(cause, causeOf(shown, running));
    drawPhases(phases, shown, running !== null);
    text(total.firstElementChild, seconds(tookOf(shown) || null));
    text(total.lastElementChild, running ? "taken so far" : "taken since the verdict");
    drawEarlier(more, earlier, running ? (view.recoveries ?? []) : view.recoveries.slice(1));
  });
}

// Before the first recovery: explain this card, and, where workers may be killed for demonstrations, how to try it.
function invitation(store, talk) {
  const write = button("Write a long story", () => {
    talk.take(LONG);
    talk.generate();
    const next = [...document.querySelectorAll(".stage button.danger")].find((one) => one.checkVisibility());
    next?.focus(); // the next step; this also scrolls it into view
  });
  const element = empty("No recoveries yet");
  const words = element.lastElementChild;
  element.append(write);
  const draw = () => {
    const mayKill = Boolean(store.me?.is_demo && store.me?.admin);
    write.hidden = !mayKill || talk.isBusy;
    text(words, mayKill ? (talk.isBusy ? KILL_NOW : WRITE_FIRST) : WHAT);
    set(write, { disabled: !talk.model });
  };
  talk.subscribe(draw);
  return { element, draw };
}

function causeOf(shown, running) {
  const parts = [shown.evidence, shown.choice];
  if (running === null)
    parts.unshift(clock(shown.began_at), typeof shown.sequences === "number" ? plural(shown.sequences, "answer") : "");
  return parts.filter(Boolean).join(" · ");
}

// Phases observed live tick off as they happen; those of a recovery that had already ended are replayed.
function drawPhases(list, recovery, isLive) {
  keyed(
    list,
    rowsOf(recovery).map((row) => ({ ...row, key: `${keyOf(recovery)} ${row.name}` })),
    (row) => row.key,
    (row) => {
      const parts = ["phase-took", "phase-predicted"].map((name) => h("span", { class: name }));
      const mark = h("span", { class: "phase-mark", "aria-hidden": "true" });
      const track = h("span", { class: "phase-track", "aria-hidden": "true" }, h("i"));
      const name = h("span", {}, row.words);
      return Object.assign(h("li", { "data-phase": row.name }, mark, name, track, parts), { isLive });
    },
    (element, row) => {
      const [mark, , , took, predicted] = element.children;
      set(element, {
        "data-state": row.state,
        vars: {
          "--from": row.from.toFixed(4), "--to": row.to.toFixed(4),
          "--delay": element.isLive ? "0s" : `${(row.from * TOLD_S).toFixed(2)}s`,
        },
      });
      text(mark, { done: "✓", runs: "…", waits: "" }[row.state] ?? "");
      text(took, row.took_s === null ? ({ runs: "runs", waits: "waits" }[row.state] ?? UNKNOWN) : seconds(row.took_s));
      text(predicted, typeof row.predicted_s === "number" ? `of ${seconds(row.predicted_s)}` : "");
    },
  );
}

function drawEarlier(more, list, recoveries) {
  more.hidden = recoveries.length === 0;
  keyed(list, recoveries, keyOf, () => h("li", {}, h("time"), h("span")), (element, one) => {
    text(element.firstElementChild, clock(one.began_at));
    text(element.lastElementChild, one.sentence || one.cause);
  });
}
