// How much of the model's context a prompt will take, as well as can be told before it is sent. Pure.

import { count } from "./format.js";

const CHARACTERS = 4; // a token, where no answer has shown yet how long this model's are
const MEASURED = 8; // tokens from which on an answer shows how long this model's are
const FRAME = 6; // tokens that stand around a turn: who speaks, and where it ends
const SHORT = 0.1; // of the context: what is left is worth a word

// What an answer's own report says of the conversation up to its end: {numTurns, tokens, each: characters a token}.
export function countedOf({ usage, choices }, chosen, numTurns) {
  const { text, ends } = choices[chosen];
  const answered = choices.length === 1 ? usage.completion_tokens : ends.length;
  const each = ends.length < MEASURED ? CHARACTERS : Math.max(1, text.length / ends.length);
  return { numTurns, tokens: usage.prompt_tokens + answered, each };
}

// {used, left, context, level: "roomy" | "short" | "full"}; null while the model's context isn't known. `turns`: with
// the last answer. `counted`: what was reported last of this conversation, or null. `wanted`: how long the answer may
// become, 0 if that is not said.
export function roomOf({ context, mode, draft, system, turns, counted, wanted }) {
  if (!context) return null;
  const each = counted?.each ?? CHARACTERS;
  const tokens = (words) => (words ? Math.ceil(words.length / each) + (mode === "chat" ? FRAME : 0) : 0);
  const used = (mode === "chat" ? said({ system, turns, counted }, tokens) : 0) + tokens(draft.trim());
  const left = Math.max(0, context - used);
  const isShort = left < Math.max(Math.min(wanted, context / 2), SHORT * context);
  return { used, left, context, level: left === 0 ? "full" : isShort ? "short" : "roomy" };
}

function said({ system, turns, counted }, tokens) {
  const isCounted = counted !== null && counted.numTurns <= turns.length;
  const rest = isCounted ? turns.slice(counted.numTurns) : [{ content: system }, ...turns];
  return rest.reduce((sum, { content }) => sum + tokens(content), isCounted ? counted.tokens : 0);
}

export function roomWords({ left, context, level }, mode) {
  const all = `${count(context)} tokens`;
  const more = mode === "chat" ? "begin a new conversation" : "shorten the prompt";
  if (level === "full") return `The model's context of ${all} is full: ${more}.`;
  const words = `About ${count(rough(left))} of ${all} left`;
  return level === "short" ? `${words}: the answer may be cut.` : words;
}

// Two digits that count: it is an estimate.
function rough(number) {
  const size = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, number))) - 1);
  return Math.floor(number / size) * size;
}

// Whether an answer ended because nothing was left of the context.
export const isCutByContext = ({ usage, choices }, context) =>
  Boolean(context && usage) &&
  choices.length === 1 &&
  choices[0].reason === "length" &&
  usage.prompt_tokens + usage.completion_tokens >= context;
