// Pages of a log that is read backwards, with a limit. Pure.

import { plural } from "./format.js";

export const MOST_LINES = 2000;

// Excess lines are dropped from the newer end, since the reader looks back.
export function withOlder(lines, older) {
  return [...older, ...lines].slice(0, MOST_LINES);
}

export function foundIn(num, isSearch, hasOlder) {
  const found = `${plural(num, "line")}${isSearch ? " that match" : ""}, newest last`;
  if (num > 0) return hasOlder ? found : `${found}, from the beginning`;
  if (hasOlder) return "No match so far; older lines have not been searched.";
  return isSearch ? "No matching lines." : "This log is empty.";
}

export function timeOf(time) {
  if (typeof time === "number") return new Date(time * 1000).toISOString().slice(11, 23);
  const found = /T(\d\d:\d\d:\d\d(?:\.\d{1,3})?)/.exec(time ?? "");
  return found ? found[1] : (time ?? "");
}
