// The conversation and the answer in progress: requests, reading, stopping and resuming. Kept in sessionStorage, so
// that a reload continues, and each tab has its own. Draws nothing.

import { ApiError } from "./api.js";
import * as ask from "./ask.js";
import { valuesFor } from "./examples.js";
import { Answer } from "./reading.js";
import { countedOf, roomOf } from "./room.js";

const KEPT = "swarm.talk";
const SAVE_S = 2; // seconds between two saves while tokens arrive; leaving the page saves immediately
const SAVE_SHARE = 50; // a long answer takes longer to save, so it is saved less often
const HEADERS_S = 30; // time limit for the gateway's headers, in seconds
const SILENT_S = 10; // seconds; a stream has a comment at least every second
const SLOW_MS = 16; // a slower drawing, as of thousands of tokens, is followed by a pause of twice its time
const STOP_S = 3; // seconds from the cancel command to the end of the stream
const MOST_TURNS = 400;

const talks = new WeakMap();

// The page's one conversation, shared by its parts.
export function talkOf(store, api) {
  if (!talks.has(store)) talks.set(store, new Talk(api));
  return talks.get(store);
}

export class Talk {
  mode = "chat";
  values = { ...ask.DEFAULTS };
  drafts = { chat: "", raw: "Once upon a time" };
  turns = []; // [{role, content}]
  answer = null;
  chosen = 0; // the continuation with which the conversation continues
  counted = null; // length of the conversation from the last answer's usage report
  former = null; // the previous conversation, until something is asked
  model = null; // {id, chat, context} once known
  lacks = ""; // why there is no model, as text
  wantsConfidence = false;
  repeats = false; // repeats the request whenever an answer ends, until Stop
  isStopping = false;
  notice = ""; // what could not be done, as text
  seed = ask.drawSeed(); // of the next request, if none is given, so that a copied request has the same answer
  #api;
  #storage;
  #now;
  #subscribers = new Set();
  #isScheduled = false;
  #saving = 0;
  #saveTook = 0;
  #drawTook = 0;
  #judged = { state: [], problems: {} };
  #reading = null; // AbortController of the open stream
  #wake = () => {};

