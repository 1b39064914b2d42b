// Fields for the API's parameters: frequent ones visible, the others folded away.

import { DEFAULTS, PARAMETERS, PRIORITIES } from "./ask.js";
import { h, set, text, unique } from "./dom.js";
import { field } from "./widgets.js";

const OFTEN = ["max_tokens", "temperature", "seed", "n"]; // visible; the others are folded away

export function parameterFields(talk) {
  const byName = Object.fromEntries(PARAMETERS.map((parameter) => [parameter.name, numberField(talk, parameter)]));
  const more = PARAMETERS.filter(({ name }) => !OFTEN.includes(name)).map(({ name }) => byName[name]);
  const rest = [priorityField(talk), endField(talk), systemField(talk), stopField(talk)];
  rest.push(schemaField(talk), regexField(talk));
  const all = [...Object.values(byName), ...rest];
  const details = h(
    "details", { class: "more" }, h("summary", {}, "More parameters"),
    h("div", { class: "fields" }, ...more.map(({ element }) => element), ...rest.map(({ element }) => element)),
  );
  const element = h(
    "div", { class: "parameters" }, h("div", { class: "fields often" }, ...OFTEN.map((name) => byName[name].element)),
    details,
  );
  const draw = () => {
    const problems = talk.problems;
    all.forEach((each) => each.draw(problems));
    if (details.querySelector("[aria-invalid]")) details.open = true; // an example may have set it unseen
  };
  return { element, draw };
}

// Folded fields apply, too.
export function wordsOfSet({ values, mode }) {
  const names = Object.keys({ ...DEFAULTS, ...values });
  const isSet = (name) => (values[name] ?? "") !== (DEFAULTS[name] ?? "") && !(name === "system" && mode !== "chat");
  const num = names.filter(isSet).length;
  return num === 0 ? "" : `· ${num} set`;
}

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
    type: "text", inputmode: mode, autocomplete: "off", title: `${hint} (${low} to ${high})`,
    placeholder: name === "seed" ? "random" : "",
  });
  return valueField(talk, name, label, input);
}

function priorityField(talk) {
  const select = h(
    "select", { title: "Higher classes come first" }, ...PRIORITIES.map((name) => h("option", { value: name }, name)),
  );
  return valueField(talk, "priority", "Priority", select);
}

function endField(talk) {
  const box = h("input", { type: "checkbox" });
  const problem = h("p", { class: "problem", role: "status" });
  const element = h(
    "div", { class: "field wide" },
    h("label", { class: "check", title: "ignore_eos" }, box, "Continue to Max tokens, beyond the answer's own end"),
    problem,
  );
  box.addEventListener("change", () => {
    talk.set({ values: { ...talk.values, ignore_eos: box.checked ? "yes" : "" } });
  });
  const draw = ({ ignore_eos: words = "" }) => {
    box.checked = Boolean(talk.values.ignore_eos);
    set(box, { "aria-invalid": words ? "true" : null });
    text(problem, words);
    problem.hidden = words === "";
  };
  return { element, draw };
}

const codeBox = (attributes) => h("textarea", { class: "mono", spellcheck: "false", ...attributes });

function stopField(talk) {
  const input = codeBox({ rows: 2, dir: "auto" });
  return valueField(talk, "stop", "Stop", input, {
    hint: "Texts that end the answer, one per line; \\n stands for a new line.", isWide: true,
  });
}

function schemaField(talk) {
  const input = codeBox({ rows: 4, placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}' });
  return valueField(talk, "schema", "JSON schema", input, {
    hint: "The answer will be JSON that fits it.", isWide: true,
  });
}

function regexField(talk) {
  const input = codeBox({ rows: 1, placeholder: "(yes|no), because [^\\n]+" });
  return valueField(talk, "regex", "Regular expression", input, { hint: "The answer will match it.", isWide: true });
}

function systemField(talk) {
  const input = h("textarea", { rows: 2, dir: "auto" });
  const { element, draw } = valueField(talk, "system", "System message", input, {
    hint: "Precedes the conversation.", isWide: true,
  });
  return {
    element,
    draw: (problems) => {
      element.hidden = talk.mode !== "chat";
      draw(problems);
    },
  };
}
