// Prepares a recovery's phases for drawing. Pure.

export const PHASES = [
  ["verdict", "Detect the loss"], ["plan", "Plan the takeover"], ["load", "Load the layers"],
  ["activate", "Switch over"], ["replay", "Replay what was lost"], ["resume", "Resume"],
];

// `from` and `to`: shares of the whole time; a phase that has not ended takes its predicted share.
export function rowsOf(recovery) {
  const told = new Map((recovery.phases ?? []).map((phase) => [phase.name, phase]));
  const rows = PHASES.map(([name, words]) => ({
    name, words, state: "waits", took_s: null, predicted_s: null, ...told.get(name),
  }));
  const lengths = rows.map((row) => Math.max(0, row.took_s ?? row.predicted_s ?? 0));
  const whole = lengths.reduce((sum, length) => sum + length, 0);
  let at = 0;
  return rows.map((row, index) => {
    const from = whole > 0 ? at / whole : 0;
    at += lengths[index];
    return { ...row, from, to: whole > 0 ? at / whole : 0 };
  });
}

// The total counts from the verdict on: the time until a loss is detected is a separate phase.
const healing = (recovery) => (recovery.phases ?? []).filter(({ name }) => name !== "verdict");

export const tookOf = (recovery) =>
  recovery.total_s ?? healing(recovery).reduce((sum, phase) => sum + (phase.took_s ?? 0), 0);

// Identify a recovery by its first timestamp, since its epoch and causes may change while it lasts.
export const keyOf = ({ key, epoch, began_at: began, cause }) => key ?? `${epoch ?? ""} ${began ?? ""} ${cause ?? ""}`;

export const LINGER_S = 12;

// A running recovery, or the last one for a while after its end; none from before the page was opened.
export class Latest {
  #known = null;
  #until = 0;

  of(view, now) {
    if (!view.recoveries) return view.recovery ?? null; // no report of recoveries has arrived yet
    const last = view.recoveries[0] ?? null;
    const key = last === null ? "" : keyOf(last);
    if (this.#known !== null && key !== this.#known)
      this.#until = (last?.began_at ?? now) + (last?.total_s ?? 0) + LINGER_S;
    this.#known = key;
    return view.recovery ?? (now < this.#until ? last : null);
  }
}
