// The shell: makes the store and what feeds it, and mounts each part of the page in its place.

import { Api, ApiError } from "./api.js";
import { askForKey } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { Live, waitAfter } from "./live.js";
import { Store } from "./store.js";
import { button, tabs } from "./widgets.js";

// Each module exports `mount(root, store, api)`. One that fails leaves the others alone and says so in its place.
const PARTS = {
  header: "./header.js",
  stages: "./chain.js",
  prompt: "./prompt.js",
  answer: "./answer.js",
  timeline: "./timeline.js",
  recovery: "./recovery.js",
  charts: "./charts.js",
  events: "./events.js",
  workers: "./workers.js",
  requests: "./requests.js",
  plan: "./plan.js",
  logs: "./logs.js",
  keys: "./keys.js",
  clients: "./clients.js",
};

const MOST_TRIES = 8; // to load a part: some ten seconds

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
    if (!(error instanceof ApiError)) throw error; // nobody answers: asked again once the connection is live
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

// The gateway may have gone just now. A browser keeps in mind that an address could not be loaded, so another is asked.
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

tabs(document.getElementById("tabs"));
Object.entries(PARTS).forEach(([name, path]) => mountPart(name, path));
store.subscribe(["connection"], ({ connection }) => {
  document.documentElement.dataset.connection = connection;
  if (connection === "live" || connection === "connecting") learnWhoLooks(); // another build may answer after a break
});
live.start();
setInterval(() => store.tick() && live.again(), 1000);
