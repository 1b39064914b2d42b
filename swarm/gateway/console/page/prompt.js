// The prompt box: conversation or plain text, examples, API parameters, Generate and Stop, and the request as a
// command.

import { copier } from "./copying.js";
import { fill, h, keyed, set, text, unique } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { learnModel } from "./model.js";
import { parameterFields } from "./parameters.js";
import { roomWords } from "./room.js";
import { curlOf, pythonOf } from "./snippets.js";
import { talkOf } from "./talk.js";
import { button, field, heading, meter, setMeter } from "./widgets.js";

const REPEATS = "Repeat the request whenever an answer ends, while this page is visible";
const LACKS = {
  live: "The swarm serves no model yet: Generate works as soon as it does.",
  locked: "This gateway needs a key: press “Key” above.",
};
const LONGEST = 1_000_000; // characters; longer prompts are not typed by hand

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const mode = modeSwitch(talk);
  const past = pastTurns(talk);
  const box = promptBox(talk);
  const room = roomLeft(talk);
  const examples = exampleButtons(talk, box);
  const parameters = parameterFields(talk);
  const buttons = actionButtons(talk, store, () => box.generate());
  const parts = [mode, past, examples, box, room, parameters, buttons];
  fill(
    root,
    heading("Prompt", past.back, past.anew, mode.element),
    ...parts.slice(1).map(({ element }) => element),
  );
  talk.subscribe(() => parts.forEach((part) => part.draw()));
  store.subscribe(["connection"], ({ connection }) => talk.set({ lacks: LACKS[connection] ?? "" }));
  learnModel(store, talk, api);
}

function modeSwitch(talk) {
  const name = unique("mode");
  const radio = (mode, words, title) => {
    const input = h("input", { type: "radio", name, value: mode, onchange: () => talk.set({ mode }) });
    return h("label", { class: "segment", title }, input, h("span", {}, words));
  };
  const element = h(
    "fieldset",
    { class: "segments" },
    h("legend", { class: "unseen" }, "Kind of prompt"),
    radio("chat", "Chat", "Turns of a conversation, in the model's own format"),
    radio("raw", "Raw", "Plain text for the model to continue"),
  );
  const draw = () => {
    for (const input of element.querySelectorAll("input")) {
      input.checked = input.value === talk.mode;
      const isNever = input.value === "chat" && talk.model?.chat === false; // the model has no chat template
      input.disabled = talk.isBusy || isNever;
      set(input.parentElement, { "data-never": isNever });
    }
  };
  return { element, draw };
}

// The earlier turns. The current or last answer is shown elsewhere.
function pastTurns(talk) {
  const list = h("ol", { class: "turns", tabindex: 0, "aria-label": "Conversation" });
  const anew = button("New conversation", () => talk.startAnew(), { tone: "quiet small" });
  const back = button("Undo", () => talk.goBack(), { tone: "quiet small", title: "Back to the previous conversation" });
  const make = ({ role }) =>
    h(
      "li",
      { "data-role": role },
      h("span", { class: "turn-role" }, { user: "You", assistant: "Model" }[role] ?? role),
      h("p", { dir: "auto" }),
    );
  let drawn = null;
  const draw = () => {
    const isChat = talk.mode === "chat";
    list.hidden = !isChat || talk.turns.length === 0;
    anew.hidden = !isChat || (talk.turns.length === 0 && talk.answer === null);
    back.hidden = !isChat || talk.former === null;
    for (const each of [anew, back]) set(each, { disabled: talk.isBusy });
    if (drawn === talk.turns) return;
    drawn = talk.turns;
    const rows = talk.turns.map((turn, at) => ({ ...turn, at }));
    keyed(
      list,
      rows,
      ({ at, role }) => `${at}-${role}`,
      make,
      (row, { content }) => text(row.lastElementChild, content),
    );
    list.scrollTop = list.scrollHeight;
  };
  return { element: list, anew, back, draw };
}

function promptBox(talk) {
  const input = h("textarea", { rows: 3, maxlength: LONGEST, dir: "auto", spellcheck: "true", class: "prompt-box" });
  const element = field("Prompt", input, { hint: "Enter generates, Shift+Enter begins a new line.", isWide: true });
  input.addEventListener("input", () => {
    talk.drafts[talk.mode] = input.value;
    talk.set({ notice: "" });
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    generate();
  });
  const generate = () => {
    const { prompt } = talk.problems;
    if (prompt && !talk.isBusy) {
      talk.set({ notice: prompt });
      input.focus();
    } else talk.generate();
  };
  const draw = () => {
    set(input, {
      value: talk.draft,
      placeholder: talk.mode === "chat" ? "Message to the model" : "Text to continue",
    });
  };
  return { element, draw, generate, focus: () => input.focus() };
}

// The remaining context before the prompt is sent, and a remedy if it is too small.
function roomLeft(talk) {
  const bar = meter("Context");
  const anew = button("Begin a new conversation", () => talk.startAnew(), { tone: "small" });
  const element = h("div", { class: "room" }, bar, anew);
  const draw = () => {
    const { room } = talk;
    element.hidden = room === null;
    if (room === null) return;
    const words = roomWords(room);
    setMeter(bar, { value: room.used, most: room.context, words });
    set(element, { "data-level": room.level });
    anew.hidden = room.level === "roomy" || room.isAlone;
    set(anew, { disabled: talk.isBusy });
  };
  return { element, draw };
}

function exampleButtons(talk, box) {
  const all = EXAMPLES.map((example) => {
    const take = () => {
      talk.take(example);
      box.focus();
    };
    return button(example.name, take, { tone: "small", title: example.hint });
  });
  const element = h("div", { class: "examples", role: "group", "aria-label": "Examples" }, h("span", {}, "Try"), all);
  const draw = () => all.forEach((each) => set(each, { disabled: talk.isBusy }));
  return { element, draw };
}

// --- buttons

function actionButtons(talk, store, ask) {
  const generate = button("Generate", ask, { tone: "primary" });
  const stop = button("Stop", () => talk.stop());
  const where = () => ({
    baseUrl: store.me?.base_url ?? `${location.origin}/v1`,
    needsKey: store.me?.needs_key ?? false,
  });
  const copies = [
    copier("Copy as curl", () => curlOf(talk.copied, where())),
    copier("Copy as Python", () => pythonOf(talk.copied, where())),
  ];
  const again = h("input", { type: "checkbox", onchange: () => talk.set({ repeats: again.checked }) });
  const repeats = h("label", { class: "check quiet-words", title: REPEATS }, again, "repeat until Stop");
  const problem = h("p", { class: "problem", id: unique("problem"), role: "status" });
  set(generate, { "aria-describedby": problem.id });
  const element = h(
    "div",
    { class: "actions prompt-actions" },
    generate,
    stop,
    repeats,
    problem,
    h("span", { class: "push" }, ...copies),
  );
  const draw = () => {
    const { prompt, ...others } = talk.problems;
    const [first = ""] = Object.values(others); // the field may be folded away, so the problem is shown here, too
    set(generate, { disabled: talk.isBusy || first !== "" || !talk.model });
    again.checked = talk.repeats;
    set(stop, { disabled: !talk.isBusy || talk.isStopping });
    text(stop, talk.isStopping ? "Stopping…" : "Stop");
    copies.forEach((copy) => set(copy, { disabled: first !== "" }));
    text(problem, first || talk.notice || (talk.model ? "" : prompt));
  };
  return { element, draw };
}
