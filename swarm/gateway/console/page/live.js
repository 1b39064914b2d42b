// Feeds the store from /console/live: resumes after a break, waits longer after each failure, and closes the stream
// while the tab has been hidden for a minute.

import { ApiError } from "./api.js";

// seconds; the gateway sends a comment at least every second, so longer silence means a broken connection
const SILENT_S = 12;
const HIDDEN_S = 60;
const FIRST_WAIT_S = 0.25;
const LONGEST_WAIT_S = 5;

export class Live {
  #api;
  #store;
  #lastId = null; // in memory only: a duplicated tab starts with its own snapshot
  #failures = 0;
  #isCalled = false; // the next attempt should start immediately
  #resume = () => {};
  #running = null;
  #watch = 0;
  #hiddenTimer = 0;

  constructor(api, store) {
    this.#api = api;
    this.#store = store;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#looked());
    addEventListener("online", () => this.#wake());
    return this.#loop();
  }

  again() {
    this.#failures = 0;
    this.#lastId = null;
    this.#running?.abort();
    this.#wake();
  }

  async #loop() {
    for (;;) {
      await this.#read();
      const rests = ["paused", "locked"].includes(this.#store.connection);
      await this.#sleep(rests ? Infinity : waitAfter(this.#failures, Math.random()));
    }
  }

  async #read() {
    this.#running = new AbortController();
    const lastId = this.#lastId;
    try {
      await this.#api.stream("/console/live", {
        headers: lastId === null ? {} : { "Last-Event-ID": lastId }, signal: this.#running.signal,
        onOpen: () => this.#alive(), onPiece: () => this.#alive(), onEvent: (event) => this.#take(event),
      });
      this.#failed();
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) this.#store.setConnection("locked");
      else if (this.#store.connection !== "paused") this.#failed(error instanceof ApiError ? error.message : "");
      if (error instanceof SyntaxError)
        this.#lastId = null; // the local state cannot be patched: start with a snapshot
      else if (!(error instanceof ApiError) && !isBroken(error)) throw error;
    } finally {
      clearTimeout(this.#watch);
      this.#running = null;
    }
  }

  #take({ event, data, id }) {
    const value = JSON.parse(data);
    if (event === "snapshot") this.#store.replace(value);
    else if (event === "delta") this.#store.patch(value);
    else if (event === "events") this.#store.happened(value);
    if (id !== null) this.#lastId = id;
    this.#failures = 0;
    this.#store.setConnection("live");
  }

  #alive() {
    this.#store.heardAt = Date.now() / 1000;
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => this.#running?.abort(), SILENT_S * 1000);
  }

  #failed(problem = "") {
    this.#failures += 1;
    this.#store.setConnection("reconnecting", problem);
  }

  #looked() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => {
        this.#store.setConnection("paused");
        this.#running?.abort();
      }, HIDDEN_S * 1000);
      return;
    }
    if (this.#store.connection === "paused") this.#store.setConnection("reconnecting"); // a failed stream is retried
    this.#wake();
  }

  #wake() {
    this.#isCalled = true;
    this.#resume();
  }

  async #sleep(seconds) {
    if (!this.#isCalled) {
      await new Promise((resolve) => {
        this.#resume = resolve;
        if (Number.isFinite(seconds)) setTimeout(resolve, seconds * 1000);
      });
    }
    this.#isCalled = false;
  }
}

// Aborted fetches and broken bodies are normal network errors.
const isBroken = (error) => error.name === "AbortError" || error instanceof TypeError;

// Seconds to wait; `chance` (0 to 1) spreads the load of many tabs.
export function waitAfter(failures, chance) {
  const longest = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** Math.min(failures, 10));
  return longest * (0.5 + chance / 2);
}
