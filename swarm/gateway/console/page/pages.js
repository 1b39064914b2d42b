// Pages of a log that are read backwards, bounded: pure.

export const MOST_LINES = 2000;

// Older lines come before those that are there. What is too much goes from the newer end, as the reader looks back.
export function withOlder(lines, older) {
  return [...older, ...lines].slice(0, MOST_LINES);
}

// Logs tell time as text or as seconds.
export function timeOf(time) {
  if (typeof time === "number") return new Date(time * 1000).toISOString().slice(11, 23);
  const found = /T(\d\d:\d\d:\d\d(?:\.\d{1,3})?)/.exec(time ?? "");
  return found ? found[1] : (time ?? "");
}
