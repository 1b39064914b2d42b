import assert from "node:assert/strict";
import { test } from "node:test";

import { inlinesOf, safeAddress } from "../../../../swarm/gateway/console/page/inline.js";
import { parse, sourcesOf } from "../../../../swarm/gateway/console/page/markdown.js";

const paragraph = (...inlines) => ({ type: "paragraph", inlines });
const link = (href, ...inlines) => ({ type: "link", href, inlines });

test("emphasis, code and line ends become nodes, and the rest stays text", () => {
  const cases = [
    ["plain words", ["plain words"]],
    ["*a* and **b** and ***c***", [
      { type: "em", inlines: ["a"] }, " and ", { type: "strong", inlines: ["b"] }, " and ",
      { type: "em", inlines: [{ type: "strong", inlines: ["c"] }] },
    ]],
    ["~~gone~~ but ~ not", [{ type: "del", inlines: ["gone"] }, " but ~ not"]],
    ["snake_case_name and _em_", ["snake_case_name and ", { type: "em", inlines: ["em"] }]],
    ["2 * 3 * 4", ["2 * 3 * 4"]],
    ["**not closed", ["**not closed"]],
    ["`a *b*` and `` c ` d ``", [{ type: "code", text: "a *b*" }, " and ", { type: "code", text: "c ` d" }]],
    ["a \\*b\\*", ["a *b*"]],
    ["one\ntwo", ["one", { type: "break" }, "two"]],
    ["**a *b* c**", [{ type: "strong", inlines: ["a ", { type: "em", inlines: ["b"] }, " c"] }]],
  ];
  for (const [text, nodes] of cases) assert.deepEqual(inlinesOf(text), nodes, text);
});

test("links lead to the web and to mail alone; images are links; all else is text", () => {
  assert.deepEqual(inlinesOf("see [the *docs*](https://a.example/x_(y)) now"), [
    "see ", link("https://a.example/x_(y)", "the ", { type: "em", inlines: ["docs"] }), " now",
  ]);
  assert.deepEqual(inlinesOf("https://a.example/b."), [link("https://a.example/b", "https://a.example/b"), "."]);
  assert.deepEqual(inlinesOf("<mailto:a@b.example>"), [link("mailto:a@b.example", "mailto:a@b.example")]);
  assert.deepEqual(inlinesOf("![a cat](https://a.example/cat.png)"), [link("https://a.example/cat.png", "a cat")]);
  for (const bad of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "//a.example", "file:///etc/passwd", "/console/me", "\tjavascript:x"]) {
    assert.equal(safeAddress(bad), null, bad);
    const flat = JSON.stringify(inlinesOf(`[x](${bad})`));
    assert.ok(!flat.includes('"link"'), flat);
  }
});

test("HTML is text", () => {
  const evil = "<script>alert(1)</script> <img src=x onerror=alert(1)>";
  assert.deepEqual(parse(evil), [paragraph(evil)]);
});

test("blocks are told apart", () => {
  const text = "# Title #\nwords\n- a\n- b\n  - c\n\n1. x\n2. y\n\n> q\n> r\n\n---\n\n```py\nx = 1\n\n# no title\n```\nend";
  assert.deepEqual(parse(text), [
    { type: "heading", level: 1, inlines: ["Title"] },
    paragraph("words"),
    { type: "list", start: null, items: [[paragraph("a")], [paragraph("b"), { type: "list", start: null, items: [[paragraph("c")]] }]] },
    { type: "list", start: 1, items: [[paragraph("x")], [paragraph("y")]] },
    { type: "quote", blocks: [paragraph("q", { type: "break" }, "r")] },
    { type: "rule" },
    { type: "code", language: "py", text: "x = 1\n\n# no title", isOpen: false },
    paragraph("end"),
  ]);
});

test("a list's items may have blocks of their own, and blank lines between them", () => {
  const text = "1. first\n\n   ```\n   code\n   ```\n\n2. second\n   goes on\n\nafter";
  const [list, after] = parse(text);
  assert.deepEqual(list.items, [
    [paragraph("first"), { type: "code", language: "", text: "code", isOpen: false }],
    [paragraph("second", { type: "break" }, "goes on")],
  ]);
  assert.deepEqual(after, paragraph("after"));
  assert.equal(parse("It was\n1984. A year.")[0].type, "paragraph");
});

test("tables have cells of their columns' number and alignment", () => {
  const [table] = parse("| a | b |\n|:-:|--:|\n| 1 | `x\\|y` | more |\n| 2 |");
  assert.deepEqual([table.aligns, table.head], [["center", "end"], [["a"], ["b"]]]);
  assert.deepEqual(table.rows, [[["1"], [{ type: "code", text: "x|y" }]], [["2"], []]]);
  assert.equal(parse("a | b\nno divider")[0].type, "paragraph");
});

test("a text that grows changes its last block alone", () => {
  const whole = "First *words*.\n\n- a\n- b\n\n```js\nlet x;\n\nlet y;\n```\n\nLast.";
  const last = sourcesOf(whole);
  assert.equal(last.length, 4);
  assert.deepEqual(last.map((source) => parse(source).length), [1, 1, 1, 1]);
  let kept = [];
  for (let num = 1; num <= whole.length; num += 1) {
    const now = sourcesOf(whole.slice(0, num));
    for (let at = 0; at < kept.length - 1; at += 1) assert.equal(now[at], kept[at], whole.slice(0, num));
    kept = now;
  }
  assert.equal(parse("```js\nlet x")[0].isOpen, true);
});

test("hostile texts take no longer than others of their length", () => {
  const num = 40_000;
  const texts = ["*", "_", "[", "![", "`", "``a", "> ", "- ", "~~", "**a ", "[a](", "<", "h", "https://", "|a", "\\", "a|b\n-|-\n", "1. ", "  - a\n", "\n>", "*a _b "];
  for (const each of texts) {
    const text = each.repeat(num / each.length);
    const began = performance.now();
    parse(text);
    const took = performance.now() - began;
    assert.ok(took < 3000, `${JSON.stringify(each)}: ${took} ms`);
  }
});

test("what is nested deeply stays within the depth that can be drawn", () => {
  const depth = (blocks) => Math.max(0, ...blocks.map((each) => 1 + depth(each.blocks ?? each.items?.flat() ?? [])));
  assert.ok(depth(parse(`${"> ".repeat(1000)}a`)) < 12);
  assert.ok(depth(parse(Array.from({ length: 100 }, (_, at) => `${"  ".repeat(at)}- a`).join("\n"))) < 20);
  const flat = JSON.stringify(inlinesOf(`${"**a *b ".repeat(500)}${"* ".repeat(500)}`));
  assert.ok(flat.length > 0);
});
