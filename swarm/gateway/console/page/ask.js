// Turns the contents of the prompt box into a request of the public API: parameters, their validation, and the body.

// Parameters of the API. `step` "any" allows fractions, 1 only integers. An empty field means the API's default.
export const PARAMETERS = [
  ["max_tokens", "Max tokens", 1, 1_000_000, 1, "maximum length of the answer"],
  ["temperature", "Temperature", 0, 100, "any", "0 always takes the likeliest token"],
  ["top_p", "Top p", 0, 1, "any", "sample among the likeliest that make up this share"],
  ["top_k", "Top k", 0, 1_000_000, 1, "sample among this many of the likeliest"],
  ["min_p", "Min p", 0, 1, "any", "at least this share of the likeliest one"],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1, "the same seed gives the same text; empty: random"],
  ["min_tokens", "Min tokens", 0, 1_000_000, 1, "minimum length of the answer"],
  ["n", "Continuations", 1, 64, 1, "number of answers to one prompt"],
  ["presence_penalty", "Presence penalty", -100, 100, "any", "subtracted for tokens that have occurred"],
  ["frequency_penalty", "Frequency penalty", -100, 100, "any", "subtracted for each occurrence"],
  ["repetition_penalty", "Repetition penalty", 0, 100, "any", "divisor for repeated tokens; 1 is off"],
].map(([name, label, low, high, step, hint]) => ({ name, label, low, high, step, hint }));
const ABOVE_ZERO = new Set(["top_p", "repetition_penalty"]);

export const PRIORITIES = ["high", "normal", "low"];
export const DEFAULTS = {
  max_tokens: "200",
  temperature: "0.7",
  n: "1",
  priority: "normal",
  ignore_eos: "", // "yes": the answer ends only at its maximum length
  stop: "",
  schema: "",
  regex: "",
  system: "",
};
export const MOST_STOPS = 16;
const NUM_ALTERNATIVES = 5; // besides the token itself; more would be noise
const KEEP_S = 60; // seconds; a reload takes one or two, and a tab that is closed costs no more than this

export function problemsOf(values) {
  const problems = {};
  for (const parameter of PARAMETERS) {
    const problem = numberProblem(parameter, values[parameter.name]);
    if (problem) problems[parameter.name] = problem;
  }
  if (stopsOf(values.stop).length > MOST_STOPS) problems.stop = `Stop: at most ${MOST_STOPS} lines.`;
  const schema = readSchema(values.schema);
  if (schema.problem) problems.schema = schema.problem;
  return { ...togetherProblems(values), ...problems };
}

function togetherProblems({ min_tokens: least, max_tokens: most, ignore_eos: isEndless, schema = "", regex = "" }) {
  const problems = {};
  const forms = [schema, regex].filter((words) => words.trim() !== "");
  if (Number(least || 0) > Number(most || Infinity)) problems.min_tokens = "Min tokens is more than Max tokens.";
  if (forms.length > 1) problems.regex = "An answer has one format: use the JSON schema or the regular expression.";
  if (isEndless && forms.length > 0)
    problems.ignore_eos = "An answer with a format ends where its format ends: untick this, or remove it.";
  return problems;
}

function numberProblem({ name, label, low, high, step }, given) {
  const words = String(given ?? "").trim();
  if (words === "") return null;
  const number = Number(words);
  if (!Number.isFinite(number)) return `${label}: “${words}” is not a number.`;
  if (step === 1 && !Number.isInteger(number)) return `${label} is a whole number.`;
  if (number < low || number > high) return `${label} goes from ${low} to ${high}.`;
  return number === 0 && ABOVE_ZERO.has(name) ? `${label} must be above 0.` : null;
}

// {schema} if it is valid, {problem} as text if not, {} if it is empty.
export function readSchema(given) {
  const words = String(given ?? "").trim();
  if (words === "") return {};
  let schema;
  try {
    schema = JSON.parse(words);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return { problem: `JSON schema: not valid JSON${whereIn(words, error.message)}` };
  }
  const isSchema =
    typeof schema === "boolean" || (typeof schema === "object" && schema !== null && !Array.isArray(schema));
  return isSchema ? { schema } : { problem: 'JSON schema: a schema is an object, such as {"type": "object"}.' };
}

// Browsers report the position in different ways.
function whereIn(words, message) {
  const place = /position (\d+)/.exec(message);
  if (place === null) return /end of/i.test(message) ? ": it ends too early." : ".";
  const before = words.slice(0, Number(place[1])).split("\n");
  return ` at line ${before.length}, column ${before.at(-1).length + 1}.`;
}

// One stop string per line; \n and \t stand for line break and tab.
export function stopsOf(given) {
  const lines = String(given ?? "")
    .split("\n")
    .filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, sign) => ({ n: "\n", t: "\t", "\\": "\\" })[sign]));
}

// `seed` is used if none was given, so that the same answer can be requested again, for example with confidence.
export function requestOf({ mode, values, model, messages, prompt, seed, confidence }) {
  const isChat = mode === "chat";
  const body = { model, ...(isChat ? { messages } : { prompt }) };
  for (const { name } of PARAMETERS) {
    const words = String(values[name] ?? "").trim();
    if (words !== "") body[name] = Number(words);
  }
  body.seed ??= seed;
  if (body.n === 1) delete body.n;
  if (values.ignore_eos) body.ignore_eos = true;
  const stop = stopsOf(values.stop);
  if (stop.length > 0) body.stop = stop;
  if (values.priority && values.priority !== "normal") body.priority = values.priority;
  const { schema } = readSchema(values.schema);
  if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  else if (String(values.regex ?? "").trim()) body.response_format = { type: "regex", regex: values.regex.trim() };
  if (confidence) Object.assign(body, confidenceFields(isChat));
  Object.assign(body, { stream: true, stream_options: { include_usage: true }, keep_s: KEEP_S });
  return { path: isChat ? "/v1/chat/completions" : "/v1/completions", body };
}

const confidenceFields = (isChat) =>
  isChat ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES };

export const withConfidence = ({ path, body }) => ({
  path, body: { ...body, ...confidenceFields(path.includes("chat")) },
});

export const hasConfidence = ({ body }) => body.logprobs !== undefined;

export const messagesOf = (system, turns) => [
  ...(String(system ?? "").trim() ? [{ role: "system", content: system }] : []),
  ...turns.map(({ role, content }) => ({ role, content })),
];

export const drawSeed = (chance = Math.random()) => Math.floor(chance * 2 ** 31);
