// Keys of the whole page, and the list of them.

import { opened } from "./dialogs.js";
import { h, unique } from "./dom.js";
import { button } from "./widgets.js";

const KEYS = [
  ["Enter", "Send the prompt"], ["Shift Enter", "Begin a new line"], ["/", "Go to the prompt"],
  ["Ctrl K", "Find a conversation"], ["Esc", "Close what is open; in the prompt, stop the answer"],
  ["←  →", "Next tab, next token, next alternative, where the focus is"], ["?", "Show these keys"],
];

export function shortcuts(tabs) {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const isCommand = event.ctrlKey || event.metaKey;
    if (isCommand && event.key.toLowerCase() === "k" && !event.shiftKey && !event.altKey) find(event, tabs);
    else if (isCommand || event.altKey || isTyping(event.target)) return;
    else if (event.key === "?") show(event);
    else if (event.key === "/") write(event, tabs);
  });
}

const isTyping = (element) => element.matches("input, textarea, select, [contenteditable]");

function find(event, tabs) {
  event.preventDefault();
  tabs.open("chat");
  dispatchEvent(new Event("find"));
}

function write(event, tabs) {
  event.preventDefault();
  tabs.open("chat");
  document.querySelector("#prompt textarea.prompt-box")?.focus();
}

function show(event) {
  event.preventDefault();
  const id = unique("keys");
  const dialog = h("dialog", { class: "ask", "aria-labelledby": id });
  const close = button("Close", () => dialog.close());
  const rows = KEYS.flatMap(([keys, words]) => [
    h("dt", {}, keys.split(" ").filter(Boolean).map((key) => h("kbd", {}, key))), h("dd", {}, words),
  ]);
  dialog.append(h("h2", { id }, "Keys"), h("dl", { class: "shortcuts" }, rows), h("div", { class: "actions" }, close));
  opened(dialog, close);
}
