// Certainty of the model about each token: probabilities, named levels, alternatives. Pure.

import { quoted, share } from "./format.js";

// From sure to unlikely. `mark` is the style of the underline, so that the level is visible without colour.
export const STEPS = [
  { name: "sure", least: 0.9, mark: "none", words: "sure (90 % and more)" },
  { name: "likely", least: 0.5, mark: "dotted", words: "likely (50 to 90 %)" },
  { name: "unsure", least: 0.2, mark: "dashed", words: "unsure (20 to 50 %)" },
  { name: "unlikely", least: 0, mark: "wavy", words: "unlikely (under 20 %)" },
];

export const probability = (logprob) => Math.min(1, Math.exp(logprob));

export const stepOf = ({ logprob }) => STEPS.find(({ least }) => probability(logprob) >= least) ?? STEPS.at(-1);

export function alternativesOf({ token, logprob, others }) {
  const found = others.map(([text, value]) => ({
    token: text, probability: probability(value), isChosen: text === token,
  }));
  if (!found.some(({ isChosen }) => isChosen)) found.push({ token, probability: probability(logprob), isChosen: true });
  return found.sort((a, b) => b.probability - a.probability);
}

export const restOf = (alternatives) => Math.max(0, 1 - alternatives.reduce((sum, each) => sum + each.probability, 0));

export function visible(token) {
  if (token === "") return "nothing";
  return token
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/^ +| +$/g, (blank) => "␣".repeat(blank.length));
}

// "“ garden”: 62 %, likely; else “ house” 20 %, “ tower” 9 %"
export function inWords(chance) {
  const others = alternativesOf(chance)
    .filter(({ isChosen }) => !isChosen)
    .slice(0, 3);
  const told = others.map((each) => `${quoted(visible(each.token))} ${percent(each.probability)}`).join(", ");
  const own = `${quoted(visible(chance.token))}: ${percent(probability(chance.logprob))}, ${stepOf(chance).name}`;
  return told ? `${own}; else ${told}` : own;
}

export const percent = (value) => share(value, 1);

export function summary(chances) {
  const known = chances.filter(Boolean);
  if (known.length === 0) return "";
  const least = known.reduce((low, chance) => (chance.logprob < low.logprob ? chance : low));
  const shaky = known.filter((chance) => probability(chance.logprob) < 0.5).length;
  const mean = Math.exp(known.reduce((sum, { logprob }) => sum + logprob, 0) / known.length);
  const count = shaky === 0 ? "none of them below 50 %" : `${shaky} of them below 50 %`;
  const lowest = `${quoted(visible(least.token))} ${percent(probability(least.logprob))}`;
  return `${known.length} tokens, ${percent(mean)} on (geometric) average, ${count}; the least sure: ${lowest}.`;
}
