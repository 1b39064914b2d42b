// The last answer as it streams in: its continuations, its reasoning, how it ended and what it took; borders and
// certainty of tokens on demand. The model's output becomes elements only through rendered.js.

import { TokenText, alternativesPanel, certaintyLegend } from "./alternatives.js";
import { hasConfidence } from "./ask.js";
import { summary } from "./certainty.js";
import { copier } from "./copying.js";
import { fill, h, keyed, set, text, unique } from "./dom.js";
import { REASONS, factsOf, isPlain } from "./facts.js";
import { plural } from "./format.js";
import { healedLine } from "./healed.js";
import { progressOf, stateOf } from "./queue.js";
import { answeredIn } from "./reading.js";
import { Rendered } from "./rendered.js";
import { talkOf } from "./talk.js";
import { alternativesOf, retryAndBranch, thoughtFold, timelineButton } from "./turns.js";
import { badge, button, meter, setBadge, setMeter } from "./widgets.js";

const STATES = {
  asking: ["connecting", "asked"], streaming: ["runs", "streaming"], broken: ["reconnecting", "reconnecting"],
  ended: ["done", "complete"], stopped: ["none", "stopped"], failed: ["failed", "failed"],
  elsewhere: ["away", "read elsewhere"],
};
const NEAR = 60; // pixels from the end within which the transcript follows an answer

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const view = { borders: false }; // affects the display, not the request
  const state = badge("", "");
  const status = h("span", { role: "status" }, state);
  const choices = choiceGrid(talk, view);
  const words = h("p", { class: "problem", role: "alert", hidden: true });
  const back = button("Read it here", () => talk.takeBack());
  const facts = h("p", { class: "quiet-words" });
  const waiting = waitingFor(talk, store);
  const certainty = certaintySwitch(talk, view);
  const panel = alternativesPanel();
  const healed = healedLine(store, talk, api);
  const actions = answerActions(talk, certainty);
  choices.element.addEventListener("token", ({ detail }) => panel.show(detail));
  fill(
    root, h("div", { class: "answer-head" }, h("span", { class: "turn-role" }, "Model"), status), waiting.element,
    choices.element, certainty.element, panel.element, words, back, facts, healed.element, actions.element,
  );

  const draw = () => {
    const { answer } = talk;
    const isAtEnd = isNearEnd();
    if (panel.isOf !== answer) panel.show(null, answer);
    root.hidden = answer === null;
    if (answer === null) return follow(isAtEnd);
    const [tone, name] = STATES[answer.state];
    setBadge(state, tone, name);
    certainty.draw();
    waiting.draw();
    back.hidden = answer.state !== "elsewhere";
    words.hidden = !answer.words;
    text(words, answer.words);
    set(words, { class: answer.state === "failed" ? "problem" : "hint" });
    choices.draw();
    actions.draw();
    healed.draw();
    drawFacts();
    return follow(isAtEnd);
  };
  const drawFacts = () => text(facts, factsOf(talk.answer, talk.model?.context));

  // The transcript follows an answer while its end is visible, and shows what was just asked.
  const transcript = document.getElementById("transcript");
  const isNearEnd = () => transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR;
  let last = "";
  const follow = (isAtEnd) => {
    const now = `${talk.id} ${talk.turns.length} ${talk.answer?.askedAt}`;
    if (isAtEnd || now !== last) transcript.scrollTop = transcript.scrollHeight;
    last = now;
  };
  talk.subscribe(draw);
  document.getElementById("tabs").addEventListener("tab", ({ detail }) => {
    if (detail === "chat") transcript.scrollTop = transcript.scrollHeight;
  });
  setInterval(() => talk.isBusy && drawFacts(), 1000); // keep the elapsed time running while nothing arrives
}

function answerActions(talk, certainty) {
  const alternatives = alternativesOf(talk);
  const copy = copier("Copy", () => answeredIn(talk.answer.choices[talk.chosen]));
  const buttons = [copy, ...retryAndBranch(talk, () => null)];
  const timeline = timelineButton(() => talk.answer?.requestId ?? "");
  const switches = h("span", { class: "push" }, certainty.switches);
  const element = h("div", { class: "turn-actions" }, alternatives.element, buttons, timeline, switches);
  const draw = () => {
    const { answer, thread, turns, isBusy } = talk;
    const parent = turns.at(-1)?.id;
    const former = Object.values(thread.turns).findLast((turn) => turn.parent === parent);
    alternatives.draw(former, 1);
    for (const each of buttons) each.disabled = isBusy;
    timeline.hidden = !answer.requestId;
  };
  return { element, draw };
}

// Progress before the first token: place in the queue, or computed share of the prompt.
function waitingFor(talk, store) {
  const element = h("div", {}, meter("prompt"));
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
      element, rows, ({ index }) => index, (row) => choiceCard(talk, row, name), (card, row) => card.drawn(row, view),
    );
  };
  return { element, draw };
}

function choiceCard(talk, { index }, name) {
  const output = h("output", {
    "data-answer": index, dir: "auto", "aria-live": "off", "aria-label": `Continuation ${index + 1}`,
  });
  const writers = { tokens: () => new TokenText(output, index), markdown: () => new Rendered(fill(output)) };
  const drawn = { how: "", writer: null };
  const thought = thoughtFold("");
  const end = h("span", { class: "quiet-words" });
  const pick = h("input", { type: "radio", name, onchange: () => talk.set({ chosen: index }) });
  const picker = h("label", { class: "check quiet-words" }, pick, "continue with this one");
  const card = h(
    "article", { class: "choice", "aria-label": `Continuation ${index + 1}` },
    h("div", { class: "choice-head" }, h("h3", {}, `${index + 1}`), end, picker), thought, output,
  );
  card.drawn = ({ choice }, view) => {
    const { answer, wantsConfidence } = talk;
    const isMany = answer.choices.length > 1;
    card.firstElementChild.hidden = !isMany;
    picker.hidden = !answer.isOver;
    pick.checked = talk.chosen === index;
    text(end, endWords(choice, answer));
    const isApart = view.borders || (wantsConfidence && hasConfidence(answer.request));
    thought.hidden = choice.numThought === 0 || isApart;
    if (!thought.hidden)
      thought.draw(choice.text.slice(0, choice.numThought), answer.isOver || choice.text.length > choice.numThought);
    const how = isApart || isPlain(answer) ? "tokens" : "markdown";
    if (how !== drawn.how) Object.assign(drawn, { how, writer: writers[how]() });
    set(output, { class: how === "markdown" ? "md" : "as-is" });
    if (how === "markdown") drawn.writer.draw(answeredIn(choice));
    else drawn.writer.draw(choice, { withBorders: view.borders, withCertainty: wantsConfidence });
  };
  return card;
}

const endWords = ({ reason, ends, chances }, answer) => {
  const length = plural(ends.length, chances[0] ? "token" : "piece"); // a piece of text may be several tokens
  return reason ? `${length}, ${REASONS[reason] ?? reason}` : answer.isOver ? "not finished" : length;
};

function certaintySwitch(talk, view) {
  const confidence = h("input", {
    type: "checkbox", onchange: () => talk.set({ wantsConfidence: confidence.checked }),
  });
  const showBorders = () => {
    view.borders = borders.checked;
    talk.changed();
  };
  const borders = h("input", { type: "checkbox", onchange: showBorders });
  const labelled = (box, words, title) => h("label", { class: "check quiet-words", title }, box, words);
  const switches = [
    labelled(confidence, "Confidence", "Underline each token by how sure the model was"),
    labelled(borders, "Tokens", "Show where each token ends"),
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
