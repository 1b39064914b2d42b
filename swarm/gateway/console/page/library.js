// Conversations kept in this browser: stored in IndexedDB, within bounds, and exchanged as files. Draws nothing.

import { titleOf, pathOf, MOST_NODES } from "./thread.js";

const NAME = "swarm";
const STORE = "conversations";
const FORMAT = "swarm-conversations";
export const MOST_KEPT = 300; // conversations; the oldest go first
export const MOST_CHARACTERS = 2_000_000; // of one conversation; a longer one is not kept
export const MOST_FILE = 64 * 1024 * 1024; // bytes of a file
const LONGEST_NAME = 200;

// `onChange(library)`: called when the list changes, here or in another tab.
export class Library {
  records = []; // latest first
  problem = ""; // why nothing can be kept, as text
  onChange = () => {};
  #database = null;
  #channel;

  constructor({ indexedDb = globalThis.indexedDB, channel = otherTabs() } = {}) {
    this.#channel = channel;
    if (channel) channel.onmessage = () => this.read();
    this.#database = indexedDb ? opened(indexedDb) : Promise.reject(new Error("this browser keeps nothing"));
    this.#database.catch((error) => this.#failed(error));
  }

  async read() {
    await this.#run("readonly", (store) => store.getAll(), (records) => (this.records = inOrder(records)));
    this.onChange(this);
  }

  async keep(record) {
    if (sizeOf(record) > MOST_CHARACTERS) return this.#failed(new Error("this conversation is too long to be kept"));
    const others = this.records.filter(({ id }) => id !== record.id);
    const [kept, dropped] = [others.slice(0, MOST_KEPT - 1), others.slice(MOST_KEPT - 1)];
    this.records = inOrder([record, ...kept]);
    return this.#change((store) => {
      dropped.forEach(({ id }) => store.delete(id));
      return store.put(record);
    });
  }

  async remove(id) {
    this.records = this.records.filter((record) => record.id !== id);
    return this.#change((store) => store.delete(id));
  }

  async rename(id, name) {
    const record = this.records.find((one) => one.id === id);
    if (record) await this.keep({ ...record, name: name.slice(0, LONGEST_NAME), isNamed: true });
  }

  // Conversations that are here already, by their id, get a new one.
  async add(records, newId) {
    const known = new Set(this.records.map(({ id }) => id));
    const fresh = records.map((record) => (known.has(record.id) ? { ...record, id: newId() } : record));
    for (const record of fresh) await this.keep(record);
    return fresh.length;
  }

  async #change(act) {
    this.onChange(this);
    await this.#run("readwrite", act);
    this.#channel?.postMessage("changed");
  }

  async #run(mode, act, onDone = () => {}) {
    try {
      const store = (await this.#database).transaction(STORE, mode).objectStore(STORE);
      onDone(await done(act(store)));
      this.problem = "";
    } catch (error) {
      this.#failed(error);
    }
  }

  #failed(error) {
    this.problem = `Conversations are not kept: ${error.message || error.name}.`;
    this.onChange(this);
  }
}

const otherTabs = () => (globalThis.BroadcastChannel ? new BroadcastChannel("swarm.conversations") : null);

function opened(indexedDb) {
  const request = indexedDb.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return done(request);
}

const done = (request) =>
  new Promise((resolve, refuse) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => refuse(request.error);
  });

const inOrder = (records) => [...records].sort((one, other) => other.at - one.at);

const sizeOf = ({ thread }) =>
  Object.values(thread.turns).reduce((sum, { content, thought = "" }) => sum + content.length + thought.length, 0);

export function found(records, words) {
  const wanted = words.trim().toLowerCase();
  if (wanted === "") return records;
  const has = (text) => text.toLowerCase().includes(wanted);
  const textsOf = ({ name, thread }) => [name, ...Object.values(thread.turns).map(({ content }) => content)];
  return records.filter((record) => textsOf(record).some(has));
}

export const exported = (records) =>
  JSON.stringify({ format: FORMAT, version: 1, conversations: records.slice(0, MOST_KEPT) }, null, 1);

// Returns {records}, or {problem} as text.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return { problem: "This file is not JSON: choose one that this page has exported." };
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations))
    return { problem: "This file has no conversations: choose one that this page has exported." };
  if (file.conversations.length > MOST_KEPT) return { problem: `This file has more than ${MOST_KEPT} conversations.` };
  const records = file.conversations.map(checked);
  const bad = records.indexOf(null);
  return bad < 0 ? { records } : { problem: `Conversation ${bad + 1} of this file is damaged: nothing was imported.` };
}

// Only known fields; null without a sound tree.
function checked(record) {
  const { id, name, isNamed, mode, at, thread } = record ?? {};
  if (typeof id !== "string" || !/^[0-9a-f]{1,32}$/.test(id) || !Number.isFinite(at)) return null;
  if (typeof name !== "string" || !["chat", "raw"].includes(mode)) return null;
  const sound = soundThread(thread);
  if (sound === null || sizeOf({ thread: sound }) > MOST_CHARACTERS) return null;
  const shown = isNamed === true ? name.slice(0, LONGEST_NAME) : titleOf(pathOf(sound));
  return { id, name: shown, isNamed: isNamed === true, mode, at, thread: sound };
}

function soundThread(thread) {
  const rows = Object.values(thread?.turns ?? {});
  if (rows.length === 0 || rows.length > MOST_NODES) return null;
  const turns = {};
  // parents come before their children, so a tree has no circle
  for (const row of rows) {
    const { id, parent, role, content, thought = "", facts = "", isRaw, isPlain } = row ?? {};
    const isNumbered = Number.isInteger(id) && id > 0 && Number.isInteger(parent) && (parent === 0 || parent in turns);
    if (!isNumbered || id in turns || parent >= id || !["user", "assistant"].includes(role)) return null;
    if ([content, thought, facts].some((words) => typeof words !== "string")) return null;
    turns[id] = { id, parent, role, content, thought, facts, isRaw: isRaw === true, isPlain: isPlain === true };
  }
  const picks = {};
  for (const [parent, child] of Object.entries(thread.picks ?? {}))
    if (turns[child]?.parent === Number(parent)) picks[parent] = child;
  return { turns, picks, next: Math.max(...Object.keys(turns).map(Number)) + 1 };
}
