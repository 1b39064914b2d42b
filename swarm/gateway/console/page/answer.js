// The streaming answer: its continuations side by side, how they ended and what they took; borders and certainty of
// tokens on demand. The model's output is only ever inserted as text.

import { TokenText, alternativesPanel, certaintyLegend } from "./alternatives.js";
import { hasConfidence } from "./ask.js";
import { summary } from "./certainty.js";
import { fill, h, keyed, set, text, unique } from "./dom.js";
import { count, plural, rate, seconds } from "./format.js";
import { progressOf, stateOf } from "./queue.js";
import { isCutByContext } from "./room.js";
import { talkOf } from "./talk.js";
import { badge, button, empty, heading, meter, setBadge, setMeter } from "./widgets.js";

const REASONS = { stop: "reached its end", length: "cut at the maximum length", tool_calls: "calls a tool" };
const STATES = {
  asking: ["connecting", "asked"],
  streaming: ["runs", "streaming"],
  broken: ["reconnecting", "reconnecting"],
  ended: ["done", "complete"],
  stopped: ["none", "stopped"],
  failed: ["failed", "failed"],
  elsewhere: ["away", "read elsewhere"],
};

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const view = { borders: false }; // affects the display, not the request
  const state = badge("", "");
  const status = h("span", { role: "status", class: "answer-state" }, state);
  const nothing = empty(
    "No answer yet",
    "Write a prompt and press Generate: the answer streams in here, and continues after a reload.",
  );
  const choices = choiceGrid(talk, view);
  const words = h("p", { class: "problem", role: "alert", hidden: true });
  const back = button("Read it here", () => talk.takeBack());
  const anew = button("Begin a new conversation", () => talk.startAnew());
  const facts = h("p", { class: "quiet-words answer-facts" });
  const waiting = waitingFor(talk, store);
  const certainty = certaintySwitch(talk, view);
  const panel = alternativesPanel();
  choices.element.addEventListener("token", ({ detail }) => panel.show(detail));
  fill(
    root,
    heading("Answer", ...certainty.switches, status),
    nothing,
    waiting.element,
    choices.element,
    certainty.element,
    panel.element,
    words,
    back,
    anew,
    facts,
  );

  const draw = () => {
    const { answer } = talk;
    nothing.hidden = answer !== null;
    facts.hidden = choices.element.hidden = status.hidden = answer === null;
    certainty.draw();
    waiting.draw();
    if (panel.isOf !== answer) panel.show(null, answer);
    back.hidden = answer?.state !== "elsewhere";
    anew.hidden = !(answer?.isTooLong && answer.isChat && talk.turns.length > 0);
    words.hidden = !answer?.words;
    if (!answer) return;
    const [tone, name] = STATES[answer.state];
    setBadge(state, tone, name);
    text(words, answer.words);
    set(words, { class: answer.state === "failed" ? "problem" : "hint" });
    choices.draw();
    drawFacts();
  };
  const drawFacts = () => text(facts, factsOf(talk.answer, talk.model?.context));
  talk.subscribe(draw);
  setInterval(() => talk.isBusy && drawFacts(), 1000); // keep the elapsed time running while nothing arrives
}

// Progress before the first token: place in the queue, or computed share of the prompt.
function waitingFor(talk, store) {
  const element = h("div", { class: "waiting" }, meter("prompt"));
  const draw = () => {
    const { answer } = talk;
    const row = answer?.firstAt === null && !answer.isOver ? store.view?.requests?.[answer.requestId] : undefined;
    element.hidden = row === undefined;
    if (element.hidden) return;
    const { words, part } = progressOf(row);
    setMeter(element.firstElementChild, { value: part ?? 0, most: 1, words: `${stateOf(row)}: ${words}` });
  };
  store.subscribe(["requests"], draw);
  return { element, draw };
}

// --- continuations

function choiceGrid(talk, view) {
  const element = h("div", { class: "choices" });
  const name = unique("chosen");
  let drawnFor = null;
  const draw = () => {
    const { answer } = talk;
    if (drawnFor !== answer) {
      drawnFor = answer;
      element.keyedChildren = new Map(); // do not reuse the elements of another answer
      fill(element);
    }
    set(element, { "data-many": answer.choices.length > 1 });
    const rows = answer.choices.map((choice, index) => ({ choice, index }));
    keyed(
      element,
      rows,
      ({ index }) => index,
      (row) => choiceCard(talk, row, name),
      (card, row) => card.drawn(row, view),
    );
  };
  return { element, draw };
}