  constructor(api, { storage = globalThis.sessionStorage, now = () => Date.now() } = {}) {
    this.#api = api;
    this.#storage = storage;
    this.#now = now;
    this.#restore();
    globalThis.addEventListener?.("pagehide", () => this.save());
    globalThis.addEventListener?.("online", () => this.#wake());
  }

  // Call `draw(talk)` soon, and after changes; at most once per frame.
  subscribe(draw) {
    this.#subscribers.add(draw);
    this.#schedule();
  }

  changed() {
    this.#schedule();
    if (!this.#saving)
      this.#saving = setTimeout(() => this.save(), Math.max(SAVE_S * 1000, SAVE_SHARE * this.#saveTook));
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const frame = globalThis.requestAnimationFrame ?? setTimeout;
    const draw = () => {
      this.#isScheduled = false;
      const began = performance.now();
      for (const each of this.#subscribers) each(this);
      this.#drawTook = performance.now() - began;
    };
    if (this.#drawTook < SLOW_MS) frame(draw);
    else setTimeout(() => frame(draw), 2 * this.#drawTook);
  }

  get isBusy() {
    return this.answer !== null && !this.answer.isOver;
  }

  get draft() {
    return this.drafts[this.mode];
  }

  set(fields) {
    Object.assign(this, fields);
    this.changed();
  }

  // --- requests

  // The request that Generate would send now.
  get request() {
    const { mode, values, seed, wantsConfidence: confidence } = this;
    const model = this.model?.id ?? "";
    if (mode === "raw") return ask.requestOf({ mode, values, model, prompt: this.draft, seed, confidence });
    const turns = [...this.#settled(), { role: "user", content: this.draft }];
    return ask.requestOf({ mode, values, model, messages: ask.messagesOf(values.system, turns), seed, confidence });
  }

  // The request to copy: from the box, or, if it is empty, the last request.
  get copied() {
    return this.draft.trim() === "" && this.answer ? this.answer.request : this.request;
  }

  // Past turns, including the last answer.
  #settled() {
    const text = this.answer?.isChat ? (this.answer.choices[this.chosen]?.text ?? "") : "";
    return text === "" ? this.turns : [...this.turns, { role: "assistant", content: text }];
  }

  // How much of the model's context the prompt in the box takes; null while that is unknown.
  get room() {
    const { mode, draft, values, counted } = this;
    const wanted = Number(values.max_tokens) || 0;
    const about = { context: this.model?.context, system: values.system, turns: this.#settled(), wanted };
    return roomOf({ ...about, mode, draft, counted });
  }

  // The problems that disable Generate, by field, as text. Read in every frame, so computed only after a change.
  get problems() {
    const state = [this.values, this.mode, this.draft, this.model, this.turns, this.lacks];
    if (state.some((part, at) => part !== this.#judged.state[at])) this.#judged = { state, problems: this.#judge() };
    return this.#judged.problems;
  }

  #judge() {
    const problems = ask.problemsOf(this.values);
    const isFull = this.mode === "chat" && this.turns.length >= MOST_TURNS;
    if (!this.model) problems.prompt = this.lacks;
    else if (this.draft.trim() === "") problems.prompt = "Write a prompt first.";
    else if (isFull) problems.prompt = "This conversation is too long: begin a new one.";
    return problems;
  }

  generate() {
    if (this.isBusy || Object.keys(this.problems).length > 0) return;
    const { request } = this;
    this.turns = this.#settled();
    if (this.mode === "chat") {
      this.turns = [...this.turns, { role: "user", content: this.draft }];
      this.drafts.chat = "";
    }
    this.#ask(request);
  }

  // Repeat the same request with confidence: its seed reproduces the text.
  askForConfidence() {
    if (this.isBusy || !this.answer) return;
    this.wantsConfidence = true;
    this.#ask(ask.withConfidence(this.answer.request));
  }

  startAnew() {
    if (this.isBusy) return;
    const { turns, answer, chosen, counted } = this;
    const former = { turns, answer, chosen, counted };
    this.set({ turns: [], answer: null, chosen: 0, counted: null, notice: "", former });
  }

  // Return to the conversation that `startAnew` has put aside.
  goBack() {
    if (this.isBusy || this.former === null) return;
    this.set({ ...this.former, former: null, notice: "" });
  }

  // Put an example into the box.
  take(example) {
    if (this.isBusy) return;
    const { mode, prompt } = example;
    this.drafts = { ...this.drafts, [mode]: prompt };
    this.repeats = Boolean(example.isLong);
    this.set({ mode, values: valuesFor(example, this.values, this.model?.context), notice: "" });
  }

  #ask(request) {
    Object.assign(this, { chosen: 0, notice: "", isStopping: false, former: null, seed: ask.drawSeed() });
    this.answer = new Answer(request, this.#now());
    this.#read(this.answer);
    this.changed();
  }

  // --- reading

  // Read an answer to its end, over as many streams as necessary.
  async #read(answer) {
    while (!answer.isOver) {
      const problem = await this.#readOnce(answer);
      const wait_s = answer.broke(problem, this.#now());
      this.changed();
      if (wait_s !== null) await this.#sleep(wait_s);
    }
    this.#ended(answer);
  }

  // Read one stream to its end or break. Returns the gateway's error, or null for a break.
  async #readOnce(answer) {
    const reading = (this.#reading = new AbortController());
    let watch = setTimeout(() => reading.abort(), HEADERS_S * 1000);
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => reading.abort(), SILENT_S * 1000);
    };
    const onOpen = (response) => {
      heard();
      answer.opened(response.headers.get("x-request-id"), this.#now());
      this.#opened(answer);
    };
    const onEvent = (event) => {
      answer.take(event, this.#now());
      this.changed();
    };
    try {
      const [path, init] = wayTo(answer);
      await this.#api.stream(path, { ...init, onOpen, onEvent, onPiece: heard, signal: reading.signal });
      return null;
    } catch (error) {
      return problemOf(error);
    } finally {
      clearTimeout(watch);
    }
  }

  #opened(answer) {
    if (this.isStopping && answer === this.answer) this.#cancel(answer);
    this.save(); // from here on a reload can resume it
    this.changed();
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

  // A turn without an answer returns to the box.
  #ended(answer) {
    const isMute = answer.choices.every(({ text }) => text === "");
    if (answer === this.answer && answer.isChat && answer.state === "failed" && isMute) this.#takeTurnBack();
    if (answer === this.answer && answer.isChat && answer.usage)
      this.counted = countedOf(answer, this.chosen, this.#settled());
    // stop repeating while the page is hidden
    const isWanted = this.repeats && !this.isStopping && !globalThis.document?.hidden;
    this.isStopping = false;
    this.changed();
    this.save();
    if (answer === this.answer && answer.state === "ended" && isWanted) this.#again(answer.request);
  }

  #again({ path, body }) {
    this.#ask({ path, body: this.values.seed ? body : { ...body, seed: this.seed } });
  }

  #takeTurnBack() {
    const last = this.turns.at(-1);
    if (last?.role !== "user") return;
    this.turns = this.turns.slice(0, -1);
    this.drafts.chat ||= last.content;
  }

  // Read here again what another tab has taken over.
  takeBack() {
    if (this.answer?.state !== "elsewhere") return;
    this.answer.takenBack();
    this.#read(this.answer);
    this.changed();
  }

  // --- stopping

  // Closing the stream is not enough, since the answer is kept for a reader that reloads the page. So a cancel command
  // is sent.
  stop() {
    if (!this.isBusy || this.isStopping) return;
    this.set({ isStopping: true, notice: "" });
    if (this.answer.requestId) this.#cancel(this.answer);
    setTimeout((answer) => this.#letGo(answer), STOP_S * 1000, this.answer);
  }

  async #cancel(answer) {
    try {
      await this.#api.order("cancel", { request: answer.requestId });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (!answer.isOver)
        this.notice = `The swarm could not be stopped: ${error.message} It stops by itself within a minute.`;
      this.#letGo(answer);
    }
  }

  #letGo(answer) {
    if (answer.isOver) return;
    answer.stopped(this.#now());
    this.#reading?.abort();
    this.#wake();
    this.changed();
  }

  // --- storage

  save() {
    clearTimeout(this.#saving);
    this.#saving = 0;
    const began = this.#now();
    this.#store({ withPieces: true }) || this.#store({ withPieces: false }) || this.#forget();
    this.#saveTook = this.#now() - began;
  }

  #store(options) {
    const { mode, values, drafts, turns, chosen, counted, wantsConfidence, repeats } = this;
    const answer = this.answer?.kept(options) ?? null;
    const former = options.withPieces ? this.former : null;
    const kept = { mode, values, drafts, turns, chosen, counted, wantsConfidence, repeats, answer, former };
    try {
      this.#storage.setItem(KEPT, JSON.stringify(kept));
      return true;
    } catch (error) {
      if (error instanceof DOMException) return false; // no space, or storage is forbidden
      throw error;
    }
  }

  // No state is better than an outdated one, which would be resumed at the wrong place.
  #forget() {
    try {
      this.#storage.removeItem(KEPT);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error; // forbidden: there is nothing to forget
    }
  }

  #restore() {
    const kept = this.#stored();
    if (!kept) return;
    const { answer, ...rest } = kept;
    Object.assign(this, rest);
    if (this.former?.answer) this.former.answer = Answer.restored(this.former.answer);
    if (!answer) return;
    this.answer = Answer.restored(answer);
    if (!this.answer.isOver) this.#read(this.answer);
  }

  #stored() {
    try {
      return JSON.parse(this.#storage?.getItem(KEPT) ?? "null");
    } catch (error) {
      if (error instanceof DOMException || error instanceof SyntaxError) return null;
      throw error;
    }
  }
}

// The first time the request itself, later the stream after what was read.
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
