// Header of the page (model, state, speed, connection) and its footer.

import { fill, h, set, svg, text } from "./dom.js";
import { clock, duration, rate } from "./format.js";
import { askForKey } from "./dialogs.js";
import { badge, button, setBadge } from "./widgets.js";

const SPEED = "Generated tokens of all answers per second, over the last two seconds";
const CONNECTIONS = {
  connecting: "connecting", live: "live", reconnecting: "reconnecting", paused: "paused", locked: "needs a key",
};

export function mount(root, store, api) {
  const model = h("span", { class: "top-model" });
  const state = badge("", "");
  const speed = h("span", { class: "top-speed", title: SPEED }, h("b", {}, "–"), " tokens/s");
  const connection = h("span", { role: "status" }, badge("connecting", "connecting"));
  // outside of the status element, so that screen readers do not announce every second
  const since = h("span", { class: "hint" });
  const key = button("Key", () => askForKey(api, "", () => location.reload()), { tone: "quiet", hidden: true });
  fill(root, h("div", { class: "top-facts" }, model, state, speed), connection, since, key, themeSwitch());
  store.subscribe(["status", "rates", "me", "connection", "away_s"], () => {
    const { view, me } = store;
    text(model, view?.status?.model ?? me?.model ?? "");
    const said = view?.status?.state ?? me?.state ?? "";
    setBadge(state, said, said);
    state.hidden = !said;
    text(speed.firstElementChild, rate(store.isFresh ? view.rates?.tokens_per_s : null));
    showConnection(connection.firstElementChild, since, store);
    key.hidden = !(me?.needs_key || store.connection === "locked");
    document.title = titleOf(view, me);
  });
  store.subscribe(["me"], () => foot(document.getElementById("footer"), store.me));
}

function showConnection(element, since, { view, connection, problem, heardAt }) {
  const isAway = connection === "live" && typeof view?.away_s === "number";
  if (isAway) setBadge(element, "away", "broker away");
  else setBadge(element, connection, CONNECTIONS[connection]);
  const isOld = view !== null && connection !== "live";
  const when = isAway ? `for ${duration(view.away_s)}` : isOld ? `as of ${clock(heardAt)}` : "";
  text(since, [when, problem].filter(Boolean).join(" · "));
}

function titleOf(view, me) {
  const model = view?.status?.model ?? me?.model;
  return model ? `${model} · Swarm` : "Swarm";
}

function foot(root, me) {
  if (!me) return;
  const who = me.name ? `Key ${me.name}${me.admin ? " (admin)" : ""}` : "On this machine, without keys";
  fill(
    root, h("span", {}, `Swarm ${me.version}`), h("span", {}, who), h("span", {}, h("code", {}, me.base_url)),
    h("span", {}, "Same on a terminal: ", h("code", {}, "swarmctl top")),
  );
}

const THEMES = ["system", "light", "dark"];

function themeSwitch() {
  const now = () => document.documentElement.dataset.theme ?? "system";
  const change = () => {
    choose(THEMES[(THEMES.indexOf(now()) + 1) % THEMES.length]);
    show();
  };
  const control = button("", change, { tone: "quiet" });
  const show = () => {
    const words = { system: "Auto", light: "Light", dark: "Dark" }[now()];
    fill(control, halfMoon(), words);
    set(control, { "aria-label": `Colours: ${words}`, title: "Change between the system's colours, light and dark" });
  };
  show();
  return control;
}

const halfMoon = () =>
  svg(
    "svg", { viewBox: "0 0 16 16", class: "half-moon", "aria-hidden": "true" }, svg("circle", { cx: 8, cy: 8, r: 6.5 }),
    svg("path", { d: "M8 1.5a6.5 6.5 0 0 1 0 13z" }),
  );

function choose(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  try {
    if (theme === "system") localStorage.removeItem("swarm.theme");
    else localStorage.setItem("swarm.theme", theme);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // storage is forbidden: the choice lasts until a reload
  }
  dispatchEvent(new Event("theme")); // canvases must be redrawn
}
