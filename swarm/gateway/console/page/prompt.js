// The prompt box at the end of the conversation: Send and Stop, files, the model, and a drawer with the parameters.

import { copier } from "./copying.js";
import { exactCounter } from "./counting.js";
import { fill, h, set, text, unique } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { fileDrop } from "./file_drop.js";
import { learnModel } from "./model.js";
import { parameterFields, wordsOfSet } from "./parameters.js";
import { roomWords } from "./room.js";
import { curlOf, pythonOf } from "./snippets.js";
import { talkOf } from "./talk.js";
import { button, field, meter, setMeter } from "./widgets.js";

const REPEATS = "Repeat the request whenever an answer ends, while this page is visible";
const LONGEST = 1_000_000; // characters; longer prompts are not typed by hand

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const drawer = parameterDrawer(talk, store);
  const box = promptBox(talk, () => drawer.toggle(false));
  const files = fileDrop(talk, document.getElementById("panel-chat"), () => box.focus());
  const parts = [welcome(talk, box), drawer, editingNote(talk), box, roomLeft(talk)];
  const bar = actionBar(talk, box, drawer, files);
  fill(
    root, parts[0].element, h("div", { class: "composer" }, drawer.element, parts[2].element, box.element, bar.element),
    parts[4].element,
  );
  let editing = 0;
  const draw = () => {
    [...parts, bar].forEach((part) => part.draw());
    if (talk.editing !== editing && talk.editing) box.focus();
    editing = talk.editing;
  };
  draw(); // so that nothing moves in the first frame
  talk.subscribe(draw);
  learnModel(store, talk, api);
  exactCounter(talk, api);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (drawer.isOpen()) drawer.toggle(false);
    else if (talk.editing) talk.stopEditing();
    else if (root.contains(document.activeElement) && talk.isBusy) talk.stop();
    else return;
    event.preventDefault();
  });
}

function welcome(talk, box) {
  const all = EXAMPLES.map((example) => {
    const take = () => {
      talk.take(example);
      box.focus();
    };
    return button(example.name, take, { tone: "small", title: example.hint });
  });
  const element = h(
    "div", { class: "welcome" }, h("h2", {}, "Ask the swarm"),
    h("p", { class: "quiet-words" }, "One model, cut by layers across workers. Kill one: the answer goes on."),
    h("div", { class: "examples", role: "group", "aria-label": "Examples" }, all),
  );
  const draw = () => {
    element.hidden = talk.turns.length > 0 || talk.answer !== null;
    all.forEach((each) => set(each, { disabled: talk.isBusy }));
  };
  return { element, draw };
}

function editingNote(talk) {
  const cancel = button("Cancel", () => talk.stopEditing(), { tone: "quiet small" });
  const element = h("div", { class: "editing" }, h("span", {}, "Editing an earlier message"), cancel);
  return { element, draw: () => void (element.hidden = talk.editing === 0) };
}

