// Estimates how much of the model's context a prompt will take. Pure.

import { count } from "./format.js";

const CHARACTERS = 4; // characters per token, until an answer has shown this model's average
const MOST_CHARACTERS = 8;
const MEASURED = 100; // characters from which on a conversation gives a reliable average
export const FRAME = 6; // tokens around a turn: its role and its end
const SHORT = 0.1; // share of the context below which the rest is worth a warning

// `each`: characters per token. `turns`: including the answer's.
export function countedOf({ usage, choices }, chosen, turns) {
  const answered = choices.length === 1 ? usage.completion_tokens : choices[chosen].ends.length;
  const tokens = usage.prompt_tokens + answered;
  const characters = turns.reduce((sum, { content }) => sum + content.length, 0);
  const each = characters < MEASURED ? CHARACTERS : characters / Math.max(1, tokens - FRAME * turns.length);
  return { numTurns: turns.length, tokens, each: Math.min(MOST_CHARACTERS, Math.max(1, each)) };
}

// Null while the context is unknown. `turns`: including the last answer. `counted`: the last report of this
// conversation, or null. `exact`: the length of all as the gateway counts it, or null. `wanted`: Max tokens, or 0.
export function roomOf({ context, mode, draft, system, turns, counted, wanted, exact = null }) {
  if (!context) return null;
  const each = counted?.each ?? CHARACTERS;
  const tokens = (words) => (words ? Math.ceil(words.length / each) + (mode === "chat" ? FRAME : 0) : 0);
  const own = tokens(draft.trim());
  const past = mode === "chat" ? said({ system, turns, counted }, tokens) : 0;
  const used = exact ?? past + own;
  const left = Math.max(0, context - used);
  const isShort = left < Math.max(Math.min(wanted, context / 2), SHORT * context);
  const isExact = exact !== null;
  const isCertain = isExact || (draft.trim() === "" && counted !== null);
  const isAlone = mode !== "chat" || turns.length === 0 || own >= context; // then a new conversation would not help
  const level = left === 0 ? "full" : isShort ? "short" : "roomy";
  return { used, past, left, context, isExact, isCertain, isAlone, level };
}

function said({ system, turns, counted }, tokens) {
  const isCounted = counted !== null && counted.numTurns <= turns.length;
  const rest = isCounted ? turns.slice(counted.numTurns) : [{ content: system }, ...turns];
  return rest.reduce((sum, { content }) => sum + tokens(content), isCounted ? counted.tokens : 0);
}

export function roomWords({ used, left, context, level, isExact, isCertain, isAlone }) {
  const all = `${count(context)} tokens`;
  const more = isAlone ? "shorten the prompt" : "begin a new conversation";
  if (level === "full") {
    if (isExact) return `${count(used)} tokens are too long for the model's ${all}: ${more}.`;
    const what = isCertain ? `The model's context of ${all} is full` : `This may be too long for the model's ${all}`;
    return `${what}: ${more}.`;
  }
  const words = isExact ? `${count(left)} of ${all} left` : `About ${count(rough(left))} of ${all} left`;
  return level === "short" ? `${words}: the answer may be cut.` : words;
}

function rough(number) {
  const size = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, number))) - 1);
  return Math.floor(number / size) * size;
}

export const isCutByContext = ({ usage, choices }, context) =>
  Boolean(context && usage) &&
  choices.length === 1 &&
  choices[0].reason === "length" &&
  usage.prompt_tokens + usage.completion_tokens >= context;
