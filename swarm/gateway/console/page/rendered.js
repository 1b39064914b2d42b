// Draws Markdown: a tree of blocks becomes elements, text becomes text nodes, and nothing is loaded.

import { copier } from "./copying.js";
import { h, fill } from "./dom.js";
import { parse, sourcesOf } from "./markdown.js";

const MOST_MARKDOWN = 200_000; // characters; longer texts are shown as they are

// Of a growing text, only blocks whose source has changed are drawn again.
export class Rendered {
  #root;
  #sources = [];
  #text = null;

  constructor(root) {
    this.#root = root;
  }

  draw(text) {
    if (text === this.#text) return;
    this.#text = text;
    if (text.length > MOST_MARKDOWN) return void fill(this.#root, h("p", { class: "as-is" }, text));
    const sources = sourcesOf(text);
    const num = sources.findIndex((source, at) => source !== this.#sources[at]);
    const same = num < 0 ? sources.length : num;
    this.#sources = sources;
    while (this.#root.childElementCount > same) this.#root.lastElementChild.remove();
    // an element for each source, so that sources and elements keep in step
    this.#root.append(...sources.slice(same).map((source) => drawn(parse(source))));
    return undefined;
  }
}

const drawn = (blocks) => (blocks.length === 1 ? block(blocks[0]) : h("div", {}, blocks.map(block)));

const BLOCKS = {
  heading: ({ level, inlines }) => h("p", { class: "md-heading", "data-level": level }, all(inlines)),
  paragraph: ({ inlines }) => h("p", {}, all(inlines)),
  quote: ({ blocks }) => h("blockquote", {}, blocks.map(block)),
  rule: () => h("hr"),
  list: ({ start, items }) =>
    h(
      start === null ? "ul" : "ol", { start: start !== null && start !== 1 ? start : null },
      items.map((blocks) => h("li", {}, blocks.map(tight))),
    ),
  code: ({ language, text }) =>
    h(
      "figure", { class: "code" },
      h("figcaption", {}, h("span", {}, language || "text"), copier("Copy", () => text, "Copy this code")),
      h("pre", { tabindex: 0, dir: "ltr", "aria-label": `Code: ${language || "text"}` }, h("code", {}, text)),
    ),
  table: ({ aligns, head, rows }) =>
    h(
      "div", { class: "md-table", tabindex: 0, role: "group", "aria-label": "Table" },
      h(
        "table", {}, h("thead", {}, rowOf("th", head, aligns)),
        h("tbody", {}, rows.map((row) => rowOf("td", row, aligns))),
      ),
    ),
};

const rowOf = (tag, cells, aligns) =>
  h("tr", {}, cells.map((cell, at) => h(tag, { "data-align": aligns[at] }, all(cell))));

const block = (node) => BLOCKS[node.type](node);

const tight = (node) => (node.type === "paragraph" ? h("span", {}, all(node.inlines)) : block(node));

const INLINES = {
  em: ({ inlines }) => h("em", {}, all(inlines)),
  strong: ({ inlines }) => h("strong", {}, all(inlines)),
  del: ({ inlines }) => h("del", {}, all(inlines)),
  code: ({ text }) => h("code", {}, text),
  break: () => h("br"),
  link: ({ href, inlines }) =>
    h("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, all(inlines)),
};

const all = (inlines) => inlines.map((node) => (typeof node === "string" ? node : INLINES[node.type](node)));