function choiceCard(talk, { index }, name) {
  const output = h("output", {
    "data-answer": index,
    dir: "auto",
    "aria-live": "off",
    "aria-label": `Continuation ${index + 1}`,
  });
  const tokens = new TokenText(output, index);
  const end = h("span", { class: "quiet-words" });
  const pick = h("input", { type: "radio", name, onchange: () => talk.set({ chosen: index }) });
  const picker = h("label", { class: "check quiet-words" }, pick, "continue with this one");
  const card = h(
    "article",
    { class: "choice", "aria-label": `Continuation ${index + 1}` },
    h("div", { class: "choice-head" }, h("h3", {}, `${index + 1}`), end, picker),
    output,
  );
  card.drawn = ({ choice }, view) => {
    const { answer } = talk;
    const isMany = answer.choices.length > 1;
    card.firstElementChild.hidden = !isMany;
    picker.hidden = !(answer.isChat && answer.isOver);
    pick.checked = talk.chosen === index;
    text(end, endWords(choice, answer));
    const isLow = output.scrollHeight - output.scrollTop - output.clientHeight < 24;
    tokens.draw(choice, { withBorders: view.borders, withCertainty: talk.wantsConfidence, isOver: answer.isOver });
    if (isLow && !answer.isOver) output.scrollTop = output.scrollHeight;
    const scrolls = tokens.isPlain && output.scrollHeight > output.clientHeight;
    set(output, { tabindex: scrolls ? 0 : null }); // lets keyboard users scroll
  };
  return card;
}

const endWords = ({ reason, ends, chances }, answer) => {
  const length = plural(ends.length, chances[0] ? "token" : "piece"); // a piece of text may be several tokens
  return reason ? `${length}, ${REASONS[reason] ?? reason}` : answer.isOver ? "not finished" : length;
};

// --- certainty and borders

function certaintySwitch(talk, view) {
  const confidence = h("input", {
    type: "checkbox",
    onchange: () => talk.set({ wantsConfidence: confidence.checked }),
  });
  const borders = h("input", {
    type: "checkbox",
    onchange: () => {
      view.borders = borders.checked;
      talk.changed();
    },
  });
  const switches = [
    h("label", { class: "check", title: "Underline each token by how sure the model was" }, confidence, "Confidence"),
    h("label", { class: "check", title: "Show where each token ends" }, borders, "Tokens"),
  ];
  const told = h("p", { class: "hint" });
  const again = button("Ask again with confidence", () => talk.askForConfidence(), {
    title: "The same seed gives the same text",
  });
  const legend = certaintyLegend();
  const element = h("div", { class: "certainty" }, legend, told, again);
  const draw = () => {
    const { answer, wantsConfidence } = talk;
    confidence.checked = wantsConfidence;
    const isKnown = answer !== null && hasConfidence(answer.request);
    element.hidden = answer === null || !wantsConfidence;
    legend.hidden = !isKnown;
    again.hidden = isKnown || talk.isBusy;
    if (element.hidden) return;
    text(told, isKnown ? certaintyWords(answer) : "This answer was requested without confidence.");
  };
  return { switches, element, draw };
}

// Summarised only at the end: for thousands of tokens it is too slow for each frame.
const certaintyWords = (answer) =>
  answer.isOver
    ? summary(answer.choices.flatMap(({ chances }) => chances))
    : "Point at a token, or go through them with the arrow keys.";

// --- usage

function factsOf(answer, context) {
  const { usage, askedAt, firstAt, endedAt, numBreaks, request, requestId, isCut } = answer;
  const end = endedAt ?? Date.now();
  // until the report arrives, the number of pieces is a good estimate
  const num = usage?.completion_tokens ?? answer.numPieces;
  const speed = firstAt !== null && end > firstAt && num > 1 ? num / ((end - firstAt) / 1000) : null;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const reason = answer.choices.length === 1 ? answer.choices[0].reason : null;
  const howItEnded = isCutByContext(answer, context) ? "cut: the model's context is full" : (REASONS[reason] ?? reason);
  return [
    reason ? howItEnded : "",
    usage ? `prompt ${count(usage.prompt_tokens)}${cached ? ` (${count(cached)} of them cached)` : ""}` : "",
    usage ? `answer ${plural(usage.completion_tokens, "token")}` : "",
    firstAt === null ? "" : `first token ${seconds((firstAt - askedAt) / 1000)}`,
    `${answer.isOver ? "in all" : "so far"} ${seconds((end - askedAt) / 1000)}`,
    speed ? `${usage ? "" : "about "}${rate(speed)} tokens/s` : "",
    numBreaks ? `resumed after ${plural(numBreaks, "break")}` : "",
    `seed ${request.body.seed}`,
    requestId ? `request ${requestId.slice(0, 8)}` : "",
    isCut ? "longer than this page keeps: its end is not shown" : "",
  ]
    .filter(Boolean)
    .join(" · ");
}
