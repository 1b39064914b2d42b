// Ready-made prompts, so that a new user sees a result immediately and can change it. Pure.

import { DEFAULTS } from "./ask.js";

const SCHEMA = {
  type: "object",
  properties: {
    animal: { enum: ["cat", "dog", "fox", "duck", "owl"] },
    colour: { enum: ["black", "brown", "red", "white", "grey"] }, legs: { type: "integer", minimum: 0, maximum: 8 },
    is_friendly: { type: "boolean" },
  },
  required: ["animal", "colour", "legs", "is_friendly"],
  additionalProperties: false,
  // With free white space, a small model generates little else.
  "x-guidance": { whitespace_flexible: false, whitespace_pattern: "", item_separator: ", ", key_separator: ": " },
};
// Stories, one per line: a small model loses the thread after the end of one.
const STORIES = "((Once upon a time|Long ago) there was [^?\\n]{150,600}\\.\\n)+";
const MOST_TOKENS = 4000; // tokens of a long story: minutes with a large model, and within the limits of this page
const BEGINNING = 32; // tokens of the context left for the prompt

export const EXAMPLES = [
  { name: "A short story", mode: "raw", prompt: "Once upon a time", hint: "Text for the model to continue" },
  { name: "A question", mode: "chat", prompt: "What colour is the cat?", hint: "A turn of a conversation" },
  {
    name: "JSON", mode: "chat", prompt: "Invent an animal.",
    values: { schema: JSON.stringify(SCHEMA, null, 2), temperature: "0" }, hint: "An answer that always fits a schema",
  },
  {
    name: "A long story", mode: "raw", prompt: "A book of stories.\n", values: { regex: STORIES }, isLong: true,
    hint: "Repeated until Stop: time to kill a worker, and to see the others take over",
  },
];
export const LONG = EXAMPLES.find(({ isLong }) => isLong);

// What an example does not set is reset, except the system message and the priority. A long one uses the whole rest of
// the context.
export function valuesFor({ values = {}, isLong = false }, { system, priority }, context) {
  const longest = String(Math.max(1, Math.min(MOST_TOKENS, (context || MOST_TOKENS) - BEGINNING)));
  const length = isLong ? { min_tokens: longest, max_tokens: longest } : {};
  return { ...DEFAULTS, system, priority, ...length, ...values };
}
