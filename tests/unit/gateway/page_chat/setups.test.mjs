import assert from "node:assert/strict";
import { test } from "node:test";

import { setupsFor } from "../../../../swarm/gateway/console/page/setups.js";

const HERE = { baseUrl: "http://127.0.0.1:8000/v1", model: "village", needsKey: false, context: 2048 };
const textOf = (where, name) => setupsFor({ ...HERE, ...where }).find((each) => each.name === name).files[0].text;

test("each program is told this gateway and this model", () => {
  const setups = setupsFor(HERE);
  assert.deepEqual(
    setups.map(({ name }) => name),
    ["Python", "JavaScript", "curl", "Codex", "Claude Code", "Open WebUI"],
  );
  for (const { files } of setups) assert.match(files[0].text, /http:\/\/127\.0\.0\.1:8000/);
});

test("with keys they name the variable that holds one", () => {
  for (const { files } of setupsFor({ ...HERE, needsKey: true })) assert.match(files[0].text, /SWARM_API_KEY/);
  for (const { files } of setupsFor(HERE)) assert.doesNotMatch(files[0].text, /SWARM_API_KEY/);
});

test("Codex goes by responses, without OpenAI's web search", () => {
  const text = textOf({}, "Codex");
  assert.match(text, /^wire_api = "responses"$/m);
  assert.match(text, /^web_search = "disabled"$/m);
  assert.match(text, /^base_url = "http:\/\/127\.0\.0\.1:8000\/v1"$/m);
  assert.match(text, /^model_context_window = 2048$/m);
  assert.match(text, /\[features\]\nmulti_agent = false/); // they come as tools in a "namespace", which are refused
});

test("Claude Code gets the root, as it appends the rest itself", () => {
  assert.match(textOf({}, "Claude Code"), /^export ANTHROPIC_BASE_URL='http:\/\/127\.0\.0\.1:8000'$/m);
});

test("Open WebUI leaves its own tools away where the model has no room for them", () => {
  assert.match(textOf({}, "Open WebUI"), /"builtin_tools": false/);
  assert.doesNotMatch(textOf({ context: 131072 }, "Open WebUI"), /builtin_tools/);
});

test("a model's name can't break out of its quotes", () => {
  const nasty = `a'b"c\\d$(id)`;
  assert.match(textOf({ model: nasty }, "Codex"), /^model = "a'b\\"c\\\\d\$\(id\)"$/m);
  assert.ok(textOf({ model: nasty }, "Claude Code").includes(`ANTHROPIC_MODEL='a'\\''b"c\\d$(id)'`));
});
