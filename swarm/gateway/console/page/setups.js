// Ready-made settings for clients of this gateway. Pure. They never contain a key: the user sets it in an environment
// variable.

import { KEY_VARIABLE, curlOf, pythonOf, shellQuoted } from "./snippets.js";

const GREETING = "Once upon a time";

// `baseUrl` ends with /v1. A gateway without keys accepts any value as a key, but most clients insist on one.
export function setupsFor({ baseUrl, model, needsKey, context }) {
  const root = baseUrl.replace(/\/v1\/?$/, "");
  const where = { baseUrl, root, model, needsKey, context };
  return [python(where), javascript(where), curl(where), codex(where), claude(where), openWebUi(where)];
}

const requestFor = ({ model }) => ({
  path: "/v1/chat/completions", body: { model, messages: [{ role: "user", content: GREETING }], stream: true },
});

function python(where) {
  const text = pythonOf(requestFor(where), where);
  return { name: "Python", note: "OpenAI's client: pip install openai.", files: [{ title: "Program", text }] };
}

function javascript({ baseUrl, model, needsKey }) {
  const key = needsKey ? `process.env.${KEY_VARIABLE}` : '"none"';
  const text = [
    'import OpenAI from "openai";', "", "const client = new OpenAI({", `  baseURL: ${JSON.stringify(baseUrl)},`,
    `  apiKey: ${key},`, "});", "const answer = await client.chat.completions.create({",
    `  model: ${JSON.stringify(model)},`, `  messages: [{ role: "user", content: "${GREETING}" }],`, "  stream: true,",
    "});", "for await (const chunk of answer) {", '  process.stdout.write(chunk.choices[0].delta.content ?? "");', "}",
  ];
  return {
    name: "JavaScript", note: "OpenAI's client: npm install openai. Save it as a file that ends in .mjs.",
    files: [{ title: "Program", text: lines(text) }],
  };
}

function curl(where) {
  return {
    name: "curl", note: "Any shell.", files: [{ title: "Command", text: `${curlOf(requestFor(where), where)}\n` }],
  };
}

// Codex uses /v1/responses. Its web search runs at OpenAI, and its multi-agent tools come in an unsupported form: both
// would be rejected here, so they are switched off.
function codex({ baseUrl, model, needsKey, context }) {
  const text = [
    `model = ${tomlText(model)}`, 'model_provider = "swarm"', 'web_search = "disabled"',
    ...(context ? [`model_context_window = ${context}`] : []), "", "[model_providers.swarm]", 'name = "Swarm"',
    `base_url = ${tomlText(baseUrl)}`, 'wire_api = "responses"', ...(needsKey ? [`env_key = "${KEY_VARIABLE}"`] : []),
    "", "[features]", "multi_agent = false",
  ];
  return {
    name: "Codex", note: "Then: codex. It needs a model with room for some 10,000 tokens of instructions.",
    files: [{ title: "~/.codex/config.toml", text: lines(text) }],
  };
}

// Claude Code requests Anthropic's model names; these variables make it request ours. It appends /v1/messages itself.
function claude({ root, model, needsKey }) {
  const text = [
    `export ANTHROPIC_BASE_URL=${shellQuoted(root)}`,
    `export ANTHROPIC_AUTH_TOKEN=${needsKey ? `"$${KEY_VARIABLE}"` : "none"}`,
    ...[
      "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
      "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    ].map((name) => `export ${name}=${shellQuoted(model)}`),
    "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
    "claude",
  ];
  return {
    name: "Claude Code",
    note: "In the shell that starts it. It needs a model with room for some 50,000 tokens of instructions.",
    files: [{ title: "Shell", text: lines(text) }],
  };
}

const TOOLS_TAKE = 20_000; // tokens of Open WebUI's own tools

function openWebUi({ baseUrl, needsKey, context }) {
  const isTight = context && context < 2 * TOOLS_TAKE;
  const text = [
    "ENABLE_OPENAI_API=true \\", `OPENAI_API_BASE_URL=${shellQuoted(baseUrl)} \\`,
    `OPENAI_API_KEY=${needsKey ? `"$${KEY_VARIABLE}"` : "none"} \\`, "ENABLE_OLLAMA_API=false \\",
    ...(isTight ? [`DEFAULT_MODEL_METADATA='{"capabilities": {"builtin_tools": false}}' \\`] : []), "open-webui serve",
  ];
  const note =
    "Or in its page: Admin settings, Connections, OpenAI API. In a container this machine has another name." +
    (isTight ? " The model has too little room for its built-in tools." : "");
  return { name: "Open WebUI", note, files: [{ title: "Shell", text: lines(text) }] };
}

const lines = (text) => `${text.join("\n")}\n`;

// TOML's basic strings have the escapes of JSON, except for DEL.
const tomlText = (words) => JSON.stringify(words).replaceAll("\u007f", "\\u007f");
