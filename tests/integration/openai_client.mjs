// OpenAI's JavaScript client against a gateway: node openai_client.mjs URL. Prints one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = "village";
const messages = [{ role: "user", content: "Who lives in the village?" }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const found = {};

found.models = (await client.models.list()).data.map((each) => each.id);

const whole = await client.chat.completions.create(asked);
found.whole = whole.choices[0].message.content;
found.usage = whole.usage;

found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  found.streamed += chunk.choices[0]?.delta?.content ?? "";

const helper = client.chat.completions.stream({ ...asked, max_tokens: 100, stream_options: { include_usage: true } });
found.helper = await helper.finalContent();
found.helperUsage = await helper.totalUsage();

const text = await client.completions.create({ model, prompt: "Anna", temperature: 0, max_tokens: 8, n: 2, logprobs: 1 });
found.texts = text.choices.map((choice) => choice.text);
found.tokens = text.choices[0].logprobs.tokens;

const tools = [
  {
    type: "function",
    function: { name: "weather", parameters: { type: "object", properties: { place: { type: "string" } } } },
  },
];
const offered = await client.chat.completions.create({ ...asked, tools, tool_choice: "none" });
found.offered = offered.choices[0].message.content;
found.calls = offered.choices[0].message.tool_calls ?? null;

try {
  await client.chat.completions.create({ ...asked, temperature: -1 });
} catch (error) {
  found.error = [error instanceof OpenAI.BadRequestError, error.status, error.param, Boolean(error.requestID)];
}

const long = await client.chat.completions.create({ ...asked, max_tokens: 1500, ignore_eos: true, stream: true });
let num = 0;
for await (const chunk of long) if (chunk.choices.length && ++num === 5) long.controller.abort();
found.aborted = num;

const stop = new AbortController();
setTimeout(() => stop.abort(), 200);
try {
  await client.chat.completions.create({ ...asked, n: 4, max_tokens: 1500, ignore_eos: true }, { signal: stop.signal });
} catch (error) {
  found.abort = error instanceof OpenAI.APIUserAbortError;
}
console.log(JSON.stringify(found));
