// Parses the inline part of Markdown: emphasis, code, links. Pure, and linear in the text's length.
//
// Nodes: text as a string, {type: "em" | "strong" | "del", inlines}, {type: "code", text}, {type: "link", href,
// inlines}, {type: "break"}.

const MOST_OPEN = 100; // delimiters that may wait for their end
const LONGEST_ADDRESS = 2000;
const SAFE = /^(?:https?:\/\/|mailto:)/i;
const BARE = /https?:\/\/[^\s<>"'`\u0000-\u001f]{1,2000}/iy;
const DESTINATION =
  /\(\s{0,3}<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500})?)>?(?:\s{1,3}"[^"\n]{0,200}")?\s{0,3}\)/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy;
const PLAIN = /[^\\`*_~![\]<h\n ]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const isWord = (sign) => /[\p{L}\p{N}]/u.test(sign);

// An address that a link may have; null for all others, such as those of scripts.
export function safeAddress(address) {
  const words = address.trim();
  if (words.length > LONGEST_ADDRESS || !SAFE.test(words) || !URL.canParse(words)) return null;
  return words;
}

export function inlinesOf(text) {
  return new Inlines(text).parse();
}

class Inlines {
  #text;
  #at = 0;
  #out = []; // nodes and open delimiters
  #open = []; // open delimiters: {sign, num, place}, innermost last
  #unclosed = new Set(); // lengths of runs of backticks that have no end

  constructor(text) {
    this.#text = text;
  }

  parse() {
    while (this.#at < this.#text.length) this.#step();
    return joined(this.#out);
  }

  #step() {
    const text = this.#text;
    const sign = text[this.#at];
    if (sign === "\\" && PUNCTUATION.test(text[this.#at + 1] ?? "")) return this.#push(text[this.#at + 1], 2);
    if (sign === "\\" && text[this.#at + 1] === "\n") return this.#push({ type: "break" }, 2);
    if (sign === "`") return this.#code();
    if (sign === "*" || sign === "_" || sign === "~") return this.#emphasis(sign);
    if (sign === "[" || (sign === "!" && text[this.#at + 1] === "[")) return this.#bracket(sign);
    if (sign === "]") return this.#closeBracket();
    if (sign === "<" && this.#link(ANGLE, 1)) return undefined;
    if (sign === "h" && !isWord(text[this.#at - 1] ?? " ") && this.#bareLink()) return undefined;
    if (sign === " " || sign === "\n") return this.#space();
    const run = matched(PLAIN, text, this.#at)?.[0] ?? sign;
    return this.#push(run, run.length);
  }

  #push(node, length) {
    this.#out.push(node);
    this.#at += length;
  }

  // Two blanks before a line's end break it; models mean other line ends, too.
  #space() {
    const text = this.#text;
    let to = this.#at;
    while (text[to] === " ") to += 1;
    if (text[to] === "\n") return this.#push({ type: "break" }, to + 1 - this.#at);
    return this.#push(text.slice(this.#at, to), to - this.#at);
  }

  #code() {
    const text = this.#text;
    let num = 1;
    while (text[this.#at + num] === "`") num += 1;
    const end = this.#unclosed.has(num) ? -1 : endOfCode(text, this.#at + num, num);
    if (end < 0) {
      this.#unclosed.add(num);
      return this.#push("`".repeat(num), num);
    }
    const inner = text.slice(this.#at + num, end).replaceAll("\n", " ");
    const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    return this.#push({ type: "code", text: isPadded ? inner.slice(1, -1) : inner }, end + num - this.#at);
  }

  #emphasis(sign) {
    const text = this.#text;
    let num = 1;
    while (text[this.#at + num] === sign) num += 1;
    const [before, after] = [text[this.#at - 1] ?? " ", text[this.#at + num] ?? " "];
    const isInWord = sign === "_" && isWord(before) && isWord(after);
    let rest = sign === "~" && num !== 2 ? 0 : isInWord ? 0 : num;
    const literal = rest === 0 ? num : 0;
    this.#at += num;
    if (rest > 0 && before.trim() !== "") rest = this.#close(sign, rest);
    const canOpen = after.trim() !== "" && this.#open.length < MOST_OPEN;
    if (rest > 0 && canOpen) this.#wait({ sign, num: rest });
    else if (rest + literal > 0) this.#out.push(sign.repeat(rest + literal));
  }

  #wait(delimiter) {
    this.#open.push({ ...delimiter, place: this.#out.length });
    this.#out.push(delimiter.isImage ? "![" : delimiter.sign.repeat(delimiter.num));
  }

  // Returns how many signs are left.
  #close(sign, given) {
    let left = given;
    while (left > 0) {
      const index = this.#lastOpen(sign);
      if (index < 0) return left;
      const opener = this.#open[index];
      const num = sign === "~" ? 2 : Math.min(2, left, opener.num);
      if (opener.place === this.#out.length - 1) return left; // nothing in between
      const inlines = joined(this.#out.splice(opener.place + 1));
      const type = sign === "~" ? "del" : num === 2 ? "strong" : "em";
      opener.num -= num;
      this.#open.length = opener.num > 0 ? index + 1 : index;
      if (opener.num > 0) this.#out[opener.place] = sign.repeat(opener.num);
      else this.#out.length = opener.place;
      this.#out.push({ type, inlines });
      left -= num;
    }
    return left;
  }

  // An emphasis does not reach out of the brackets around it.
  #lastOpen(sign) {
    for (let index = this.#open.length - 1; index >= 0; index -= 1) {
      if (this.#open[index].sign === sign) return index;
      if (this.#open[index].sign === "[" && sign !== "[") return -1;
    }
    return -1;
  }

  #bracket(sign) {
    const isImage = sign === "!";
    if (this.#open.length >= MOST_OPEN) this.#out.push(isImage ? "![" : "[");
    else this.#wait({ sign: "[", num: 1, isImage });
    this.#at += isImage ? 2 : 1;
  }

  // Images are not loaded: what is shown is a link with their words.
  #closeBracket() {
    const index = this.#lastOpen("[");
    const found = index < 0 ? null : matched(DESTINATION, this.#text, this.#at + 1);
    if (index >= 0 && !found) this.#open.splice(index, 1); // brackets without an address are text
    if (!found) return this.#push("]", 1);
    const { place, isImage } = this.#open[index];
    const inlines = joined(this.#out.splice(place + 1));
    this.#out.length = place;
    this.#open.length = index;
    const href = safeAddress(found[1]);
    const words = inlines.length > 0 ? inlines : [isImage ? "image" : found[1]];
    if (href !== null) this.#out.push({ type: "link", href, inlines: words });
    else this.#out.push(...words, found[0]);
    this.#at += 1 + found[0].length;
    return undefined;
  }

  #link(pattern, group) {
    const found = matched(pattern, this.#text, this.#at);
    const href = found && safeAddress(found[group]);
    if (!href) return false;
    this.#push({ type: "link", href, inlines: [found[group]] }, found[0].length);
    return true;
  }

  // A bare address, without the punctuation of the sentence around it.
  #bareLink() {
    const found = matched(BARE, this.#text, this.#at)?.[0];
    if (!found) return false;
    let words = found.replace(/[.,;:!?*_~\]]+$/, "");
    if (words.endsWith(")") && !words.includes("(")) words = words.slice(0, -1);
    const href = safeAddress(words);
    if (!href || words.length < 10) return false;
    this.#push({ type: "link", href, inlines: [words] }, words.length);
    return true;
  }
}

function endOfCode(text, from, num) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    let to = at;
    while (text[to] === "`") to += 1;
    if (to - at === num) return at;
    at = to;
  }
  return -1;
}

function matched(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function joined(nodes) {
  const out = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof out.at(-1) === "string") out[out.length - 1] += node;
    else out.push(node);
  }
  return out;
}
