import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { curlOf, pythonLiteral, pythonOf, shellQuoted } from "../../../../swarm/gateway/console/page/snippets.js";

const NASTY = `it's "quoted" $HOME \`id\` $(id) \\ back\nline\ttab ! 😀 مرحبا </script>`;
const WHERE = { baseUrl: "http://127.0.0.1:8000/v1", needsKey: false };
const chat = (body = {}) => ({
  path: "/v1/chat/completions",
  body: {
    model: "village",
    messages: [{ role: "user", content: NASTY }],
    seed: 7,
    stream: true,
    keep_s: 60,
    stream_options: {},
    ...body,
  },
});

// What sh makes of a command in which curl only tells its arguments.
const argumentsOf = (command) =>
  execFileSync("sh", ["-c", `curl() { printf '%s\\0' "$@"; }\n${command}`], { env: { SWARM_API_KEY: "from-env" } })
    .toString()
    .split("\0")
    .slice(0, -1);

test("curl gets the body as it is, whatever stands in it", () => {
  const given = argumentsOf(curlOf(chat(), WHERE));
  assert.equal(given[1], "http://127.0.0.1:8000/v1/chat/completions");
  const body = JSON.parse(given.at(-1));
  assert.equal(body.messages[0].content, NASTY);
  assert.equal("keep_s" in body || "stream_options" in body, false);
});

test("the key is a variable's name, and is read by the shell", () => {
  const command = curlOf(chat(), { ...WHERE, needsKey: true });
  assert.match(command, /Bearer \$SWARM_API_KEY/);
  assert.ok(argumentsOf(command).includes("Authorization: Bearer from-env"));
  assert.equal(curlOf(chat(), WHERE).includes("Authorization"), false);
});

test("what is quoted for a shell comes out of it unchanged", () => {
  for (const words of [NASTY, "'", "''", "", "\\'", "a\nb"]) {
    assert.deepEqual(argumentsOf(`curl ${shellQuoted(words)}`), [words]);
  }
});

test("Python's literals are Python's", () => {
  assert.equal(pythonLiteral({ a: [true, null, 1.5], "b'c": "x\n" }), `{"a": [True, None, 1.5], "b'c": "x\\n"}`);
  assert.match(pythonLiteral({ text: "y".repeat(100) }), /^\{\n {4}"text": "y+",\n\}$/);
});

test("OpenAI's client is given its own fields by name, and ours in extra_body", () => {
  const code = pythonOf(chat({ top_k: 40, priority: "high", temperature: 0.5 }), WHERE);
  assert.match(code, /extra_body=\{"top_k": 40, "priority": "high"\}/);
  assert.match(code, /\n {4}temperature=0\.5,\n/);
  assert.match(code, /api_key="none"/);
  const raw = pythonOf(
    { path: "/v1/completions", body: { model: "m", prompt: "x", response_format: { type: "json_object" } } },
    WHERE,
  );
  assert.match(raw, /extra_body=\{"response_format"/);
  assert.match(raw, /print\(choice\.text/);
});
