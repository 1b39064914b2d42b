// Entry point: creates the store and its data source, and mounts each part of the page.

import { Api, ApiError } from "./api.js";
import { askForKey } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { Live, waitAfter } from "./live.js";
import { shortcuts } from "./shortcuts.js";
import { Store } from "./store.js";
import { button, tabs } from "./widgets.js";

// Each exports `mount(root, store, api)`. One that fails shows its error in its own place, and the others work.
const PARTS = {
  header: "./header.js", conversations: "./conversations.js", turns: "./turns.js", answer: "./answer.js",
  prompt: "./prompt.js", rail: "./rail.js", stages: "./chain.js", recovery: "./recovery.js", charts: "./charts.js",
  workers: "./workers.js", events: "./events.js", requests: "./requests.js", timeline: "./timeline.js",
  plan: "./plan.js", logs: "./logs.js", clients: "./clients.js", keys: "./keys.js",
};

const MOST_TRIES = 8; // attempts to load a part, over about ten seconds

const store = new Store();
const api = new Api();
const live = new Live(api, store);

api.onRefused = (words) =>
  askForKey(api, words, () => {
    learnWhoLooks();
    live.again();
  });

async function learnWhoLooks() {
  try {
    store.setMe(await api.get("/console/me"));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // no answer: retried once the connection is live
  }
}

async function mountPart(name, path) {
  const root = document.getElementById(name);
  try {
    const part = await loaded(path);
    part.mount(root, store, api);
  } catch (error) {
    const words = `The part ${name} of this page could not be started: ${error.message}`;
    fill(root, h("p", { class: "problem" }, words), button("Load the page again", () => location.reload()));
    reportError(error);
  }
}

// The gateway may just have restarted. A browser caches a failed import, so each retry uses a different address.
async function loaded(path) {
  for (let failures = 0; ; failures += 1) {
    try {
      return await import(failures === 0 ? path : `${path}?again=${failures}`);
    } catch (error) {
      if (failures + 1 >= MOST_TRIES || error instanceof SyntaxError) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, waitAfter(failures, Math.random()) * 1000));
  }
}

const opened = tabs(document.getElementById("tabs"));
addEventListener("trace", () => opened.open("requests")); // before the timeline shows it
shortcuts(opened);
Object.entries(PARTS).forEach(([name, path]) => mountPart(name, path));
store.subscribe(["connection"], ({ connection }) => {
  document.documentElement.dataset.connection = connection;
  // after a reconnect, another build may answer
  if (connection === "live" || connection === "connecting") learnWhoLooks();
});
live.start();
setInterval(() => store.tick() && live.again(), 1000);
