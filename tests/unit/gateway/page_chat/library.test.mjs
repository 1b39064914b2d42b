import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { quotedFile } from "../../../../swarm/gateway/console/page/file_drop.js";
import { digestOf, healedDuring } from "../../../../swarm/gateway/console/page/healed.js";
import { Library, MOST_CHARACTERS, MOST_KEPT, exported, found, imported } from "../../../../swarm/gateway/console/page/library.js";
import * as tree from "../../../../swarm/gateway/console/page/thread.js";

const talk = (...words) =>
  words.reduce(
    (thread, content, at) => tree.added(thread, { role: at % 2 ? "assistant" : "user", content, thought: "", facts: "", isRaw: false, isPlain: false }),
    tree.newThread(),
  );
const record = (id, at = 0, ...words) => ({ id, name: words[0] ?? "Hi", isNamed: false, mode: "chat", at, thread: talk(...(words.length ? words : ["Hi", "Hello!"])) });

// As much of IndexedDB as a library needs.
class FakeDb {
  rows = new Map();
  open() {
    return answered({ transaction: () => ({ objectStore: () => this }) });
  }
  getAll = () => answered([...this.rows.values()]);
  put = (row) => answered(this.rows.set(row.id, structuredClone(row)));
  delete = (id) => answered(this.rows.delete(id));
}
const answered = (result) => {
  const request = { result };
  queueMicrotask(() => request.onsuccess?.());
  return request;
};
const library = (db = new FakeDb()) => new Library({ indexedDb: db, channel: null });

test("what is kept is listed with the latest first, also by another page", async () => {
  const db = new FakeDb();
  const one = library(db);
  await one.keep(record("a", 1));
  await one.keep(record("b", 2));
  await one.keep(record("a", 3));
  const other = library(db);
  await other.read();
  assert.deepEqual(other.records.map(({ id }) => id), ["a", "b"]);
  await other.rename("b", "Named");
  assert.deepEqual([db.rows.get("b").name, db.rows.get("b").isNamed], ["Named", true]);
  await other.remove("a");
  assert.deepEqual([...db.rows.keys()], ["b"]);
});

test("there is a bound: the oldest go, and what is too long is not kept", async () => {
  const db = new FakeDb();
  const kept = library(db);
  for (let at = 0; at < MOST_KEPT + 3; at += 1) await kept.keep(record(at.toString(16), at));
  assert.deepEqual([kept.records.length, db.rows.size], [MOST_KEPT, MOST_KEPT]);
  assert.ok(!db.rows.has("0"));
  await kept.keep(record("ff0", 9999, "x".repeat(MOST_CHARACTERS + 1)));
  assert.match(kept.problem, /too long/);
  assert.ok(!db.rows.has("ff0"));
});

test("a browser that keeps nothing says so, and the page goes on", async () => {
  const kept = new Library({ indexedDb: null, channel: null });
  await kept.keep(record("a"));
  assert.match(kept.problem, /not kept/);
});

test("a conversation is found by its name and its words", () => {
  const all = [record("a", 0, "About cats", "Black."), record("b", 0, "About dogs", "Brown.")];
  assert.deepEqual(found(all, "BROWN").map(({ id }) => id), ["b"]);
  assert.deepEqual(found(all, " ").length, 2);
});

test("what was exported is imported as it was; what is here already gets another id", async () => {
  const all = [record("a", 1), record("b", 2, "One", "Two", "Three")];
  const { records } = imported(exported(all));
  assert.deepEqual(records, all);
  const kept = library();
  await kept.keep(all[0]);
  await kept.add(records, () => "c");
  assert.deepEqual(kept.records.map(({ id }) => id).sort(), ["a", "b", "c"]);
});

test("a file that is damaged or hostile is refused with its reason, and nothing of it is taken", () => {
  const file = (change) => {
    const body = JSON.parse(exported([record("a")]));
    change(body.conversations[0], body);
    return imported(JSON.stringify(body));
  };
  assert.match(imported("{").problem, /not JSON/);
  assert.match(imported("[1]").problem, /no conversations/);
  const bad = [
    (one) => (one.id = "../x"),
    (one) => (one.at = "now"),
    (one) => (one.mode = "html"),
    (one) => (one.thread = null),
    (one) => (one.thread.turns[1].parent = 1),
    (one) => (one.thread.turns[1].parent = 2),
    (one) => (one.thread.turns[2].role = "system"),
    (one) => (one.thread.turns[2].content = { toString: "x" }),
    (one) => (one.thread.turns = {}),
  ];
  for (const change of bad) assert.match(file(change).problem, /damaged/, change);
  assert.match(file((_, body) => (body.conversations = Array(MOST_KEPT + 1).fill(null))).problem, /more than/);
  const { records } = file((one) => {
    one.extra = "<script>";
    one.thread.turns[1].onclick = "x";
    one.thread.picks = { 0: 99, 1: 2, __proto__: 1 };
  });
  assert.deepEqual([Object.keys(records[0]).includes("extra"), records[0].thread.turns[1].onclick], [false, undefined]);
  assert.deepEqual(records[0].thread.picks, { 1: 2 });
});

test("a thread's alternatives, its end, and a copy of its beginning", () => {
  let thread = talk("Hi", "One");
  thread = tree.added(thread, { role: "assistant", content: "Two" }, 1);
  const [, two] = tree.pathOf(thread);
  assert.equal(two.content, "Two");
  assert.deepEqual(tree.siblingsOf(thread, two).map(({ content }) => content), ["One", "Two"]);
  assert.equal(tree.pathOf(tree.removed(thread, two)).at(-1).content, "One");
  assert.deepEqual(tree.pathOf(tree.copiedUpTo(thread, two.id)).map(({ content }) => content), ["Hi", "Two"]);
  assert.equal(tree.titleOf([{ content: `${"word ".repeat(30)}` }]).endsWith(" …"), true);
});

test("a file's text stands between fences that it does not contain", () => {
  assert.equal(quotedFile({ name: "a.md", text: "```\nx\n```\n" }), "a.md:\n````\n```\nx\n```\n````");
});

test("a digest is SHA-256 of the answer without its reasoning", async () => {
  const digest = createHash("sha256").update("abcé😀").digest("hex");
  assert.equal(await digestOf({ choices: [{ text: "thoughtabcé😀", numThought: 7 }] }), digest);
});

test("an answer is healed by the recoveries that fell into it, by the gateway's clock", () => {
  const answer = { askedAt: 100_000, endedAt: 110_000 };
  const recoveries = [1, 104, 109, 111].map((at) => ({ began_at: at, sequences: 1 }));
  assert.deepEqual(healedDuring(answer, recoveries, 0).map(({ began_at: at }) => at), [104, 109]);
  assert.deepEqual(healedDuring(answer, recoveries, 1.5).map(({ began_at: at }) => at), [104, 109, 111]);
  assert.deepEqual(healedDuring(answer, [{ began_at: 105, sequences: 0 }], 0), []);
  assert.deepEqual(healedDuring(answer, null, 0), []);
});
