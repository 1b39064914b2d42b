// Rows of the list of requests: owner, and progress as text and as a share. Pure.

import { count, duration, plural } from "./format.js";

const STATES = { waiting: "queued", running: "running", ended: "ended" };
const ORDER = { running: 0, waiting: 1, ended: 2 };

// Requests in progress come first, oldest first; then ended ones, latest first.
export function rowsOf(view, filter = "") {
  const wanted = filter.trim().toLowerCase();
  const rows = [...Object.values(view?.requests ?? {}), ...Object.values(view?.ended ?? {})];
  return rows.filter((row) => wanted === "" || matches(row, wanted)).sort(inOrder);
}

const matches = (row, wanted) =>
  [row.request_id, whoOf(row), row.class, stateOf(row)].some((words) => String(words).toLowerCase().includes(wanted));

function inOrder(a, b) {
  const apart = (ORDER[a.state] ?? 3) - (ORDER[b.state] ?? 3);
  if (apart !== 0) return apart;
  return a.state === "ended" ? (b.ended_at ?? 0) - (a.ended_at ?? 0) : (a.began_at ?? 0) - (b.began_at ?? 0);
}

export const shortId = ({ request_id: id }) => id.slice(0, 8);

// Tenants as the broker names them: "http" is the gateway itself, "key:alice" is a key.
export function whoOf({ tenant = "" }) {
  if (tenant.startsWith("key:")) return tenant.slice(4);
  if (tenant === "http" || tenant === "") return "this machine";
  return tenant.startsWith("client ") ? `client ${tenant.slice(7, 15)}` : tenant;
}

export function stateOf(row) {
  if (row.state === "ended") return endOf(row.reasons ?? []);
  if (row.state === "running" && isInPrompt(row)) return "reading the prompt";
  return STATES[row.state] ?? row.state;
}

function endOf(reasons) {
  const known = [...new Set(reasons.filter(Boolean))];
  return known.length > 0 ? `ended: ${known.join(", ")}` : "ended";
}

const isInPrompt = ({ num_tokens: tokens, num_prompt: prompt, num_prompt_computed: computed }) =>
  tokens === 0 && computed !== undefined && computed < prompt;

// Progress of the prompt while it is computed, then of the answer. A null `part` is unknown.
export function progressOf(row) {
  const { num_prompt: prompt, num_prompt_computed: computed, num_tokens: tokens, max_tokens: most, n = 1 } = row;
  if (row.state !== "ended" && tokens === 0) {
    const words = `${count(computed ?? 0)} of ${plural(prompt, "prompt token")}`;
    return { label: "prompt", words, part: computed === undefined || prompt === 0 ? null : computed / prompt };
  }
  if (row.state === "ended") return { label: "answer", words: plural(tokens, "token"), part: null };
  const whole = most * n;
  return {
    label: "answer", words: `${count(tokens)} of ${count(whole)} tokens`, part: whole > 0 ? tokens / whole : null,
  };
}

export function ageOf(row, now) {
  if (row.state === "ended") return row.ended_at === undefined ? "" : `${duration(now - row.ended_at)} ago`;
  return row.began_at === undefined ? "" : duration(now - row.began_at);
}

export function summaryOf(view) {
  const rows = Object.values(view?.requests ?? {});
  const running = rows.filter(({ state }) => state === "running").length;
  const words = [`${count(running)} running`, `${count(rows.length - running)} queued`];
  const more = view?.requests_more ?? 0;
  if (more > 0) words.push(`${count(more)} more not listed`);
  return words.join(", ");
}
