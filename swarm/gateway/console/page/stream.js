// Reads an answer to its end, over as many streams as necessary. Draws nothing.

import { ApiError } from "./api.js";

const HEADERS_S = 30; // time limit for the gateway's headers, in seconds
const SILENT_S = 10; // seconds; a stream has a comment at least every second

export class AnswerReader {
  #api;
  #now;
  #onOpen;
  #onChange;
  #reading = null; // AbortController of the open stream
  #wake = () => {};

  // `onOpen(answer)`: called when a stream's headers have arrived. `onChange(answer)`: after each event and break.
  constructor(api, now, { onOpen = () => {}, onChange = () => {} } = {}) {
    this.#api = api;
    this.#now = now;
    this.#onOpen = onOpen;
    this.#onChange = onChange;
  }

  async read(answer) {
    while (!answer.isOver) {
      const problem = await this.#readOnce(answer);
      const wait_s = answer.broke(problem, this.#now());
      this.#onChange(answer);
      if (wait_s !== null) await this.#sleep(wait_s);
    }
  }

  hurry() {
    this.#wake();
  }

  letGo() {
    this.#reading?.abort();
    this.#wake();
  }

  // Returns the gateway's error, or null for a break.
  async #readOnce(answer) {
    const reading = (this.#reading = new AbortController());
    let watch = setTimeout(() => reading.abort(), HEADERS_S * 1000);
    const onPiece = () => {
      clearTimeout(watch);
      watch = setTimeout(() => reading.abort(), SILENT_S * 1000);
    };
    const onOpen = (response) => {
      onPiece();
      answer.opened(response.headers.get("x-request-id"), this.#now());
      this.#onOpen(answer);
    };
    const onEvent = (event) => {
      answer.take(event, this.#now());
      this.#onChange(answer);
    };
    try {
      const [path, init] = wayTo(answer);
      await this.#api.stream(path, { ...init, onOpen, onEvent, onPiece, signal: reading.signal });
      return null;
    } catch (error) {
      return problemOf(error);
    } finally {
      clearTimeout(watch);
    }
  }

  #sleep(seconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

function wayTo(answer) {
  if (answer.requestId) return [answer.resumption, {}];
  const headers = { "Content-Type": "application/json" };
  return [answer.request.path, { method: "POST", headers, body: JSON.stringify(answer.request.body) }];
}

function problemOf(error) {
  if (error instanceof ApiError) return { status: error.status, message: error.message, code: error.code };
  const isBreak = error.name === "AbortError" || error instanceof TypeError || error instanceof SyntaxError;
  return isBreak ? null : { status: 400, message: error.message }; // breaks come from networks and timers
}
