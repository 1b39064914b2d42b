// The shell: makes the store and what feeds it, and mounts each part of the page in its place.

import { Api, ApiError } from "./api.js";
import { askForKey } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { Live } from "./live.js";
import { Store } from "./store.js";
import { tabs } from "./widgets.js";

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
    const part = await import(path);
    part.mount(root, store, api);
  } catch (error) {
    fill(root, h("p", { class: "problem" }, `The part ${name} of this page could not be started: ${error.message}`));
    reportError(error);
  }
}

tabs(document.getElementById("tabs"));
Object.entries(PARTS).forEach(([name, path]) => mountPart(name, path));
store.subscribe(["connection"], ({ connection }) => {
  document.documentElement.dataset.connection = connection;
  if (connection === "live" || connection === "connecting") learnWhoLooks(); // another build may answer after a break
});
live.start();
setInterval(() => store.tick(Date.now() / 1000), 1000);
