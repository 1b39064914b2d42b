// The turns of the conversation before the answer in progress: what was asked, what was answered, and what can be done
// with each. Text of a model or a client becomes elements only through rendered.js.

import { copier } from "./copying.js";
import { fill, h, keyed, set, text } from "./dom.js";
import { Rendered } from "./rendered.js";
import { siblingsOf } from "./thread.js";
import { talkOf } from "./talk.js";
import { button } from "./widgets.js";

const ROLES = { user: "You", assistant: "Model" };

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const list = h("ol", { class: "turns" });
  fill(root, list);
  let drawn = [];
  const draw = () => {
    const now = [talk.thread, talk.id, talk.isBusy, talk.answer !== null, talk.model, talk.editing];
    if (now.every((part, at) => part === drawn[at])) return;
    drawn = now;
    root.hidden = talk.turns.length === 0;
    const rows = talk.turns.map((turn) => ({ turn, key: `${talk.id} ${turn.id}` }));
    keyed(
      list, rows, ({ key }) => key, ({ turn }) => turnElement(talk, turn),
      (element, { turn }, at) => element.draw(turn, at === rows.length - 1 && talk.answer === null),
    );
  };
  talk.subscribe(draw);
}

function turnElement(talk, { role, content, thought, facts, isRaw, isPlain, requestId }) {
  const isUser = role === "user";
  const words = h("div", { class: "words", dir: "auto" });
  if (isUser || isRaw || isPlain) fill(set(words, { class: "words as-is" }), content);
  else new Rendered(set(words, { class: "words md" })).draw(content);
  if (isUser) letScroll(words);
  const alternatives = alternativesOf(talk);
  const actions = h("div", { class: "turn-actions" }, alternatives.element, copier("Copy", () => content));
  const current = {};
  if (isUser) actions.append(button("Edit", () => talk.edit(current.turn), { tone: "quiet small" }));
  else
    actions.append(...retryAndBranch(talk, () => current.turn), timelineButton(() => requestId));
  const element = h(
    "li", { class: "turn", "data-role": role },
    h("span", { class: isUser ? "unseen" : "turn-role" }, isRaw ? (isUser ? "Text" : "Continuation") : ROLES[role]),
    thought ? thoughtFold(thought) : null, words, facts ? h("p", { class: "quiet-words" }, facts) : null,
    actions,
  );
  element.draw = (turn, isLast) => {
    current.turn = turn;
    alternatives.draw(turn);
    set(element, { "data-last": isLast, "data-editing": talk.editing === turn.id });
    for (const each of actions.querySelectorAll("button:not([data-always])")) each.disabled = talk.isBusy;
  };
  return element;
}

const BRANCH = "Begin a conversation of its own with all up to here";

export const retryAndBranch = (talk, turnOf) => [
  button("Retry", () => talk.retry(turnOf()), { tone: "quiet small", title: "Ask again, with another seed" }),
  button("Branch", () => talk.branch(turnOf()), { tone: "quiet small", title: BRANCH }),
];

const SCROLLS = { tabindex: 0, role: "group", "aria-label": "Message" };

// A long paste scrolls by itself, also by keys.
function letScroll(element) {
  new ResizeObserver(() => {
    const scrolls = element.scrollHeight > element.clientHeight + 1;
    set(element, scrolls ? SCROLLS : { tabindex: null, role: null, "aria-label": null });
  }).observe(element);
}

export function thoughtFold(words) {
  const [summary, body] = [h("summary", {}), h("p", { class: "as-is", dir: "auto" })];
  const element = h("details", { class: "thought" }, summary, body);
  element.draw = (thought, isOver = true) => {
    const node = (body.firstChild ?? body.appendChild(document.createTextNode("")));
    if (thought.length > node.length) node.appendData(thought.slice(node.length));
    text(summary, isOver ? "Reasoning" : "Reasoning …");
  };
  element.draw(words);
  return element;
}

export const timelineButton = (requestIdOf) =>
  button("Timeline", () => dispatchEvent(new CustomEvent("trace", { detail: requestIdOf() })), {
    tone: "quiet small", title: "Where the time of each token went", "data-always": true,
  });

export function alternativesOf(talk) {
  const go = (step) => () => {
    const next = element.all[element.at + step];
    if (next) talk.show(next);
  };
  const before = button("‹", go(-1), { tone: "quiet small", "aria-label": "Former alternative" });
  const after = button("›", go(1), { tone: "quiet small", "aria-label": "Next alternative" });
  const words = h("span", { class: "quiet-words" });
  const element = h("span", { class: "alternatives-of" }, before, words, after);
  // `more`: alternatives that are no turns yet; the shown one is the last of them
  const draw = (turn, more = 0) => {
    element.all = turn ? siblingsOf(talk.thread, turn) : [];
    element.at = more ? element.all.length + more - 1 : element.all.findIndex(({ id }) => id === turn?.id);
    const num = element.all.length + more;
    element.hidden = num < 2;
    text(words, `${element.at + 1} of ${num}`);
    set(before, { "data-always": element.at === 0 }).disabled = element.at === 0;
    set(after, { "data-always": element.at >= num - 1 }).disabled = element.at >= num - 1;
  };
  return { element, draw };
}
