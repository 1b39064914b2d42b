// Where the time of each token went. The trace is fetched when an answer ends, and during it while visible.

import { fill, h, set, text } from "./dom.js";
import { plural, seconds, share } from "./format.js";
import { Columns, bar, swatch } from "./plot.js";
import { pieceOf } from "./reading.js";
import { Spans, inWords, scaleOf, slowestToken, sumByPart, tokenInWords } from "./spans.js";
import { talkOf } from "./talk.js";
import { TraceReader } from "./tracing.js";
import { button, empty, heading, headOf } from "./widgets.js";

const WHAT = "When an answer streams in, each of its tokens is drawn here: where its time went, hop by hop.";

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const shown = { requestId: "", isRunning: false, choice: 0, at: null, spans: [new Spans()], problem: "" };
  const parts = [sentences(), chart(shown), sums()];
  const nothing = empty("", WHAT);
  const problem = h("p", { class: "hint" });
  const title = h("span", { class: "quiet-words" });
  const choice = choiceSelect(shown, () => draw());
  const back = button("Back to the answer", () => follow(), { tone: "quiet small" });
  const body = h("div", { class: "timeline" }, parts.map(({ element }) => element));
  fill(root, heading("Timeline", title, choice.element, back), nothing, problem, body);

  set(root, { tabindex: -1 }); // receives the focus when a trace is requested elsewhere on the page
  const draw = () => {
    const spans = shown.spans[shown.choice] ?? shown.spans[0];
    const isEmpty = spans.tokens.length === 0;
    nothing.hidden = shown.requestId !== "" && (!isEmpty || shown.problem !== "");
    text(nothing.firstElementChild, shown.requestId === "" ? "No times yet" : waitsFor(shown, talk));
    body.hidden = isEmpty;
    text(problem, shown.problem).hidden = !shown.problem;
    const isOwn = shown.requestId === (talk.answer?.requestId ?? "");
    back.hidden = isOwn || !talk.answer;
    text(title, isOwn || !shown.requestId ? "" : `request ${shown.requestId.slice(0, 8)}`);
    choice.draw();
    const textOf = isOwn ? textsOf(talk.answer, shown.choice, spans) : () => "";
    if (!isEmpty) parts.forEach((part) => part.draw(spans, textOf));
  };

  const reader = new TraceReader(api, root, (requestId, report, words) => {
    if (requestId !== shown.requestId) return;
    shown.problem = words;
    (report?.sequences ?? []).forEach((sequence, index) => (shown.spans[index] ??= new Spans()).add(sequence));
    draw();
  });
  const show = (requestId, { isRunning, isDue = true }) => {
    if (requestId !== shown.requestId)
      Object.assign(shown, { requestId, choice: 0, at: null, spans: [new Spans()], problem: "" });
    shown.isRunning = isRunning;
    if (isDue) reader.follow(requestId, isRunning); // before its first token there is no trace
    draw();
  };
  const follow = () =>
    show(talk.answer?.requestId ?? "", { isRunning: talk.isBusy, isDue: (talk.answer?.firstAt ?? null) !== null });

  let told = "";
  talk.subscribe(({ answer, isBusy }) => {
    const now = `${answer?.requestId} ${isBusy} ${answer?.firstAt === null}`;
    if (now !== told) follow();
    told = now;
    if (shown.requestId === answer?.requestId) reader.grown(answer.numPieces);
  });
  const runs = (id) => (talk.isBusy && id === talk.answer?.requestId) || store.view?.requests?.[id] !== undefined;
  store.subscribe(["requests"], () => {
    if (shown.isRunning && !runs(shown.requestId)) show(shown.requestId, { isRunning: false });
  });
  addEventListener("trace", ({ detail }) => {
    show(detail, { isRunning: runs(detail) });
    root.scrollIntoView({ block: "nearest" });
    root.focus({ preventScroll: true });
  });
  new ResizeObserver(draw).observe(root);
  addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

// A trace exists once the first token does.
function waitsFor({ requestId, isRunning }, { answer }) {
  if (requestId === answer?.requestId && answer.firstAt === null && !answer.isOver)
    return "Waiting for the first token …";
  return isRunning ? "The times are fetched while this is visible" : "Fetching the times …";
}

function choiceSelect(shown, changed) {
  const select = h("select", { "aria-label": "Continuation", class: "small" });
  select.addEventListener("change", () => {
    Object.assign(shown, { choice: Number(select.value), at: null });
    changed();
  });
  const draw = () => {
    select.hidden = shown.spans.length < 2;
    if (select.options.length !== shown.spans.length)
      fill(select, shown.spans.map((_, index) => h("option", { value: index }, `Continuation ${index + 1}`)));
    set(select, { value: shown.choice });
  };
  return { element: select, draw };
}

