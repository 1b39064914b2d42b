// Parses the Markdown that models write into a tree of blocks. Pure, and linear in the text's length whatever it holds:
// HTML stays text, and each search has a bound.
//
// Blocks: {type: "heading", level, inlines}, "paragraph", {type: "code", language, text, isOpen}, {type: "quote",
// blocks}, {type: "list", start, items: [blocks]}, {type: "table", aligns, head, rows}, "rule".

import { inlinesOf } from "./inline.js";

const MOST_DEPTH = 8; // nested quotes and lists; deeper ones are text
const MOST_COLUMNS = 40;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const DIVIDER = /^ {0,3}\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?[ \t]*$/;
const isBlank = (line) => line.trim() === "";

export const parse = (text) => blocksOf(text.replace(/\r\n?/g, "\n").split("\n"), 0).map(({ block }) => block);

// The sources of the top-level blocks, so that of a growing text only what has changed is parsed and drawn.
export function sourcesOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  return blocksOf(lines, 0, true).map(({ from, to }) => lines.slice(from, to).join("\n"));
}

// `isOutline`: only the lines of each, without parsing what is inside.
function blocksOf(lines, depth, isOutline = false) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const found = READERS.map((read) => read(lines, at, depth, isOutline)).find(Boolean);
    blocks.push({ block: found.block, from: at, to: found.to });
    at = found.to;
  }
  return blocks;
}

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const [, indent, mark, language] = opened;
  const isEnd = (line) => {
    const words = line.trim();
    return words.length >= mark.length && words === mark[0].repeat(words.length) && line.search(/\S/) < 4;
  };
  let to = at + 1;
  while (to < lines.length && !isEnd(lines[to])) to += 1;
  const strip = indent.length;
  const text = lines
    .slice(at + 1, to)
    .map((line) => line.slice(Math.min(strip, line.length - line.trimStart().length)))
    .join("\n");
  const isOpen = to >= lines.length;
  return {
    block: { type: "code", language: language.trim().split(/\s/)[0].slice(0, 30), text, isOpen },
    to: isOpen ? to : to + 1,
  };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  return { block: { type: "heading", level: found[1].length, inlines: inlinesOf(found[2] ?? "") }, to: at + 1 };
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { block: { type: "rule" }, to: at + 1 } : null);

function quote(lines, at, depth, isOutline) {
  if (depth >= MOST_DEPTH || !QUOTE.test(lines[at])) return null;
  let to = at;
  while (to < lines.length && (QUOTE.test(lines[to]) || (!isBlank(lines[to]) && !interrupts(lines, to)))) to += 1;
  if (isOutline) return { to };
  const inner = lines.slice(at, to).map((line) => line.replace(QUOTE, ""));
  return { block: { type: "quote", blocks: blocksOf(inner, depth + 1).map(({ block }) => block) }, to };
}

function list(lines, at, depth, isOutline) {
  const first = ITEM.exec(lines[at]);
  if (depth >= MOST_DEPTH || !first || RULE.test(lines[at])) return null;
  const kind = kindOf(first[2]);
  const items = [];
  let to = at;
  while (to < lines.length) {
    const opened = ITEM.exec(lines[to]);
    if (!opened || kindOf(opened[2]) !== kind || RULE.test(lines[to])) break;
    const blanks = opened[3]?.length ?? 1;
    const width = opened[1].length + opened[2].length + (blanks > 4 ? 1 : blanks);
    const begin = to;
    to = endOfItem(lines, to + 1, width);
    if (!isOutline) items.push(itemOf(lines.slice(begin, to), opened[0], width, depth));
  }
  return { block: { type: "list", start: kind === "." || kind === ")" ? parseInt(first[2], 10) : null, items }, to };
}

const kindOf = (mark) => mark.at(-1);

// Lines that are indented below an item belong to it, and so do its paragraph's next lines.
function endOfItem(lines, from, width) {
  let to = from;
  let isAfterBlank = false;
  for (let at = from; at < lines.length; at += 1) {
    if (isBlank(lines[at])) {
      isAfterBlank = true;
      continue;
    }
    const indent = lines[at].search(/\S/);
    if (indent < Math.min(width, 2) && (isAfterBlank || interrupts(lines, at) || ITEM.test(lines[at]))) break;
    if (indent < width && ITEM.test(lines[at])) break;
    if (isAfterBlank && indent < Math.min(width, 2)) break;
    isAfterBlank = false;
    to = at + 1;
  }
  // blank lines before the next item are the list's
  while (to < lines.length && isBlank(lines[to])) to += 1;
  return to < lines.length && ITEM.test(lines[to]) ? to : lastFilled(lines, to);
}

function lastFilled(lines, to) {
  let end = to;
  while (end > 0 && isBlank(lines[end - 1])) end -= 1;
  return end;
}

function itemOf(lines, mark, width, depth) {
  const inner = [lines[0].slice(mark.length), ...lines.slice(1).map((line) => outdented(line, width))];
  return blocksOf(inner, depth + 1).map(({ block }) => block);
}

const outdented = (line, width) => line.slice(Math.min(width, Math.max(0, line.search(/\S|$/))));

function table(lines, at) {
  if (!lines[at].includes("|") || !DIVIDER.test(lines[at + 1] ?? "") || !lines[at + 1].includes("-")) return null;
  const head = cellsOf(lines[at]);
  const marks = cellsOf(lines[at + 1]);
  if (head.length !== marks.length || head.length > MOST_COLUMNS) return null;
  let to = at + 2;
  while (to < lines.length && !isBlank(lines[to]) && lines[to].includes("|")) to += 1;
  const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  const rows = lines.slice(at + 2, to).map((line) => {
    const cells = cellsOf(line);
    return head.map((_, index) => inlinesOf(cells[index] ?? ""));
  });
  return { block: { type: "table", aligns, head: head.map(inlinesOf), rows }, to };
}

const cellsOf = (line) =>
  line
    .trim()
    .replace(/^\||(?<!\\)\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function paragraph(lines, at, depth, isOutline) {
  let to = at + 1;
  while (to < lines.length && !isBlank(lines[to]) && !interrupts(lines, to)) to += 1;
  if (isOutline) return { to };
  const words = lines
    .slice(at, to)
    .map((line) => line.trimStart())
    .join("\n")
    .trimEnd();
  return { block: { type: "paragraph", inlines: inlinesOf(words) }, to };
}

// A number other than 1 does not begin a list in the middle of a paragraph.
function interrupts(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const isItem = item !== null && item[3] !== undefined && (/^[-*+]$/.test(item[2]) || parseInt(item[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isItem;
}

const READERS = [fence, heading, rule, quote, list, table, paragraph];
