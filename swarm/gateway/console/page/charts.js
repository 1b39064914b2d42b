// Four small charts of the last minutes, drawn on a canvas. One cursor reads all of them, by pointer or keyboard.

import { fill, h, set, text } from "./dom.js";
import { clock, count, duration, rate, seconds, trimmed } from "./format.js";
import { axis, highestOf, nearest, segments, summary } from "./scales.js";
import { SECONDS } from "./series.js";
import { heading, unitOf } from "./widgets.js";

const CHARTS = [
  ["tokens_per_s", "Tokens", (value) => `${rate(value)}/s`, rate],
  ["first_token_s", "To the first token", seconds, seconds], ["between_tokens_s", "Between tokens", seconds, seconds],
  ["queued", "Waiting in the queue", count, rate],
];
const LEFT = 46;
const BOTTOM = 18;
const TOP = 8;
const NARROW = 190; // pixels; below this there is no space for three times

export function mount(root, store) {
  const when = h("span", { class: "hint" });
  const charts = CHARTS.map((about) => new Chart(about, store.series, (at) => point(at)));
  let pointed = null; // a time, or null for now
  const draw = () => {
    text(when, pointed === null ? `last ${duration(SECONDS)}` : `at ${clock(pointed)}`);
    for (const chart of charts) chart.draw(pointed);
  };
  const point = (at) => {
    pointed = at;
    draw();
  };
  fill(root, heading("Charts", when), h("div", { class: "charts" }, charts.map((chart) => chart.root)));
  store.subscribe(["series"], draw);
  new ResizeObserver(draw).observe(root);
  addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

class Chart {
  #about;
  #series;
  #point;
  #value = h("b");
  #canvas = h("canvas", { "aria-hidden": "true" });
  #plot;

  constructor([name, title, words, short], series, point) {
    this.#about = { name, words, short };
    this.#series = series;
    this.#point = point;
    this.#plot = h(
      "div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${title}, the last minutes` }, this.#canvas,
    );
    const label = h("span", { title: unitOf(title) }, title);
    this.root = h("figure", { class: "chart" }, h("figcaption", {}, label, this.#value), this.#plot);
    this.#plot.addEventListener("pointermove", (event) => this.#point(this.#timeAt(event)));
    this.#plot.addEventListener("pointerleave", () => this.#point(null));
    this.#plot.addEventListener("blur", () => this.#point(null));
    this.#plot.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(pointed) {
    const { at } = this.#series;
    const values = this.#series.values[this.#about.name];
    const index = pointed === null ? at.length - 1 : nearest(at, pointed);
    const read = index < 0 || values[index] === null ? "–" : this.#about.words(values[index]);
    text(this.#value, read);
    set(this.#plot, {
      "aria-valuemin": 0, "aria-valuemax": Math.max(0, at.length - 1), "aria-valuenow": Math.max(0, index),
      "aria-valuetext": pointed === null ? this.#inWords(values, read) : `${clock(at[index])}: ${read}`,
    });
    this.#paint(at, values, pointed === null ? -1 : index);
  }

  #inWords(values, read) {
    const all = summary(values);
    if (all === null) return "nothing measured yet";
    const { words } = this.#about;
    return `now ${read}; between ${words(all.lowest)} and ${words(all.highest)}`;
  }

  #timeAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT);
    return this.#end() - SECONDS + Math.min(1, Math.max(0, share)) * SECONDS;
  }

  #key(event) {
    const { at } = this.#series;
    const now = Number(this.#plot.getAttribute("aria-valuenow"));
    const moves = {
      ArrowLeft: now - 1, ArrowRight: now + 1, PageDown: now - 30, PageUp: now + 30, Home: 0, End: at.length - 1,
    };
    if (event.key === "Escape") this.#point(null);
    if (!(event.key in moves) || at.length === 0) return;
    event.preventDefault();
    this.#point(at[Math.min(at.length - 1, Math.max(0, moves[event.key]))]);
  }

  #end() {
    return this.#series.at.at(-1) ?? Date.now() / 1000;
  }

  #paint(at, values, pointed) {
    const { width, height } = this.#plot.getBoundingClientRect();
    if (width === 0) return;
    const ratio = devicePixelRatio || 1;
    const canvas = this.#canvas;
    const [wide, tall] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
    const ink = canvas.getContext("2d");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    const look = getComputedStyle(this.#plot);
    const { ticks, top } = axis(highestOf(values));
    const x = (time) => LEFT + ((time - this.#end() + SECONDS) / SECONDS) * (width - LEFT - 2);
    const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - TOP);
    this.#paintAxes(ink, look, { width, height, ticks, x, y });
    paintLine(ink, look, segments(at, values), (index) => [x(at[index]), y(values[index])], y(0));
    if (pointed >= 0)
      paintCursor(ink, look, x(at[pointed]), values[pointed] === null ? null : y(values[pointed]), height - BOTTOM);
  }

  #paintAxes(ink, look, { width, height, ticks, x, y }) {
    ink.font = `11px ${look.fontFamily}`;
    ink.fillStyle = look.getPropertyValue("--ink-2");
    ink.strokeStyle = look.getPropertyValue("--line");
    ink.lineWidth = 1;
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      stroke(ink, [LEFT, at], [width, at]);
      ink.fillText(trimmed(this.#about.short(tick)), LEFT - 6, at);
    }
    ink.textBaseline = "alphabetic";
    for (const ago of width < NARROW ? [SECONDS, 0] : [SECONDS, 120, 0]) {
      ink.textAlign = ago === SECONDS ? "left" : ago === 0 ? "right" : "center";
      ink.fillText(ago === 0 ? "now" : `−${duration(ago)}`, x(this.#end() - ago), height - 3);
    }
  }
}

function stroke(ink, ...points) {
  ink.beginPath();
  points.forEach(([x, y], index) => (index ? ink.lineTo(x, y) : ink.moveTo(x, y)));
  ink.stroke();
}

function paintLine(ink, look, runs, place, ground) {
  ink.strokeStyle = look.getPropertyValue("--accent");
  ink.fillStyle = look.getPropertyValue("--accent-soft");
  ink.lineWidth = 1.5;
  ink.lineJoin = "round";
  for (const run of runs) {
    const points = run.map(place);
    ink.beginPath();
    ink.moveTo(points[0][0], ground);
    for (const [x, y] of points) ink.lineTo(x, y);
    ink.lineTo(points.at(-1)[0], ground);
    ink.fill();
    if (points.length === 1) ink.fillRect(points[0][0] - 1, points[0][1] - 1, 2, 2);
    else stroke(ink, ...points);
  }
}

function paintCursor(ink, look, x, y, ground) {
  ink.strokeStyle = look.getPropertyValue("--ink-2");
  ink.lineWidth = 1;
  stroke(ink, [Math.round(x) + 0.5, TOP], [Math.round(x) + 0.5, ground]);
  if (y === null) return;
  ink.beginPath();
  ink.arc(x, y, 4, 0, 2 * Math.PI);
  ink.fillStyle = look.getPropertyValue("--accent");
  ink.strokeStyle = look.getPropertyValue("--surface");
  ink.lineWidth = 2;
  ink.fill();
  ink.stroke();
}
