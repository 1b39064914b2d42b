// Prompts that are ready to be sent: a stranger sees something at once, and may then change it. Pure.

import { DEFAULTS } from "./ask.js";

const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 20 },
    colour: { enum: ["black", "brown", "red", "white", "grey", "green"] },
    friends: { type: "array", items: { type: "string", maxLength: 20 }, maxItems: 3 },
  },
  required: ["name", "colour", "friends"],
  additionalProperties: false,
};
const MOST_TOKENS = 4000; // of a long story: minutes with a large model, and no more than this page keeps
const BEGINNING = 32; // tokens of the context that are left to the prompt

// `hint`: what it shows.
export const EXAMPLES = [
  { name: "A short story", mode: "raw", prompt: "Once upon a time", hint: "Text that the model goes on with" },
  { name: "A question", mode: "chat", prompt: "What colour is the cat?", hint: "A turn of a conversation" },
  {
    name: "JSON",
    mode: "chat",
    prompt: "Tell me about the cat.",
    values: { schema: JSON.stringify(SCHEMA, null, 2) },
    hint: "An answer that fits a schema, whatever the model would say",
  },
  {
    name: "A long story",
    mode: "raw",
    prompt: "Once upon a time",
    isLong: true,
    values: { ignore_eos: "yes" },
    hint: "It fills the model's context: time enough to kill a worker and see the others take over",
  },
];
export const LONG = EXAMPLES.find(({ isLong }) => isLong);

// The values that stand in the parameters for an example. What it says nothing of becomes the usual, but the system
// message and the class stay.
export function valuesFor({ values = {}, isLong = false }, { system, priority }, context) {
  const longest = Math.max(1, Math.min(MOST_TOKENS, (context || MOST_TOKENS) - BEGINNING));
  return { ...DEFAULTS, system, priority, ...(isLong ? { max_tokens: String(longest) } : {}), ...values };
}
