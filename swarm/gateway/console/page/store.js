// State of the page: the swarm's view, the user (`me`), the connection, and the last events. Parts of the page
// subscribe by key and are called at most once per animation frame.

import { merge } from "./patch.js";
import { Series } from "./series.js";

const MOST_EVENTS = 500;
const SET_MS = 2000; // difference between two clocks that shows that one was set, or that the machine slept

export class Store {
  view = null;
  me = null;
  connection = "connecting"; // | live | reconnecting | paused | locked
  problem = ""; // why it cannot connect, as reported by the gateway
  heardAt = 0; // time of the gateway's last data, in seconds since 1970: the page shows the state at that time
  events = []; // oldest first
  series = new Series();
  #skew = 0; // seconds that the gateway's clock is ahead of this one
  #lead = Date.now() - performance.now();
  #subscribers = new Set();
  #dirty = new Set();
  #scheduled = false;
  #frame;

  constructor(frame = (draw) => requestAnimationFrame(draw)) {
    this.#frame = frame;
  }

  // The gateway is connected, and so is its broker.
  get isFresh() {
    return this.connection === "live" && this.view !== null && typeof this.view.away_s !== "number";
  }

  // Seconds since 1970 by the gateway's clock, which is the clock of all timestamps in the view.
  now() {
    return Date.now() / 1000 + this.#skew;
  }

  // Call `draw(store)` soon, and whenever one of the parts changes: keys of the view, or "me", "connection", "events",
  // "series". Returns a function that unsubscribes.
  subscribe(parts, draw) {
    const subscriber = { parts: new Set(parts), draw, isNew: true };
    this.#subscribers.add(subscriber);
    this.#schedule();
    return () => this.#subscribers.delete(subscriber);
  }

  replace({ series, ...view }) {
    const keys = new Set([...Object.keys(this.view ?? {}), ...Object.keys(view)]);
    this.view = view;
    if (view.at) this.#skew = view.at - Date.now() / 1000;
    this.events = []; // the gateway sends all remembered events after the snapshot
    if (series) this.series.replace(series);
    this.#touch(...keys, "series", "events");
  }

  // A patch without a snapshot throws SyntaxError, so that the reader requests a snapshot.
  patch(patch) {
    if (this.view === null) throw new SyntaxError("a delta came before any snapshot");
    this.view = merge(this.view, patch);
    this.#touch(...Object.keys(patch));
  }

  happened(events) {
    this.events = [...this.events, ...events].slice(-MOST_EVENTS);
    this.#touch("events");
  }

  setMe(me) {
    this.me = me;
    this.#touch("me");
  }

  setConnection(connection, problem = "") {
    if (connection === this.connection && problem === this.problem) return;
    Object.assign(this, { connection, problem });
    this.#touch("connection");
  }

  // Called once a second: charts advance even if an idle swarm sends nothing, and have a gap while the broker is away.
  // Returns whether the clock was set, since then only a snapshot can tell the gateway's time.
  tick() {
    const lead = Date.now() - performance.now();
    const isSet = Math.abs(lead - this.#lead) > SET_MS;
    this.#lead = lead;
    if (isSet) return ["live", "reconnecting"].includes(this.connection);
    if (this.connection !== "live" || !this.view) return;
    this.series.add(this.now(), this.isFresh ? (this.view.rates ?? {}) : {});
    this.#touch("series");
  }

  #touch(...parts) {
    for (const part of parts) this.#dirty.add(part);
    this.#schedule();
  }

  #schedule() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    this.#frame(() => this.#flush());
  }

  #flush() {
    this.#scheduled = false;
    const dirty = this.#dirty;
    this.#dirty = new Set();
    for (const subscriber of [...this.#subscribers]) {
      if (!subscriber.isNew && ![...subscriber.parts].some((part) => dirty.has(part))) continue;
      subscriber.isNew = false;
      guarded(() => subscriber.draw(this));
    }
  }
}

// A part that fails to draw must not stop the others; its error is reported like a script error.
function guarded(draw) {
  try {
    draw();
  } catch (error) {
    if (globalThis.reportError) globalThis.reportError(error);
    else throw error;
  }
}
