// Below an answer that went on through a recovery: its text beside that of the same request undisturbed.

import { h, set, text } from "./dom.js";
import { Answer, answeredIn } from "./reading.js";
import { AnswerReader } from "./stream.js";
import { badge, button, setBadge } from "./widgets.js";

const SHOWN = 12; // digits of a digest
const COMPARE = "Sends the same request again, with the same seed, and compares the texts";

export const textOf = ({ choices }) => choices.map(answeredIn).join("\0");

// "" where browsers have no SHA-256: on another machine without TLS.
export async function digestOf(answer) {
  const data = new TextEncoder().encode(textOf(answer));
  const digest = await crypto.subtle?.digest("SHA-256", data);
  return Array.from(new Uint8Array(digest ?? 0), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// `skew_s`: seconds that the gateway's clock, that of recoveries, is ahead.
export function healedDuring({ askedAt, endedAt }, recoveries, skew_s) {
  const [from, to] = [askedAt / 1000 + skew_s, (endedAt ?? Infinity) / 1000 + skew_s];
  return (recoveries ?? []).filter(({ began_at: began, sequences }) => began >= from && began <= to && sequences !== 0);
}

export function healedLine(store, talk, api) {
  const [what, own, other, verdict] = [h("span"), h("code"), h("code"), badge()];
  const compare = button("Compare with an undisturbed run", () => check(talk.answer), { title: COMPARE });
  const digest = h("span", { class: "digest", title: "SHA-256 of the text" }, "This answer", own);
  const beside = h("span", { class: "digest", role: "status" }, "Undisturbed", other, verdict);
  const about = { class: "healed", role: "group", "aria-label": "Healed answer" };
  const element = h("div", about, what, digest, beside, compare);
  const checks = new WeakMap(); // by answer: {workers, own: its digest, again: undisturbed, other: its digest}

  const note = (answer, fields) => {
    checks.set(answer, { ...checks.get(answer), ...fields });
    talk.changed(); // drawn with the answer
  };
  const check = async (answer) => {
    const again = new Answer(answer.request, Date.now());
    note(answer, { again });
    await new AnswerReader(api, () => Date.now()).read(again);
    note(answer, { other: await digestOf(again) });
  };
  const draw = () => {
    const { answer, isBusy, repeats } = talk;
    const isDone = answer?.state === "ended";
    const skew_s = store.now() - Date.now() / 1000;
    const healed = isDone ? healedDuring(answer, store.view?.recoveries, skew_s) : [];
    const known = isDone ? checks.get(answer) : undefined;
    element.hidden = !known;
    if (!known && healed.length > 0) {
      const workers = [...new Set(healed.flatMap((one) => one.workers ?? []))].join(", ");
      checks.set(answer, { workers });
      digestOf(answer).then((mine) => note(answer, { own: mine }));
      // where workers are killed to see this, the proof needs no further click
      if (store.me?.is_demo && !repeats) check(answer);
    }
    if (!known) return;
    const { workers, own: mine = "", other: theirs, again } = known;
    text(what, `Went on through ${workers ? `the loss of ${workers}` : "a recovery"}.`);
    set(text(own, mine.slice(0, SHOWN)), { title: mine });
    digest.hidden = mine === "";
    beside.hidden = again === undefined;
    compare.hidden = again !== undefined;
    compare.disabled = isBusy;
    set(text(other, theirs?.slice(0, SHOWN)), { title: theirs });
    const isSame = again?.state === "ended" && textOf(again) === textOf(answer);
    const state = !again?.isOver ? "runs" : isSame ? "equal" : again.state === "ended" ? "differs" : "none";
    setBadge(verdict, state, { runs: "running", none: "not finished" }[state] ?? state);
  };
  store.subscribe(["recoveries"], () => talk.changed());
  return { element, draw };
}
