// Prompts that are ready to be sent: a stranger sees something at once, and may then change it. Pure.

import { DEFAULTS } from "./ask.js";

const SCHEMA = {
  type: "object",
  properties: {
    animal: { enum: ["cat", "dog", "fox", "duck", "owl"] },
    colour: { enum: ["black", "brown", "red", "white", "grey"] },
    legs: { type: "integer", minimum: 0, maximum: 8 },
    is_friendly: { type: "boolean" },
  },
  required: ["animal", "colour", "legs", "is_friendly"],
  additionalProperties: false,
  // Where white space is free, a small model writes little else.
  "x-guidance": { whitespace_flexible: false, whitespace_pattern: "", item_separator: ", ", key_separator: ": " },
};
// Stories, one a line: a small model would lose its thread behind the end of one.
const STORIES = "((Once upon a time|Long ago) there was [^?\\n]{150,600}\\.\\n)+";
const MOST_TOKENS = 4000; // of a long story: minutes with a large model, and no more than this page keeps
const BEGINNING = 32; // tokens of the context that are left to the prompt

// `hint`: what it shows.
export const EXAMPLES = [
  { name: "A short story", mode: "raw", prompt: "Once upon a time", hint: "Text that the model goes on with" },
  { name: "A question", mode: "chat", prompt: "What colour is the cat?", hint: "A turn of a conversation" },
  {
    name: "JSON",
    mode: "chat",
    prompt: "Invent an animal.",
    values: { schema: JSON.stringify(SCHEMA, null, 2), temperature: "0" },
    hint: "An answer that fits a schema, whatever the model would say",
  },
  {
    name: "A long story",
    mode: "raw",
    prompt: "A book of stories.\n",
    values: { regex: STORIES },
    isLong: true,
    hint: "One after the other until Stop: time to kill a worker, and to see the others take over",
  },
];
export const LONG = EXAMPLES.find(({ isLong }) => isLong);

// The values that stand in the parameters for an example. What it says nothing of becomes the usual, but the system
// message and the class stay. A long one has what the context leaves, to the last token.
export function valuesFor({ values = {}, isLong = false }, { system, priority }, context) {
  const longest = String(Math.max(1, Math.min(MOST_TOKENS, (context || MOST_TOKENS) - BEGINNING)));
  const length = isLong ? { min_tokens: longest, max_tokens: longest } : {};
  return { ...DEFAULTS, system, priority, ...length, ...values };
}
