// Comparison of two traces: differences as text, both charts at one scale, and a table of parts.

import { fill, h, set, text } from "./dom.js";
import { seconds } from "./format.js";
import { Columns } from "./plot.js";
import { Spans, differences, scaleOf } from "./spans.js";
import { button, field } from "./widgets.js";

const MOST_LISTED = 40;

export function mount(root, store, api, talk) {
  const picks = [pick("First trace"), pick("Second trace")];
  const words = h("ul", { class: "sentences", "aria-live": "polite" });
  const problem = h("p", { class: "problem", role: "alert" });
  const charts = picks.map(() => h("canvas", { class: "columns-chart", role: "img" }));
  const table = h("div", { class: "sums" });
  const compared = h("div", { class: "two-traces", hidden: true }, words, h("div", { class: "pair" }, charts), table);
  const go = button("Compare", () => compare());
  fill(
    root,
    root.firstElementChild,
    h(
      "div",
      { class: "fields" },
      picks.map(({ element }) => element),
      go,
    ),
    problem,
    compared,
  );

  let both = null;
  const compare = async () => {
    const ids = picks.map(({ select }) => select.value);
    text(problem, ids.every(Boolean) ? "" : "Choose two requests first.");
    if (!ids.every(Boolean)) return;
    try {
      const reports = await Promise.all(ids.map((id) => api.get(`/console/trace/${encodeURIComponent(id)}`)));
      both = { ids, spans: reports.map(firstOf) };
      show();
    } catch (error) {
      if (error.name !== "ApiError") throw error;
      text(problem, error.message);
    }
  };
  const show = () => {
    if (!both) return;
    compared.hidden = false;
    const names = both.ids.map((id) => id.slice(0, 8));
    const told = differences(
      ...both.spans,
      names.map((name) => `request ${name}`),
    );
    fill(
      words,
      told.words.map((line) => h("li", {}, line)),
    );
    fill(table, tableOf(told.rows, names));
    const scale = Math.max(...both.spans.map(({ tokens }) => scaleOf(tokens)));
    charts.forEach((canvas, at) => {
      set(canvas, { "aria-label": `Tokens of ${names[at]}, at most ${seconds(scale)} each` });
      new Columns(canvas).draw(both.spans[at], { scale });
    });
  };
  const list = () => root.open && picks.forEach(({ draw }) => draw(known(store, talk)));
  root.addEventListener("toggle", () => {
    list();
    show();
  });
  store.subscribe(["requests", "ended"], list);
  addEventListener("theme", show);
}

// The first of several continuations.
function firstOf(report) {
  const spans = new Spans();
  if (report.sequences?.[0]) spans.add(report.sequences[0]);
  return spans;
}

// Selectable requests, the newest first.
function known({ view }, talk) {
  const rows = [...Object.values(view?.requests ?? {}), ...Object.values(view?.ended ?? {})];
  const found = rows.map((row) => ({
    id: row.request_id,
    at: row.began_at ?? 0,
    words: `${row.state}, ${row.num_tokens} tokens`,
  }));
  const own = talk.answer?.requestId;
  if (own && !found.some(({ id }) => id === own)) found.push({ id: own, at: Infinity, words: "the answer above" });
  return found.sort((a, b) => b.at - a.at).slice(0, MOST_LISTED);
}

function pick(label) {
  const select = h("select");
  const element = field(label, select);
  let told = "";
  const draw = (requests) => {
    const now = requests.map(({ id, words }) => `${id.slice(0, 8)} · ${words}`).join("\n");
    if (now === told) return;
    told = now;
    const chosen = select.value;
    fill(
      select,
      h("option", { value: "" }, "Choose …"),
      requests.map(({ id, words }) => h("option", { value: id }, `${id.slice(0, 8)} · ${words}`)),
    );
    if (requests.some(({ id }) => id === chosen)) select.value = chosen;
  };
  return { element, select, draw };
}

function tableOf(rows, names) {
  const head = ["", ...names, "difference"].map((words, at) =>
    h("th", { scope: "col", class: at ? "num" : "" }, words),
  );
  return h(
    "table",
    {},
    h("caption", { class: "unseen" }, "Times a token of both traces, and how they differ"),
    h("thead", {}, h("tr", {}, head)),
    h(
      "tbody",
      {},
      rows.map(({ label, first, second, difference }) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, label),
          [first, second].map((value) => h("td", { class: "num" }, seconds(value))),
          h("td", { class: "num" }, signed(difference)),
        ),
      ),
    ),
  );
}

const signed = (value) => (value > 0 ? `+${seconds(value)}` : value < 0 ? `−${seconds(-value)}` : seconds(value));
