// Buttons that copy a text and report whether it worked.

import { say } from "./dialogs.js";
import { set, text } from "./dom.js";
import { button } from "./widgets.js";

const SAID_S = 2;

// `make()` returns the text. `label`: the accessible name, if the button shows less.
export function copier(words, make, label = words) {
  let timer = 0;
  const copy = async () => {
    if (!(await copied(make())))
      return say("The browser does not let this page copy: select the text and copy it by hand.", { isError: true });
    show("Copied", "Copied");
    clearTimeout(timer);
    timer = setTimeout(() => show(words, label), SAID_S * 1000);
  };
  const element = button(words, copy, { tone: "quiet small", "aria-label": label });
  const show = (seen, heard) => set(text(element, seen), { "aria-label": heard });
  return element;
}

// Browsers have a clipboard only on this machine or over TLS.
async function copied(words) {
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(words);
      return true;
    }
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // not allowed
  }
  return copiedBySelection(words);
}

function copiedBySelection(words) {
  const area = document.createElement("textarea");
  area.value = words;
  area.className = "unseen";
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}
