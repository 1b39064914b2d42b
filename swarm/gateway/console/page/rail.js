// Beside the chat: the stages, and a recovery while it happens. On a narrow screen it is folded away, below a line with
// the same in short.

import { mount as mountStages } from "./chain.js";
import { fill, h, set, text } from "./dom.js";
import { plural } from "./format.js";
import { LINGER_S, Latest } from "./phases.js";
import { mount as mountRecovery } from "./recovery.js";
import { badge, button, setBadge } from "./widgets.js";

export function mount(root, store, api) {
  mountStages(document.getElementById("rail-stages"), store, api, { isShort: true });
  mountRecovery(document.getElementById("rail-recovery"), store, api);
  const state = badge("", "");
  const words = h("span", { class: "fold-words" });
  const toggle = button("", () => open(!("open" in root.dataset)), {
    tone: "quiet small", "aria-controls": "rail", "aria-expanded": "false",
  });
  const open = (isOpen) => {
    root.toggleAttribute("data-open", isOpen);
    set(text(toggle, isOpen ? "Hide" : "Stages"), { "aria-expanded": String(isOpen) });
  };
  open(false);
  fill(document.getElementById("fold"), h("p", { class: "fold-words", role: "status" }, state, words), toggle);
  const latest = new Latest();
  let timer = 0;
  const draw = () => {
    const { view } = store;
    const recovery = view && latest.of(view, store.now());
    const name = view?.recovery ? "recovering" : (view?.status?.state ?? "");
    const num = view?.plan?.stages?.length ?? 0;
    setBadge(state, name, name);
    state.hidden = name === "";
    text(words, recovery ? recovery.sentence || `${recovery.cause}.` : num ? plural(num, "stage") : "");
    clearTimeout(timer);
    if (recovery) timer = setTimeout(draw, LINGER_S * 1000);
  };
  store.subscribe(["plan", "status", "recovery", "recoveries"], draw);
}