function sentences() {
  const element = h("ul", { class: "sentences" });
  const draw = (spans, textOf) => {
    const lines = inWords(spans, textOf);
    while (element.childElementCount > lines.length) element.lastElementChild.remove();
    while (element.childElementCount < lines.length) element.append(h("li"));
    lines.forEach((line, index) => text(element.children[index], line));
  };
  return { element, draw };
}

function chart(shown) {
  const canvas = h("canvas", { class: "columns-chart", "aria-hidden": "true" });
  const plot = new Columns(canvas);
  const slider = h(
    "div", { class: "chart-box", role: "slider", tabindex: 0, "aria-label": "Token", "aria-valuemin": 1 }, canvas,
  );
  const [top, note] = [h("span"), h("span")];
  const readout = h("p", { class: "readout" });
  const one = h("div");
  const element = h("div", {}, h("div", { class: "chart-head quiet-words" }, top, note), slider, readout, one);
  let spans = new Spans();
  let textOf = () => "";

  const point = (token) => {
    if (!token) return;
    shown.at = token.index;
    showToken();
  };
  const showToken = () => {
    const token = spans.tokens.find(({ index }) => index === shown.at) ?? slowestToken(spans.tokens);
    const words = tokenInWords(spans, token, textOf);
    text(readout, words);
    fill(one, bar(spans.spansOf(token), token.total_s));
    set(slider, {
      "aria-valuenow": token.index + 1, "aria-valuemax": spans.tokens.at(-1).index + 1, "aria-valuetext": words,
    });
    plot.draw(spans, { at: shown.at });
  };
  for (const kind of ["pointermove", "pointerdown"])
    slider.addEventListener(kind, ({ clientX }) => point(plot.tokenAt(clientX - canvas.getBoundingClientRect().left)));
  slider.addEventListener("keydown", (event) => {
    const token = moved(spans.tokens, shown.at, event.key);
    if (!token) return;
    event.preventDefault();
    point(token);
  });
  const draw = (now, texts) => {
    [spans, textOf] = [now, texts];
    showToken();
    text(top, `${seconds(scaleOf(spans.tokens))} at the top`);
    text(note, noteOf(spans, plot));
  };
  return { element, draw };
}

const MISSING = 2; // the newest tokens of a running answer may be generated but not reported yet

function noteOf({ tokens, numTokens }, { perColumn }) {
  const missing = numTokens - tokens.length;
  const words = [perColumn > 1 ? `each column the slowest of ${perColumn} tokens` : "each column a token"];
  if (missing > MISSING) words.push(`${plural(missing, "token")} no longer known`);
  return words.join("; ");
}

function moved(tokens, at, key) {
  const place = at === null ? -1 : tokens.findIndex(({ index }) => index === at);
  const moves = {
    ArrowRight: place + 1, ArrowUp: place + 1, ArrowLeft: place - 1, ArrowDown: place - 1, PageUp: place + 10,
    PageDown: place - 10, Home: 0, End: tokens.length - 1,
  };
  if (key === "Enter") return slowestToken(tokens);
  return key in moves ? tokens[Math.max(0, Math.min(tokens.length - 1, moves[key]))] : null;
}

// Without log probabilities, a token without text of its own leaves no trace in the answer; then texts can be matched
// to tokens only if their numbers agree (apart from the end token, which has no text).
function textsOf(answer, index, spans) {
  const choice = answer?.choices[index];
  if (!choice) return () => "";
  const isExact =
    choice.chances[0] || choice.ends.length === spans.numTokens || choice.ends.length === spans.numTokens - 1;
  return (at) => (isExact && at < choice.ends.length ? pieceOf(choice, at) : "");
}

function sums() {
  const rows = h("tbody");
  const columns = ["part", "time", "share", "what it is"];
  const head = headOf("Where the time of all tokens went, part by part", columns, (at) => at === 1 || at === 2);
  const element = h("div", { class: "sums" }, h("table", {}, head, rows));
  let told = "";
  const draw = (spans) => {
    if (!spans.sums) return;
    const whole = spans.sums.total_s;
    const lines = [
      ...sumByPart(spans.totals).filter(({ seconds: length }) => length > 0), { part: null, seconds: whole },
    ];
    const now = JSON.stringify(lines.map(({ part, seconds: length }) => [part?.name, length]));
    if (now === told) return;
    told = now;
    const row = ({ part, seconds: length }) => (part ? sumRow(part, length, whole) : totalRow(spans, length));
    fill(rows, lines.map(row));
  };
  return { element, draw };
}

const sumRow = (part, length, whole) =>
  h(
    "tr", {}, h("th", { scope: "row" }, swatch(part.name), ` ${part.label}`),
    h("td", { class: "num" }, seconds(length)), h("td", { class: "num" }, share(length, whole)),
    h("td", { class: "hint" }, part.meaning),
  );

const totalRow = ({ numTraced }, length) =>
  h(
    "tr", { class: "total" }, h("th", { scope: "row" }, "total"), h("td", { class: "num" }, seconds(length)), h("td"),
    h("td", { class: "hint" }, plural(numTraced, "token")),
  );
