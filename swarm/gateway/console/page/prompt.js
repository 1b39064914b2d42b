// The prompt box: a conversation or plain text, the parameters of the API, Generate and Stop, and the same as a
// command.

import { PARAMETERS, PRIORITIES } from "./ask.js";
import { copier } from "./copying.js";
import { fill, h, keyed, set, text, unique } from "./dom.js";
import { curlOf, pythonOf } from "./snippets.js";
import { talkOf } from "./talk.js";
import { button, field, heading } from "./widgets.js";

const OFTEN = ["max_tokens", "temperature", "seed", "n"]; // in sight; the others unfold
const LONGEST = 1_000_000; // characters of a prompt: more is no prompt that somebody types

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const mode = modeSwitch(talk);
  const past = pastTurns(talk);
  const box = promptBox(talk);
  const parameters = parameterFields(talk);
  const buttons = actionButtons(talk, store, () => box.generate());
  fill(
    root,
    heading("Prompt", past.anew, mode.element),
    past.element,
    box.element,
    parameters.element,
    buttons.element,
  );
  talk.subscribe(() => [mode, past, box, parameters, buttons].forEach((part) => part.draw()));
  store.subscribe(["me"], () => learnModel(talk, api));
}

// Which model is served, and whether it has a template for conversations.
async function learnModel(talk, api) {
  try {
    const { data } = await api.get("/v1/models");
    const found = data.find((each) => each.owned_by === "swarm") ?? data[0];
    if (!found) return;
    const { chat = true, context = null } = found.swarm ?? {};
    talk.set({ model: { id: found.id, chat, context }, ...(chat ? {} : { mode: "raw" }) });
  } catch (error) {
    if (error.name !== "ApiError") throw error; // the problem under the box says that no model is known yet
  }
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
    radio("chat", "Chat", "Turns of a conversation, in the model's own form"),
    radio("raw", "Raw", "Plain text that the model goes on with"),
  );
  const draw = () => {
    for (const input of element.querySelectorAll("input")) {
      input.checked = input.value === talk.mode;
      input.disabled = talk.isBusy || (input.value === "chat" && talk.model?.chat === false);
    }
  };
  return { element, draw };
}

// What was said before. The answer that is under way, or was the last, has a place of its own.
function pastTurns(talk) {
  const list = h("ol", { class: "turns", tabindex: 0, "aria-label": "Conversation" });
  const anew = button("New conversation", () => talk.startAnew(), { tone: "quiet small" });
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
    set(anew, { disabled: talk.isBusy });
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
  return { element: list, anew, draw };
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
      placeholder: talk.mode === "chat" ? "Say something to the model" : "A text to go on with",
    });
  };
  return { element, draw, generate };
}

// --- parameters

function parameterFields(talk) {
  const byName = Object.fromEntries(PARAMETERS.map((parameter) => [parameter.name, numberField(talk, parameter)]));
  const more = PARAMETERS.filter(({ name }) => !OFTEN.includes(name)).map(({ name }) => byName[name]);
  const areas = [systemField(talk), stopField(talk), schemaField(talk)];
  const all = [...Object.values(byName), priorityField(talk), ...areas];
  const [priority] = all.slice(PARAMETERS.length);
  const details = h(
    "details",
    { class: "more" },
    h("summary", {}, "More parameters"),
    h("div", { class: "fields" }, ...[...more, priority, ...areas].map(({ element }) => element)),
  );
  const element = h(
    "div",
    { class: "parameters" },
    h("div", { class: "fields often" }, ...OFTEN.map((name) => byName[name].element)),
    details,
  );
  const draw = () => {
    const problems = talk.problems;
    all.forEach((each) => each.draw(problems));
  };
  return { element, draw };
}

// A control for one value, with what is wrong with it beneath.
function valueField(talk, name, label, control, options = {}) {
  const element = field(label, control, options);
  const problem = h("p", { class: "problem", id: unique("problem"), hidden: true });
  element.append(problem);
  const hint = control.getAttribute("aria-describedby");
  control.addEventListener("input", () => {
    talk.values = { ...talk.values, [name]: control.value };
    talk.changed();
  });
  const draw = (problems) => {
    set(control, { value: talk.values[name] ?? "" });
    const words = problems[name] ?? "";
    text(problem, words);
    problem.hidden = words === "";
    set(control, {
      "aria-invalid": words ? "true" : null,
      "aria-describedby": [words && problem.id, hint].filter(Boolean).join(" ") || null,
    });
  };
  return { element, draw };
}

function numberField(talk, { name, label, low, high, step, hint }) {
  const mode = step === 1 ? "numeric" : "decimal";
  const input = h("input", {
    type: "text",
    inputmode: mode,
    autocomplete: "off",
    title: `${hint} (${low} to ${high})`,
    placeholder: name === "seed" ? "drawn" : "",
  });
  return valueField(talk, name, label, input);
}

function priorityField(talk) {
  const select = h(
    "select",
    { title: "Higher classes come first" },
    ...PRIORITIES.map((name) => h("option", { value: name }, name)),
  );
  return valueField(talk, "priority", "Priority", select);
}

function stopField(talk) {
  const input = h("textarea", { rows: 2, class: "mono", spellcheck: "false", dir: "auto" });
  return valueField(talk, "stop", "Stop", input, {
    hint: "One text a line that ends the answer; \\n stands for a new line.",
    isWide: true,
  });
}

function schemaField(talk) {
  const input = h("textarea", {
    rows: 4,
    class: "mono",
    spellcheck: "false",
    placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}',
  });
  return valueField(talk, "schema", "JSON schema", input, {
    hint: "The answer will be JSON that fits it.",
    isWide: true,
  });
}

function systemField(talk) {
  const input = h("textarea", { rows: 2, dir: "auto" });
  const { element, draw } = valueField(talk, "system", "System message", input, {
    hint: "Stands before a conversation.",
    isWide: true,
  });
  return {
    element,
    draw: (problems) => {
      element.hidden = talk.mode !== "chat";
      draw(problems);
    },
  };
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
  const problem = h("p", { class: "problem", id: unique("problem"), role: "status" });
  set(generate, { "aria-describedby": problem.id });
  const element = h(
    "div",
    { class: "actions prompt-actions" },
    generate,
    stop,
    problem,
    h("span", { class: "push" }, ...copies),
  );
  const draw = () => {
    const { prompt, ...others } = talk.problems;
    const [first = ""] = Object.values(others); // it may be folded away, so it is said here too
    set(generate, { disabled: talk.isBusy || first !== "" });
    set(stop, { disabled: !talk.isBusy || talk.isStopping });
    text(stop, talk.isStopping ? "Stopping…" : "Stop");
    copies.forEach((copy) => set(copy, { disabled: first !== "" }));
    text(problem, first || talk.notice || (talk.model ? "" : prompt));
  };
  return { element, draw };
}
