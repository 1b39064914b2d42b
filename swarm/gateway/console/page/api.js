// Client of the gateway: adds the key to every request, and turns every refusal into an error with a displayable
// message.

import { forget, keep, recall } from "./keeping.js";
import { SseParser } from "./sse.js";

const KEY = "swarm.key";
const ANSWER_S = 30; // time limit of an answer that is not a stream, in seconds
const ORDER_S = 130; // the same for a command: the gateway gives the broker 120 s to hand over layers

export class ApiError extends Error {
  constructor(words, status = 0, code = "") {
    super(words);
    this.name = "ApiError";
    this.status = status; // 0: no answer at all
    this.code = code; // the gateway's error code, if it sent one
  }
}

export class Api {
  // `onRefused(words)` is called when the gateway requires a key, or a different one.
  constructor({ storage = globalThis.sessionStorage, fetcher = (...args) => fetch(...args) } = {}) {
    this.onRefused = () => {};
    this.#storage = storage;
    this.#fetch = fetcher;
    this.#key = recall(storage, KEY) ?? "";
  }

  #storage;
  #fetch;
  #key; // kept here, too, since storage may be forbidden

  get key() {
    return this.#key;
  }

  // The key is stored for this tab; a duplicated tab gets a copy.
  setKey(key) {
    this.#key = key.trim();
    if (this.#key) keep(this.#storage, KEY, this.#key);
    else forget(this.#storage, KEY);
  }

  headers(more = {}) {
    return this.#key ? { ...more, Authorization: `Bearer ${this.#key}` } : { ...more };
  }

  // Returns a successful Response, otherwise throws an ApiError with the gateway's message.
  async fetch(path, { headers = {}, ...rest } = {}) {
    const asked = this.#key;
    let response;
    try {
      response = await this.#fetch(path, { cache: "no-store", ...rest, headers: this.headers(headers) });
    } catch (error) {
      if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
      throw new ApiError("The gateway does not answer.");
    }
    if (response.ok) return response;
    const { words, code } = await saidIn(response);
    if (response.status === 401 && asked === this.#key) this.onRefused(asked ? words : "");
    throw new ApiError(words, response.status, code);
  }

  async get(path) {
    return this.#json(path, {});
  }

  async post(path, body, patience_s) {
    const headers = { "Content-Type": "application/json" };
    return this.#json(path, { method: "POST", body: JSON.stringify(body), headers }, patience_s);
  }

  // `order("drain", {worker: "w1"})` returns {text, body}.
  async order(verb, body = {}) {
    return this.post("/console/orders", { verb, ...body }, ORDER_S);
  }

  async #json(path, init, patience_s = ANSWER_S) {
    try {
      const response = await this.fetch(path, { signal: AbortSignal.timeout(patience_s * 1000), ...init });
      return await response.json();
    } catch (error) {
      const isLate = error.name === "TimeoutError";
      if (isLate) throw new ApiError(`The gateway has not answered within ${patience_s} seconds.`);
      if (error instanceof SyntaxError) throw new ApiError("The gateway's answer is not JSON.");
      if (error instanceof TypeError) throw new ApiError("The gateway's answer broke off.");
      throw error;
    }
  }

  // Calls `onEvent({event, data, id})`, `onOpen(response)`, and `onPiece()` whenever data arrives.
  async stream(path, { onEvent, onOpen = () => {}, onPiece = () => {}, ...init }) {
    const headers = { Accept: "text/event-stream", ...init.headers };
    const response = await this.fetch(path, { ...init, headers });
    onOpen(response);
    const parser = new SseParser();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        onPiece();
        for (const event of parser.push(value)) onEvent(event);
      }
    } finally {
      await reader.cancel().catch(() => {}); // already broken: nothing to close
    }
  }
}

async function saidIn(response) {
  const text = await response.text().catch(() => "");
  try {
    const body = JSON.parse(text);
    const words = body?.error?.message ?? body?.message ?? body?.detail;
    if (typeof words === "string" && words) return { words, code: String(body.error?.code ?? "") };
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  const status = `${response.status}${response.statusText ? ` ${response.statusText}` : ""}`;
  return { words: `The gateway refused this (${status}).`, code: "" };
}
