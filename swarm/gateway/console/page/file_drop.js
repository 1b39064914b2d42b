// Text of files, dropped onto the chat or chosen, into the prompt.

import { h } from "./dom.js";
import { button } from "./widgets.js";

export const MOST_BYTES = 1_000_000; // of one file
const MOST_FILES = 10;

export function fileDrop(talk, place, onTaken) {
  const take = async (files) => {
    const taken = await Promise.all([...files].slice(0, MOST_FILES).map(readFile));
    const problem = taken.find((one) => one.problem)?.problem ?? "";
    const words = taken.filter((one) => !one.problem).map(quotedFile);
    const draft = [talk.draft.trimEnd(), ...words].filter(Boolean).join("\n\n");
    talk.set({ drafts: { ...talk.drafts, [talk.mode]: draft }, notice: problem });
    onTaken();
  };
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  place.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    place.dataset.drop = "";
  });
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) delete place.dataset.drop;
  });
  place.addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    delete place.dataset.drop;
    take(event.dataTransfer.files);
  });
  const add = fileButton("Add file", "Or drop files onto this page", null, take);
  return { button: add, draw: () => void (add.disabled = talk.isBusy) };
}

// `accept`: the kind of files, or null for several of any kind.
export function fileButton(words, title, accept, take) {
  const input = h("input", { type: "file", accept, multiple: accept === null, hidden: true });
  const element = button(words, () => input.click(), { tone: "quiet small", title });
  input.addEventListener("click", (event) => event.stopPropagation()); // it is within the button
  input.addEventListener("change", async () => {
    await take(input.files);
    input.value = "";
  });
  element.append(input);
  return element;
}

async function readFile(file) {
  if (file.size > MOST_BYTES) return { problem: `${file.name} is larger than ${MOST_BYTES / 1e6} MB.` };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) return { problem: `${file.name} is not a text.` };
    return { name: file.name, text };
  } catch (error) {
    if (error instanceof TypeError) return { problem: `${file.name} is not a text in UTF-8.` };
    if (error instanceof DOMException) return { problem: `${file.name} could not be read: ${error.message}` };
    throw error;
  }
}

// The file's text stands between fences that it does not contain.
export function quotedFile({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`{3,}/g), ([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
