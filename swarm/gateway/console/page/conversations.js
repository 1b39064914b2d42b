// The conversations kept in this browser: list, search, rename, delete, export and import.

import { ask, say } from "./dialogs.js";
import { fill, h, keyed, set, text } from "./dom.js";
import { fileButton } from "./file_drop.js";
import { Library, MOST_FILE, exported, found, imported } from "./library.js";
import { newId, talkOf } from "./talk.js";
import { button, field } from "./widgets.js";

const MOST_SHOWN = 100;
const DAY_S = 86_400;

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  const library = new Library();
  const anew = button("New", () => talk.startAnew(), { tone: "small" });
  anew.append(h("span", { class: "long" }, " conversation"));
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations" });
  const list = h("ol", { class: "kept" });
  const nothing = h("p", { class: "hint" });
  const problem = h("p", { class: "problem hint", role: "status" });
  const toggle = opener(root);
  fill(
    root, h("div", { class: "conversations-head" }, anew, toggle.button),
    h("div", { class: "conversations-body" }, search, nothing, list, problem, filesOf(library)),
  );

  const draw = () => {
    const shown = found(library.records, search.value).slice(0, MOST_SHOWN);
    text(nothing, library.records.length === 0 ? "Conversations are kept here, in this browser." : "No match.");
    nothing.hidden = shown.length > 0;
    text(problem, library.problem).hidden = library.problem === "";
    keyed(list, shown, ({ id }) => id, () => rowOf(talk, library, toggle), (row, record) => row.draw(record));
    drawTalk();
  };
  const drawTalk = () => {
    set(anew, { disabled: talk.isBusy });
    for (const row of list.children) row.drawTalk();
  };
  library.onChange = draw;
  talk.onKeep = (record) => library.keep(record);
  talk.subscribe(drawTalk);
  search.addEventListener("input", draw);
  search.addEventListener("keydown", ({ key }) => {
    const first = list.querySelector("button.kept-name");
    if (key === "Enter" || key === "ArrowDown") first?.focus();
    if (key === "Enter") first?.click();
  });
  addEventListener("find", () => {
    toggle.open(true);
    search.focus();
    search.select();
  });
  library.read();
}

function opener(root) {
  const toggle = button("History", () => open(!("open" in root.dataset)), {
    tone: "quiet small conversations-toggle", "aria-expanded": "false",
  });
  const open = (isOpen) => {
    root.toggleAttribute("data-open", isOpen);
    set(toggle, { "aria-expanded": String(isOpen) });
  };
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !("open" in root.dataset)) return;
    event.preventDefault();
    open(false);
    toggle.focus();
  });
  return { button: toggle, open };
}

function rowOf(talk, library, toggle) {
  let record = null;
  const name = h("span", { class: "kept-title", dir: "auto" });
  const time = h("time", { class: "quiet-words" });
  const open = button("", () => {
    talk.open(record);
    toggle.open(false);
  }, { tone: "quiet kept-name" });
  open.append(name, time);
  const rename = button("Rename", () => renamed(talk, library, record), { tone: "quiet small" });
  const remove = button("Delete", () => removed(talk, library, record), { tone: "quiet small" });
  const save = button("Export", () => download([record]), { tone: "quiet small" });
  const summary = h("summary", {}, h("span", { "aria-hidden": "true" }, "⋯"));
  const more = h("details", { class: "kept-more" }, summary, h("div", { class: "actions" }, rename, save, remove));
  more.addEventListener("click", ({ target }) => target.matches("button") && (more.open = false));
  const element = h("li", {}, open, more);
  element.draw = (now) => {
    record = now;
    text(name, now.name);
    text(time, whenWords(now.at / 1000, Date.now() / 1000));
    set(summary, { "aria-label": `More for ${now.name}` });
  };
  element.drawTalk = () => {
    const isOpen = record.id === talk.id;
    set(element, { "data-open": isOpen });
    set(open, { "aria-current": isOpen ? "true" : null, disabled: talk.isBusy && !isOpen });
    set(remove, { disabled: talk.isBusy && isOpen });
  };
  return element;
}

function whenWords(at, now) {
  const date = new Date(at * 1000);
  if (now - at < DAY_S) return date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

async function renamed(talk, library, { id, name }) {
  const input = h("input", { value: name, maxlength: 200 });
  const more = [field("Name", input)];
  if (!(await ask({ title: "Rename this conversation", yes: "Rename", isGrave: false, more }))) return;
  const now = input.value.trim();
  if (now === "") return;
  await library.rename(id, now);
  if (id === talk.id) talk.set({ name: now });
}

async function removed(talk, library, { id, name }) {
  const words = "It is deleted from this browser. The swarm keeps no conversations.";
  if (!(await ask({ title: `Delete “${name}”?`, words, yes: "Yes, delete it" }))) return;
  if (id === talk.id) talk.startAnew();
  await library.remove(id);
}

function filesOf(library) {
  const title = "Read a file that was exported here";
  const load = fileButton("Import", title, ".json", ([file]) => file && take(library, file));
  const save = button("Export all", () => download(library.records), { tone: "quiet small" });
  return h("div", { class: "actions conversations-files" }, save, load);
}

async function take(library, file) {
  const { problem, records } =
    file.size > MOST_FILE ? { problem: `${file.name} is too large.` } : imported(await file.text());
  if (problem) return say(problem, { isError: true });
  const num = await library.add(records, newId);
  return say(num === 1 ? "1 conversation was imported." : `${num} conversations were imported.`);
}

function download(records) {
  const url = URL.createObjectURL(new Blob([exported(records)], { type: "application/json" }));
  const link = h("a", { href: url, download: "swarm-conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
