// Draws spans of time: many tokens as columns on a canvas, and one token as a bar. Each part has a colour and a
// pattern.

import { h } from "./dom.js";
import { columnsOf } from "./spans.js";

const TALLEST = 132; // pixels
const GAP = 1;

// Pattern of each part; its colour is a custom property in parts.css.
const PATTERNS = {
  queue: "dots", wire: "slant", wait: "rows", compute: "plain", sample: "cross", broker: "columns",
  unaccounted: "empty",
};

const STROKES = {
  dots: [[2, 2, 2.01, 2], [6, 6, 6.01, 6]], slant: [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]],
  rows: [[0, 2, 8, 2], [0, 6, 8, 6]], plain: [], cross: [[0, 0, 8, 8], [0, 8, 8, 0]],
  columns: [[2, 0, 2, 8], [6, 0, 6, 8]], empty: [],
};

function tileOf(context, part, style) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = style.getPropertyValue(`--part-${part}`).trim() || "#888";
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = style.getPropertyValue("--part-mark").trim() || "#fff";
  pen.lineWidth = PATTERNS[part] === "dots" ? 2.4 : 1.6;
  pen.lineCap = PATTERNS[part] === "dots" ? "round" : "butt";
  for (const [x, y, toX, toY] of STROKES[PATTERNS[part]]) {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(toX, toY);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

export class Columns {
  constructor(canvas) {
    this.canvas = canvas;
    this.columns = [];
    this.perColumn = 1;
    this.step = 1;
  }

  // `at`: the index of the selected token.
  draw(spans, { at = null } = {}) {
    const { canvas } = this;
    const width = canvas.clientWidth || 600;
    const found = columnsOf(spans.tokens, width);
    this.columns = found.columns;
    this.perColumn = found.perColumn;
    this.step = Math.min(24, width / Math.max(1, found.columns.length));
    const pen = this.#pen(width);
    const style = getComputedStyle(canvas);
    const fills = new Map();
    const fillOf = (part) => fills.get(part) ?? fills.set(part, tileOf(pen, part, style)).get(part);
    this.columns.forEach(({ token }, number) =>
      this.#column(pen, spans, token, number, found.scale, fillOf, style),
    );
    this.#cursor(pen, at, style);
  }

  #pen(width) {
    const { canvas } = this;
    const dense = globalThis.devicePixelRatio || 1;
    const [wide, tall] = [Math.round(width * dense), Math.round(TALLEST * dense)];
    if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
    const pen = canvas.getContext("2d");
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, width, TALLEST);
    return pen;
  }

  #column(pen, spans, token, number, scale, fillOf, style) {
    const left = number * this.step;
    const wide = Math.max(1, this.step - (this.step > 4 ? GAP : 0));
    const room = TALLEST - 8;
    let bottom = TALLEST;
    for (const span of spans.spansOf(token)) {
      const tall = Math.min((span.seconds / scale) * room, bottom - 8);
      if (tall <= 0) break;
      pen.fillStyle = fillOf(span.part.name);
      pen.fillRect(left, bottom - tall, wide, tall);
      bottom -= tall;
      if (span.part.isOfStage && tall > 4 && wide > 3) this.#border(pen, left, bottom, wide, style);
    }
    if (token.total_s > scale * 1.02) this.#torn(pen, left, wide, style);
  }

  #border(pen, left, bottom, wide, style) {
    pen.fillStyle = style.getPropertyValue("--surface");
    pen.fillRect(left, bottom, wide, 1);
  }

  #torn(pen, left, wide, style) {
    pen.fillStyle = style.getPropertyValue("--part-edge");
    pen.fillRect(left, 0, wide, 1.5);
    pen.fillRect(left, 4, wide, 1.5);
  }

  #cursor(pen, at, style) {
    const number = at === null ? -1 : this.columns.findIndex(({ first, last }) => first <= at && at <= last);
    if (number < 0) return;
    pen.strokeStyle = style.getPropertyValue("--part-edge");
    pen.lineWidth = 1.5;
    pen.strokeRect(number * this.step - 0.75, 0.75, this.step + 0.5, TALLEST - 1.5);
  }

  // `x`: pixels from the left. Of several tokens in one column, the slowest.
  tokenAt(x) {
    return this.columns[Math.max(0, Math.min(this.columns.length - 1, Math.floor(x / this.step)))].token ?? null;
  }
}

const lookOf = (part, vars) => ({
  "data-part": part, "data-pattern": PATTERNS[part], vars: { "--part": `var(--part-${part})`, ...vars },
});

export const swatch = (part) =>
  h("span", { class: "swatch", ...lookOf(part), "aria-hidden": "true" });

// One token, or the sum of many.
export function bar(spans, total_s) {
  const pieces = spans.map((span) =>
    h("span", { class: "bar-piece", ...lookOf(span.part.name, { "--share": (span.seconds / total_s).toFixed(4) }) }),
  );
  return h("div", { class: "bar", "aria-hidden": "true" }, pieces);
}
