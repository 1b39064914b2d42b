// Converts values to positions on a chart. Pure.

// Round ticks that reach at least `highest`: {ticks: [0, 50, 100], top: 100}.
export function axis(highest, most = 3) {
  if (!(highest > 0)) return { ticks: [0, 1], top: 1 };
  const rough = highest / (most - 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step =
    [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9)) ?? 10 * power;
  const num = Math.ceil(highest / step - 1e-9);
  const ticks = Array.from({ length: num + 1 }, (_, index) => Number((index * step).toPrecision(12)));
  return { ticks, top: ticks.at(-1) };
}

export const highestOf = (values) => values.reduce((most, value) => (value !== null && value > most ? value : most), 0);

// A missing value, or a time without updates, breaks the line.
export function segments(at, values, longestGap = 3) {
  const runs = [];
  let run = [];
  for (let index = 0; index < at.length; index += 1) {
    const hasHole = run.length > 0 && at[index] - at[index - 1] > longestGap;
    if ((values[index] === null || hasHole) && run.length) {
      runs.push(run);
      run = [];
    }
    if (values[index] !== null) run.push(index);
  }
  if (run.length) runs.push(run);
  return runs;
}

export function nearest(at, time) {
  let low = 0;
  let high = at.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at[middle] < time) low = middle + 1;
    else high = middle;
  }
  if (high < 0) return -1;
  return low > 0 && time - at[low - 1] <= at[low] - time ? low - 1 : low;
}

export function summary(values) {
  const known = values.filter((value) => value !== null);
  if (known.length === 0) return null;
  return { lowest: Math.min(...known), highest: Math.max(...known), last: known.at(-1) };
}
