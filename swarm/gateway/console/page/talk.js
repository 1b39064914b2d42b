// The conversation and the answer in progress. Kept in sessionStorage, so that a reload continues, and each tab has its
// own; library.js keeps it for later. Draws nothing.

import { ApiError } from "./api.js";
import * as ask from "./ask.js";
import { valuesFor } from "./examples.js";
import { settledIn } from "./facts.js";
import { forget, keep, recall } from "./keeping.js";
import { Answer, answeredIn } from "./reading.js";
import { countedOf, roomOf } from "./room.js";
import { AnswerReader } from "./stream.js";
import * as tree from "./thread.js";

const KEPT = "swarm.talk";
const SAVE_S = 2; // seconds between two saves while tokens arrive; leaving the page saves immediately
const SAVE_SHARE = 50; // a long answer takes longer to save, so it is saved less often
const SLOW_MS = 16; // a slower drawing, as of thousands of tokens, is followed by a pause of twice its time
const STOP_S = 3; // seconds from the cancel command to the end of the stream

const talks = new WeakMap();

export function talkOf(store, api) {
  if (!talks.has(store)) talks.set(store, new Talk(api));
  return talks.get(store);
}

export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Talk {
  mode = "chat";
  values = { ...ask.DEFAULTS };
  drafts = { chat: "", raw: "" };
  id = newId(); // of the conversation
  name = ""; // given by the user
  thread = tree.newThread();
  editing = 0; // the turn that the prompt in the box replaces
  answer = null; // the last turn's, until something else is asked
  chosen = 0; // the continuation with which the conversation continues
  counted = null; // length of the conversation from the last answer's usage report
  exact = null; // {of, tokens}: the length of exactly this request, as the gateway counts it
  model = null; // {id, chat, context} once known
  models = []; // all that are served
  lacks = ""; // why there is no model, as text
  wantsConfidence = false;
  repeats = false; // repeats the request whenever an answer ends, until Stop
  isStopping = false;
  notice = ""; // what could not be done, as text
  seed = ask.drawSeed(); // of the next request, if none is given, so that a copied request has the same answer
  onKeep = () => {}; // called with the conversation when it is worth keeping
  #api;
  #storage;
  #now;
  #reader;
  #subscribers = new Set();
  #isScheduled = false;
  #saving = 0;
  #saveTook = 0;
  #drawTook = 0;
  #judged = { state: [], problems: {} };
  #path = { of: null, turns: [] };

  constructor(api, { storage = globalThis.sessionStorage, now = () => Date.now() } = {}) {
    this.#api = api;
    this.#storage = storage;
    this.#now = now;
    this.#reader = new AnswerReader(api, now, {
      onOpen: (answer) => this.#opened(answer), onChange: () => this.changed(),
    });
    this.#restore();
    globalThis.addEventListener?.("pagehide", () => this.save());
    globalThis.addEventListener?.("online", () => this.#reader.hurry());
  }

  // Draws soon, and after changes; at most once per frame.
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

  get turns() {
    if (this.#path.of !== this.thread) this.#path = { of: this.thread, turns: tree.pathOf(this.thread) };
    return this.#path.turns;
  }

  set(fields) {
    Object.assign(this, fields);
    this.changed();
  }

  get request() {
    const past = this.#past();
    return this.#requestOf(past, { role: "user", content: this.draft, isRaw: this.mode === "raw" });
  }

  #requestOf(past, turn) {
    const { values, seed, wantsConfidence: confidence } = this;
    const about = { mode: turn.isRaw ? "raw" : "chat", values, model: this.model?.id ?? "", seed, confidence };
    if (turn.isRaw) return ask.requestOf({ ...about, prompt: turn.content });
    return ask.requestOf({ ...about, messages: ask.messagesOf(values.system, [...tree.chatOf(past), turn]) });
  }

  // The request to copy: from the box, or, if it is empty, the last request.
  get copied() {
    return this.draft.trim() === "" && this.answer ? this.answer.request : this.request;
  }

  // The turns before the prompt in the box, including the last answer.
  #past() {
    const at = this.turns.findIndex(({ id }) => id === this.editing);
    if (at >= 0) return this.turns.slice(0, at);
    const content = this.answer ? answeredIn(this.answer.choices[this.chosen] ?? { text: "" }) : "";
    return content === "" ? this.turns : [...this.turns, { role: "assistant", content, isRaw: !this.answer.isChat }];
  }

  // How much of the model's context the prompt in the box takes; null while that is unknown.
  get room() {
    const { mode, draft, values, counted } = this;
    const exact = this.exact !== null && isSame(this.exact.of, this.counting) ? this.exact.tokens : null;
    const wanted = Number(values.max_tokens) || 0;
    const about = { context: this.model?.context, system: values.system, turns: tree.chatOf(this.#past()), wanted };
    return roomOf({ ...about, mode, draft, counted, exact });
  }

  // All on which the length of the request depends.
  get counting() {
    const { mode, draft, values, model, thread, answer, chosen, editing } = this;
    return mode === "raw" ? [mode, model, draft] : [mode, model, draft, values.system, thread, answer, chosen, editing];
  }

  // The problems that disable Send, by field, as text. Read in every frame, so computed only after a change.
  get problems() {
    const state = [this.values, this.mode, this.draft, this.model, this.turns, this.lacks];
    if (!isSame(state, this.#judged.state)) this.#judged = { state, problems: this.#judge() };
    return this.#judged.problems;
  }

  #judge() {
    const problems = ask.problemsOf(this.values);
    if (!this.model) problems.prompt = this.lacks;
    else if (this.draft.trim() === "") problems.prompt = "Write a prompt first.";
    else if (this.#isFull) problems.prompt = "This conversation is too long: begin a new one.";
    return problems;
  }

  get #isFull() {
    return this.turns.length >= tree.MOST_TURNS || Object.keys(this.thread.turns).length >= tree.MOST_NODES;
  }

  generate() {
    if (this.isBusy || Object.keys(this.problems).length > 0) return;
    const { request, mode, editing } = this;
    this.#settle();
    const turn = { role: "user", content: this.draft, isRaw: mode === "raw" };
    const parent = this.thread.turns[editing]?.parent ?? tree.endOf(this.thread);
    this.thread = tree.added(this.thread, turn, parent);
    this.drafts = { ...this.drafts, [mode]: "" };
    this.#ask(request);
  }

  // Beside an answer that is there: a settled turn, or the last answer.
  retry(turn = null) {
    if (this.isBusy || !this.model) return;
    const parent = this.thread.turns[turn?.parent ?? tree.endOf(this.thread)];
    if (!parent) return;
    this.#settle();
    this.thread = tree.endedAt(this.thread, parent.id);
    this.#ask(this.#requestOf(this.turns.slice(0, -1), parent));
  }

  // Repeat the same request with confidence: its seed reproduces the text.
  askForConfidence() {
    if (this.isBusy || !this.answer) return;
    this.wantsConfidence = true;
    this.#ask(ask.withConfidence(this.answer.request));
  }

  take(example) {
    if (this.isBusy) return;
    const { mode, prompt } = example;
    this.drafts = { ...this.drafts, [mode]: prompt };
    this.repeats = Boolean(example.isLong);
    this.set({ mode, values: valuesFor(example, this.values, this.model?.context), notice: "", editing: 0 });
  }

  #ask(request) {
    const state = { chosen: 0, notice: "", isStopping: false, editing: 0, seed: ask.drawSeed() };
    this.set({ ...state, answer: new Answer(request, this.#now()) });
    this.#read(this.answer);
  }

  #settle() {
    if (this.answer === null) return;
    this.thread = this.#settled();
    Object.assign(this, { answer: null, chosen: 0 });
  }

  #settled() {
    const { thread, answer, chosen, model } = this;
    return answer === null ? thread : settledIn(thread, answer, chosen, model?.context);
  }

  get record() {
    const thread = this.#settled();
    const { id, name, mode } = this;
    return { id, name: name || tree.titleOf(tree.pathOf(thread)), isNamed: name !== "", mode, thread, at: this.#now() };
  }

  startAnew() {
    if (this.isBusy) return;
    this.#open({ id: newId(), name: "", thread: tree.newThread() });
  }

  open({ id, name, isNamed, mode, thread }) {
    if (this.isBusy || id === this.id) return;
    this.#open({ id, name: isNamed ? name : "", thread, mode: this.model?.chat === false ? "raw" : mode });
  }

  #open(fields) {
    this.set({ answer: null, chosen: 0, counted: null, notice: "", editing: 0, repeats: false, ...fields });
  }

  // The new conversation ends with this turn, or with the last answer.
  branch(turn = null) {
    if (this.isBusy) return;
    const thread = this.#settled();
    const name = this.name ? `${this.name} (branch)` : "";
    this.#open({ id: newId(), name, thread: tree.copiedUpTo(thread, turn?.id ?? tree.endOf(thread)) });
    this.onKeep(this.record);
  }

  show(turn) {
    if (this.isBusy) return;
    this.#settle();
    this.set({ thread: tree.picked(this.thread, turn), counted: null, editing: 0 });
    this.onKeep(this.record);
  }

  edit(turn) {
    if (this.isBusy) return;
    const mode = turn.isRaw ? "raw" : "chat";
    this.set({ mode, editing: turn.id, drafts: { ...this.drafts, [mode]: turn.content }, notice: "" });
  }

  stopEditing() {
    this.set({ editing: 0, drafts: { ...this.drafts, [this.mode]: "" } });
  }

  async #read(answer) {
    await this.#reader.read(answer);
    this.#ended(answer);
  }

  #opened(answer) {
    if (this.isStopping && answer === this.answer) this.#cancel(answer);
    this.save(); // from here on a reload can resume it
    this.changed();
  }

  #ended(answer) {
    if (answer === this.answer) {
      const isMute = answer.choices.every(({ text }) => text === "");
      if (answer.state === "failed" && isMute) this.#takeBack(answer);
      else if (answer.isChat && answer.usage) this.counted = countedOf(answer, this.chosen, tree.chatOf(this.#past()));
    }
    // stop repeating while the page is hidden
    const isWanted = this.repeats && !this.isStopping && !globalThis.document?.hidden;
    this.isStopping = false;
    this.changed();
    this.save();
    if (this.turns.length > 0) this.onKeep(this.record);
    if (answer === this.answer && answer.state === "ended" && isWanted) this.#again(answer.request);
  }

  #again({ path, body }) {
    this.#ask({ path, body: this.values.seed ? body : { ...body, seed: this.seed } });
  }

  // A turn without an answer returns to the box, with the reason; one that had an answer shows it again.
  #takeBack({ words }) {
    const last = this.turns.at(-1);
    Object.assign(this, { answer: null, notice: words });
    if (last === undefined) return;
    const thread = tree.continuedFrom(this.thread, last.id);
    if (tree.endOf(thread) !== last.id) return void (this.thread = thread);
    this.thread = tree.removed(this.thread, last);
    this.drafts[last.isRaw ? "raw" : "chat"] ||= last.content;
    return undefined;
  }

  takeBack() {
    if (this.answer?.state !== "elsewhere") return;
    this.answer.takenBack();
    this.#read(this.answer);
    this.changed();
  }

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
    this.#reader.letGo();
    this.changed();
  }

  save() {
    clearTimeout(this.#saving);
    this.#saving = 0;
    const began = this.#now();
    const { mode, values, drafts, id, name, thread, chosen, counted, wantsConfidence, repeats } = this;
    const kept = { mode, values, drafts, id, name, thread, chosen, counted, wantsConfidence, repeats };
    // No state is better than an outdated one, which would be resumed at the wrong place.
    [true, false].some((withPieces) =>
      keep(this.#storage, KEPT, { ...kept, answer: this.answer?.kept({ withPieces }) ?? null }),
    ) || forget(this.#storage, KEPT);
    this.#saveTook = this.#now() - began;
  }

  #restore() {
    const kept = recall(this.#storage, KEPT);
    if (!kept?.thread) return; // none, or written by an older page
    const { answer, ...rest } = kept;
    Object.assign(this, rest);
    if (!answer) return;
    this.answer = Answer.restored(answer);
    if (!this.answer.isOver) this.#read(this.answer);
  }
}

const isSame = (one, other) => one.length === other.length && one.every((part, at) => part === other[at]);
