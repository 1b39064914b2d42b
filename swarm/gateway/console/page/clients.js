// Ready-made settings for clients of this gateway.

import { copier } from "./copying.js";
import { fill, h } from "./dom.js";
import { setupsFor } from "./setups.js";
import { KEY_VARIABLE } from "./snippets.js";
import { talkOf } from "./talk.js";
import { empty, heading } from "./widgets.js";

export function mount(root, store, api) {
  const talk = talkOf(store, api);
  let told = "";
  const draw = () => {
    const { me } = store;
    const model = talk.model?.id ?? me?.model;
    const now = JSON.stringify([me?.base_url, me?.needs_key, model, talk.model?.context]);
    if (now === told) return;
    told = now;
    if (!me) return fill(root, heading("Connect a client"), h("div", { class: "not-yet" }));
    if (!model)
      return fill(
        root, heading("Connect a client"),
        empty("No model yet", "The settings appear as soon as the swarm serves one."),
      );
    const where = { baseUrl: me.base_url, model, needsKey: me.needs_key, context: talk.model?.context };
    return fill(
      root, heading("Connect a client"), intro(where), h("div", { class: "setups" }, setupsFor(where).map(setup)),
    );
  };
  talk.subscribe(draw);
  store.subscribe(["me"], draw);
}

function intro({ baseUrl, model, needsKey }) {
  const words = needsKey
    ? [
        "Each needs a key, which ", h("code", {}, "swarmctl keys add NAME"), " makes. Keep it in the variable ",
        h("code", {}, KEY_VARIABLE), ": these settings do not contain it.",
      ]
    : "Without keys this gateway serves programs on its own machine only; any key that they send is ignored.";
  const facts = h(
    "dl", { class: "facts" }, h("dt", {}, "Base URL"), h("dd", { class: "mono" }, baseUrl), h("dt", {}, "Model"),
    h("dd", { class: "mono" }, model),
  );
  return h("div", { class: "clients-intro" }, facts, h("p", {}, words));
}

function setup({ name, note, files }) {
  const blocks = files.map(({ title, text }) =>
    h(
      "figure", { class: "code" },
      h("figcaption", {}, h("span", {}, title), copier("Copy", () => text, `Copy the settings for ${name}`)),
      h("pre", { tabindex: 0, "aria-label": `${name}: ${title}` }, text),
    ),
  );
  return h(
    "article", { class: "setup", "aria-label": name }, h("h3", {}, name), h("p", { class: "hint" }, note), blocks,
  );
}
