// Recent history of the rates, one value per second, bounded by the window.

export const SECONDS = 300;
export const NAMES = ["tokens_per_s", "first_token_s", "between_tokens_s", "queued"];

export class Series {
  at = [];
  values = Object.fromEntries(NAMES.map((name) => [name, []]));

  replace(series) {
    this.at = (series.at ?? []).slice(-SECONDS);
    for (const name of NAMES) this.values[name] = fitted(series[name] ?? [], this.at.length);
    this.#trim();
  }

  // Ignore times that go back: the clocks of two machines differ, and a chart must not fold over itself.
  add(at, rates) {
    const last = this.at.at(-1) ?? -Infinity;
    if (at <= last) return;
    this.at.push(at);
    for (const name of NAMES) this.values[name].push(rates[name] ?? null);
    this.#trim();
  }

  #trim() {
    const begin = (this.at.at(-1) ?? 0) - SECONDS;
    const first = this.at.findIndex((at) => at >= begin);
    const num = Math.max(first, this.at.length - SECONDS);
    if (num <= 0) return;
    this.at.splice(0, num);
    for (const name of NAMES) this.values[name].splice(0, num);
  }
}

function fitted(values, length) {
  const tail = values.slice(-length || values.length).slice(0, length);
  return [...Array(length - tail.length).fill(null), ...tail];
}
