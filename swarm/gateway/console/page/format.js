// Formats numbers: short, with units, and the same everywhere on the page. An unknown value is an en dash.

export const UNKNOWN = "–";
const THIN = "\u202f"; // between a number and its unit, so that they stay on one line

const known = (value) => typeof value === "number" && Number.isFinite(value);

// Quote a model's text. The isolate keeps right-to-left text from reordering what follows.
export const quoted = (words) => `“\u2068${words}\u2069”`;

// Three significant digits: 0.123, 1.23, 12.3, 123.
export function figures(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return String(Math.round(value));
  if (size >= 9.995) return value.toFixed(1);
  if (size >= 0.9995) return value.toFixed(2);
  return value.toFixed(3);
}

export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return `0${THIN}ms`;
  if (size < 0.000_999_5) return `${figures(value * 1e6)}${THIN}µs`;
  if (size < 0.9995) return `${figures(value * 1e3)}${THIN}ms`;
  if (size < 99.95) return `${figures(value)}${THIN}s`;
  return duration(value);
}

// For axes: 20 ms instead of 20.0 ms.
export const trimmed = (words) => words.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");

// Longer times: 2 min 5 s, 3 h 20 min, 4 d 2 h.
export function duration(value) {
  if (!known(value)) return UNKNOWN;
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return `${whole}${THIN}s`;
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => whole >= size);
  const [big, small] = [units[first], units[first + 1]];
  const rest = Math.floor((whole % big[1]) / small[1]);
  const head = `${Math.floor(whole / big[1])}${THIN}${big[0]}`;
  return rest ? `${head} ${rest}${THIN}${small[0]}` : head;
}

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 999.5 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(size) : figures(size)}${THIN}${units[unit]}`;
}

// Counts with thin spaces between groups: 853 728; short: 854 k.
export function count(value) {
  if (!known(value)) return UNKNOWN;
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, THIN);
}

export function short(value) {
  if (!known(value)) return UNKNOWN;
  if (Math.abs(value) < 999.5) return Number.isInteger(value) ? String(value) : figures(value);
  if (Math.abs(value) < 999_500) return `${figures(value / 1e3)}${THIN}k`;
  return `${figures(value / 1e6)}${THIN}M`;
}

export function rate(value) {
  if (known(value) && value >= 999.5) return short(value);
  return known(value) && value >= 9.95 ? String(Math.round(value)) : figures(value);
}

export function share(part, whole) {
  if (!known(part) || !known(whole) || whole <= 0) return UNKNOWN;
  const percent = (100 * part) / whole;
  return `${percent > 0 && percent < 1 ? "<1" : Math.round(percent)}${THIN}%`;
}

// [0, 3] is the range of layers 0 to 2.
export function layers(range) {
  if (!range || range[1] <= range[0]) return "none";
  return range[1] - range[0] === 1 ? String(range[0]) : `${range[0]}–${range[1] - 1}`;
}

export const layerWord = (range) => (range && range[1] - range[0] === 1 ? "layer" : "layers");

export function clock(at) {
  const time = known(at) ? at * 1000 : typeof at === "string" ? Date.parse(at) : NaN;
  return known(time) ? new Date(time).toLocaleTimeString("en-GB") : "";
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