function promptBox(talk, onSend) {
  const input = h("textarea", {
    rows: 1, maxlength: LONGEST, dir: "auto", spellcheck: "true", class: "prompt-box", "aria-label": "Prompt",
    title: "Enter sends, Shift+Enter begins a new line",
  });
  input.addEventListener("input", () => {
    talk.drafts[talk.mode] = input.value;
    talk.set({ notice: "" });
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const send = () => {
    const { prompt } = talk.problems;
    if (prompt && !talk.isBusy) {
      talk.set({ notice: prompt });
      input.focus();
    } else if (Object.keys(talk.problems).length === 0 && !talk.isBusy) {
      onSend();
      talk.generate();
    }
  };
  const draw = () => {
    const placeholder = talk.mode === "chat" ? "Message to the model" : "Text for the model to continue";
    set(input, { value: talk.draft, placeholder });
  };
  return { element: input, draw, send, focus: () => input.focus() };
}

// The remaining context before the prompt is sent, and a remedy if it is too small.
function roomLeft(talk) {
  const bar = meter("Context", "Tokens of this conversation and the prompt, of those that the model can hold");
  const anew = button("Begin a new conversation", () => talk.startAnew(), { tone: "small", hidden: true });
  const element = h("div", { class: "room" }, bar, anew);
  const draw = () => {
    const { room } = talk;
    set(element, { "data-unknown": room === null });
    if (room === null) return;
    const words = roomWords(room);
    setMeter(bar, { value: room.used, most: room.context, words });
    set(element, { "data-level": room.level });
    anew.hidden = room.level === "roomy" || room.isAlone;
    set(anew, { disabled: talk.isBusy });
  };
  return { element, draw };
}

function parameterDrawer(talk, store) {
  const mode = modeSwitch(talk);
  const parameters = parameterFields(talk);
  const where = () => ({
    baseUrl: store.me?.base_url ?? `${location.origin}/v1`, needsKey: store.me?.needs_key ?? false,
  });
  const copies = [
    copier("Copy as curl", () => curlOf(talk.copied, where())),
    copier("Copy as Python", () => pythonOf(talk.copied, where())),
  ];
  const again = h("input", { type: "checkbox", onchange: () => talk.set({ repeats: again.checked }) });
  const repeats = h("label", { class: "check quiet-words", title: REPEATS }, again, "repeat until Stop");
  const element = h(
    "div", { class: "drawer", id: unique("drawer"), role: "group", "aria-label": "Parameters", hidden: true },
    h("div", { class: "drawer-head" }, mode.element, repeats, h("span", { class: "push" }, copies)), parameters.element,
  );
  const draw = () => {
    mode.draw();
    parameters.draw();
    again.checked = talk.repeats;
    const isWrong = Object.keys(talk.problems).some((name) => name !== "prompt");
    copies.forEach((copy) => set(copy, { disabled: isWrong }));
  };
  const drawer = { element, draw, isOpen: () => !element.hidden, onToggle: () => {} };
  drawer.toggle = (isOpen = element.hidden) => {
    element.hidden = !isOpen;
    drawer.onToggle(isOpen);
  };
  return drawer;
}

function modeSwitch(talk) {
  const name = unique("mode");
  const radio = (mode, words, title) => {
    const input = h("input", { type: "radio", name, value: mode, onchange: () => talk.set({ mode, editing: 0 }) });
    return h("label", { class: "segment", title }, input, h("span", {}, words));
  };
  const element = h(
    "fieldset", { class: "segments" }, h("legend", { class: "unseen" }, "Kind of prompt"),
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

function actionBar(talk, box, drawer, files) {
  const send = button("Send", () => box.send(), { tone: "primary" });
  const stop = button("Stop", () => talk.stop());
  const num = h("span", { class: "hint" });
  const open = button("Parameters", () => drawer.toggle(), {
    tone: "quiet small", "aria-expanded": "false", "aria-controls": drawer.element.id,
  });
  open.append(num);
  drawer.onToggle = (isOpen) => set(open, { "aria-expanded": String(isOpen) });
  const model = modelPicker(talk);
  const problem = h("p", { class: "problem", id: unique("problem"), role: "status" });
  set(send, { "aria-describedby": problem.id });
  const element = h("div", { class: "prompt-actions" }, files.button, open, model.element, problem, stop, send);
  const draw = () => {
    const { prompt, ...others } = talk.problems;
    const [first = ""] = Object.values(others); // the field may be folded away, so the problem is shown here, too
    model.draw();
    text(num, wordsOfSet(talk));
    set(send, { disabled: talk.isBusy || first !== "" || !talk.model });
    stop.hidden = !talk.isBusy;
    set(stop, { disabled: talk.isStopping });
    text(stop, talk.isStopping ? "Stopping…" : "Stop");
    text(problem, first || talk.notice || (talk.model ? "" : prompt));
    files.draw();
  };
  return { element, draw };
}

function modelPicker(talk) {
  const name = h("span", { class: "quiet-words model-name" });
  const select = h("select", { class: "small", "aria-label": "Model" });
  select.addEventListener("change", () => {
    const model = talk.models.find(({ id }) => id === select.value) ?? talk.model;
    talk.set({ model, counted: null, ...(model.chat ? {} : { mode: "raw" }) });
  });
  const element = h("span", { class: "model-picker" }, name, select);
  let drawn = null;
  const draw = () => {
    const isMany = talk.models.length > 1;
    name.hidden = isMany;
    select.hidden = !isMany;
    text(name, talk.model?.id ?? "");
    if (drawn !== talk.models) fill(select, talk.models.map(({ id }) => h("option", { value: id }, id)));
    drawn = talk.models;
    set(select, { value: talk.model?.id ?? "", disabled: talk.isBusy });
  };
  return { element, draw };
}
