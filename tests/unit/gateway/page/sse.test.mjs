import assert from "node:assert/strict";
import { test } from "node:test";

import { SseParser } from "../../../../swarm/gateway/console/page/sse.js";

const STREAM =
  ': beat\r\nid: L-1\r\nevent: snapshot\r\ndata: {"a":\r\ndata: 1}\r\n\r\ndata:x\n\nevent: delta\rdata: y\rid: L-2\r\r';
const WANTED = [
  { event: "snapshot", data: '{"a":\n1}', id: "L-1" },
  { event: "message", data: "x", id: "L-1" },
  { event: "delta", data: "y", id: "L-2" },
];

test("a stream in one piece: fields, several lines of data, all three ends of lines, an id that lasts", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.push(STREAM), WANTED);
});

test("wherever it is cut into two pieces, or into single characters, the events are the same", () => {
  for (let cut = 0; cut <= STREAM.length; cut += 1) {
    const parser = new SseParser();
    assert.deepEqual(
      [...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut))],
      WANTED,
      `cut at ${cut}`,
    );
  }
  const parser = new SseParser();
  assert.deepEqual(
    [...STREAM].flatMap((character) => parser.push(character)),
    WANTED,
  );
});

test("an event without data is none, a field without a colon has no value, an unknown one is passed over", () => {
  assert.deepEqual(new SseParser().push("event: empty\n\ndata\n\nretry: 5\ndata: z\n\n"), [
    { event: "message", data: "", id: null },
    { event: "message", data: "z", id: null },
  ]);
});

test("an event that never ends is refused before it fills the memory", () => {
  const parser = new SseParser();
  const piece = "x".repeat(1024 * 1024);
  parser.push("data: ");
  assert.throws(() => {
    for (let megabytes = 0; megabytes < 40; megabytes += 1) parser.push(piece);
  }, /longer than this page can hold/);
});
