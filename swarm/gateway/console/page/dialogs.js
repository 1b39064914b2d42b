// Confirmation dialogs, the key dialog, and notifications at the edge of the page.

import { fill, h, unique } from "./dom.js";
import { button } from "./widgets.js";

const NEWS_S = 8;
const SOON_S = 0.3; // seconds; a command that takes longer shows a notification meanwhile
const MOST_NEWS = 4;

// Resolves to true for "Yes, …". Escape and the backdrop mean no, and No has the focus.
export function ask({ title, words = "", yes, isGrave = true, more = [] }) {
  const id = unique("ask");
  const dialog = h("dialog", { "aria-labelledby": id, class: "ask" });
  const no = button("No", () => dialog.close("no"));
  const go = button(yes, () => dialog.close("yes"), { tone: isGrave ? "danger" : "primary" });
  fill(
    dialog, h("h2", { id }, title), words ? h("p", {}, words) : null, ...more, h("div", { class: "actions" }, no, go),
  );
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog && isOutside(dialog, event)) dialog.close("no");
  });
  return opened(dialog, no).then(() => dialog.returnValue === "yes");
}

function isOutside(dialog, { clientX, clientY }) {
  const box = dialog.getBoundingClientRect();
  return clientX < box.left || clientX > box.right || clientY < box.top || clientY > box.bottom;
}

export function opened(dialog, focused) {
  document.body.append(dialog);
  dialog.showModal();
  focused?.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
  });
}

// A notification, which screen readers announce. Errors stay until they are closed. Returns a function that removes it.
export function say(words, { isError = false, isLasting = isError } = {}) {
  const place = document.getElementById("news") ?? document.body.appendChild(h("div", { id: "news", class: "news" }));
  const note = h(
    "div", { class: isError ? "note error" : "note", role: isError ? "alert" : "status" }, h("p", {}, words),
  );
  note.append(button("Close", () => note.remove(), { tone: "quiet" }));
  place.append(note);
  while (place.childElementCount > MOST_NEWS) place.firstElementChild.remove();
  if (!isLasting) setTimeout(() => note.remove(), NEWS_S * 1000);
  return () => note.remove();
}

// A null `question` needs no confirmation. Returns the answer, or null.
export async function orderAfter(api, question, verb, body = {}) {
  if (question && !(await ask(question))) return null;
  let takeAway = () => {};
  const soon = setTimeout(() => (takeAway = say(underWay(verb, body), { isLasting: true })), SOON_S * 1000);
  try {
    const answer = await api.order(verb, body);
    say(told(answer));
    return answer;
  } catch (error) {
    if (error.name !== "ApiError") throw error;
    say(error.message, { isError: true });
    return null;
  } finally {
    clearTimeout(soon);
    takeAway();
  }
}

function underWay(verb, { worker = "", request = "" }) {
  const words = [verb.charAt(0).toUpperCase() + verb.slice(1), worker || request.slice(0, 8), "…"];
  return words.filter(Boolean).join(" ");
}

export const told = ({ text, body }) =>
  [`${text || "Done"}.`, body?.lasts ? `It lasts ${body.lasts}.` : ""]
    .join(" ")
    .replaceAll("..", ".")
    .trim()
    .replace(/^(a|the) (?=[a-z])/, (word) => word[0].toUpperCase() + word.slice(1));

let keyDialog = null;

export function askForKey(api, words, onKey) {
  if (keyDialog) return;
  const input = h("input", {
    type: "password", name: "key", autocomplete: "off", spellcheck: "false", required: true, id: unique("key"),
  });
  const problem = h("p", { class: "problem", role: "alert" }, words);
  const id = unique("key-title");
  const dialog = h("dialog", { class: "ask", "aria-labelledby": id });
  const form = h("form", { method: "dialog" });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) dialog.close("key");
  });
  fill(
    form,
    h("h2", { id }, "This gateway needs a key"),
    h(
      "p", {}, "A key that ", h("code", {}, "swarmctl keys add"),
      " has printed. It stays in this tab and is sent with each request, never in an address.",
    ),
    h("div", { class: "field wide" }, h("label", { for: input.id }, "Key"), input),
    words ? problem : null,
    h("div", { class: "actions" }, h("button", { class: "primary", type: "submit" }, "Use this key")),
  );
  dialog.append(form);
  keyDialog = dialog;
  opened(dialog, input).then(() => {
    keyDialog = null;
    if (dialog.returnValue !== "key") return;
    api.setKey(input.value);
    onKey();
  });
}
