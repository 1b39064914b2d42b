// The request in the prompt box as commands to copy: curl, and Python with OpenAI's client. They never contain a key,
// only the name of the variable that holds one.

export const KEY_VARIABLE = "SWARM_API_KEY";

// Fields that only this page needs: they keep the answer alive across a reload.
const OWN = new Set(["keep_s", "stream_options"]);

const shown = (body) => Object.fromEntries(Object.entries(body).filter(([name]) => !OWN.has(name)));

// For POSIX shells: between single quotes every character except the quote is literal.
export const shellQuoted = (words) => `'${words.replaceAll("'", `'\\''`)}'`;

export function curlOf({ path, body }, { baseUrl, needsKey }) {
  const url = baseUrl.replace(/\/v1\/?$/, "") + path;
  return [
    `curl -N ${shellQuoted(url)}`, ...(needsKey ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    "-H 'Content-Type: application/json'", `-d ${shellQuoted(JSON.stringify(shown(body), null, 2))}`,
  ].join(" \\\n  ");
}

// Parameters of OpenAI's client; the others go into extra_body.
const OF_OPENAI = [
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "n", "presence_penalty",
  "frequency_penalty", "stop", "logprobs", "stream",
];
const OF_CHAT = [...OF_OPENAI, "top_logprobs", "response_format"];

export function pythonOf({ path, body }, { baseUrl, needsKey }) {
  const isChat = path.includes("chat");
  const names = new Set(isChat ? OF_CHAT : OF_OPENAI);
  const fields = Object.entries(shown(body));
  const more = Object.fromEntries(fields.filter(([name]) => !names.has(name)));
  const given = fields
    .filter(([name]) => names.has(name))
    .map(([name, value]) => `    ${name}=${pythonLiteral(value, 4)},`);
  if (Object.keys(more).length > 0) given.push(`    extra_body=${pythonLiteral(more, 4)},`);
  const key = needsKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${pythonLiteral(baseUrl)}, api_key=${key})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`, ...given, ")",
    ...printing(isChat ? 'choice.delta.content or ""' : "choice.text", body.n ?? 1), "",
  ].join("\n");
}

// Several continuations arrive interleaved: assemble each before printing it.
function printing(text, n) {
  if (n === 1) {
    return ["for chunk in stream:", "    for choice in chunk.choices:", `        print(${text}, end="", flush=True)`];
  }
  return [
    `texts = [""] * ${n}`, "for chunk in stream:", "    for choice in chunk.choices:",
    `        texts[choice.index] += ${text}`, 'print("\\n\\n".join(texts))',
  ];
}

export function pythonLiteral(value, indent = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return JSON.stringify(value);
  const inner = indent + 4;
  const items = Array.isArray(value)
    ? value.map((each) => pythonLiteral(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonLiteral(each, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + items.join(", ") + close;
  if (line.length + indent <= 88 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${" ".repeat(inner)}${item},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}
