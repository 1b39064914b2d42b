// Asks for traces: once for what has ended; for what runs once a second at most, the longer it is the more seldom, and only
// while its place on the page is looked at.

const SECOND = 1000;
const TOKENS_A_SECOND = 150; // of a report: one that lists a thousand tokens is a megabyte, and asked for every six seconds
const LAST_LOOK_S = 0.2; // behind an answer's end, when the broker has written down its last token

export class TraceReader {
  #api;
  #told;
  #requestId = "";
  #isRunning = false;
  #isSeen = false;
  #isAsking = false;
  #timer = 0;
  #gap_s = 1;

  // `told(requestId, report, words)`: a report has come, or words say why none did. `place`: where it is shown.
  constructor(api, place, told) {
    this.#api = api;
    this.#told = told;
    new IntersectionObserver(([entry]) => {
      this.#isSeen = entry.isIntersecting;
      this.#plan(0);
    }).observe(place);
    document.addEventListener("visibilitychange", () => this.#plan(0));
  }

  follow(requestId, isRunning) {
    if (requestId !== this.#requestId) this.#gap_s = 1;
    this.#requestId = requestId;
    this.#isRunning = isRunning;
    this.#plan(isRunning ? this.#gap_s / 2 : LAST_LOOK_S, true);
  }

  // Ask in so many seconds, if there is anything to ask. `isNew`: although it has ended, it has not been asked for yet.
  #plan(wait_s, isNew = false) {
    if (isNew) this.#isDue = true;
    clearTimeout(this.#timer);
    const isLookedAt = this.#isSeen && !document.hidden;
    if (this.#requestId === "" || this.#isAsking || !(this.#isRunning ? isLookedAt : this.#isDue)) return;
    this.#timer = setTimeout(() => this.#ask(), wait_s * SECOND);
  }

  #isDue = false;

  async #ask() {
    const requestId = this.#requestId;
    this.#isAsking = true;
    this.#isDue = this.#isRunning;
    try {
      const report = await this.#api.get(`/console/trace/${encodeURIComponent(requestId)}`);
      const listed = report.sequences?.reduce((sum, { tokens }) => sum + (tokens?.length ?? 0), 0) ?? 0;
      this.#gap_s = Math.max(1, listed / TOKENS_A_SECOND);
      this.#told(requestId, report, report.times ?? "");
    } catch (error) {
      if (error.name !== "ApiError") throw error;
      this.#told(requestId, null, this.#isRunning ? "" : error.message); // it may be too young to be known
    } finally {
      this.#isAsking = false;
    }
    this.#plan(requestId === this.#requestId ? this.#gap_s : 0);
  }
}
