// Fetches traces: once for an ended request; for a running one at most once a second, less often the longer it is, and
// only while it is visible. Otherwise just often enough not to miss tokens, since a report lists the newest thousand.

const SECOND = 1000;
const TOKENS_A_SECOND = 150; // in reports: a thousand tokens are a megabyte, which is fetched every six seconds
const MOST_UNSEEN = 800; // tokens that may accumulate before a fetch, visible or not
const LAST_LOOK_S = 0.2; // seconds after an answer's end, when the broker has recorded its last token

export class TraceReader {
  #api;
  #told;
  #requestId = "";
  #isRunning = false;
  #isSeen = false;
  #isAsking = false;
  #timer = 0;
  #gap_s = 1;
  #isDue = false; // fetch even if not visible
  #numTokens = 0;
  #numAsked = 0; // number of tokens at the last fetch
  #askedAt = -Infinity;

  // `told(requestId, report, words)`: a report, or the reason why there is none. `place`: the element that shows it.
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
    if (requestId !== this.#requestId) [this.#gap_s, this.#numTokens, this.#numAsked] = [1, 0, 0];
    this.#requestId = requestId;
    this.#isRunning = isRunning;
    this.#isDue ||= !isRunning;
    this.#plan(isRunning ? this.#gap_s / 2 : LAST_LOOK_S);
  }

  grown(numTokens) {
    this.#numTokens = numTokens;
    if (!this.#isRunning || this.#isDue || numTokens - this.#numAsked < MOST_UNSEEN) return;
    this.#isDue = true;
    this.#plan(0);
  }

  // At most one fetch per second, however often it becomes visible.
  #plan(wait_s) {
    clearTimeout(this.#timer);
    const isLookedAt = this.#isRunning && this.#isSeen && !document.hidden;
    if (this.#requestId === "" || this.#isAsking || !(isLookedAt || this.#isDue)) return;
    this.#timer = setTimeout(() => this.#ask(), Math.max(wait_s * SECOND, this.#askedAt + SECOND - performance.now()));
  }

  async #ask() {
    const requestId = this.#requestId;
    this.#isAsking = true;
    this.#askedAt = performance.now();
    this.#isDue = false;
    this.#numAsked = this.#numTokens;
    try {
      const report = await this.#api.get(`/console/trace/${encodeURIComponent(requestId)}`);
      const listed = report.sequences?.reduce((sum, { tokens }) => sum + (tokens?.length ?? 0), 0) ?? 0;
      this.#gap_s = Math.max(1, listed / TOKENS_A_SECOND);
      this.#told(requestId, report, report.times ?? "");
    } catch (error) {
      if (error.name !== "ApiError") throw error;
      this.#told(requestId, null, this.#isRunning ? "" : error.message); // it may be too new to be found
    } finally {
      this.#isAsking = false;
    }
    this.#plan(requestId === this.#requestId ? this.#gap_s : 0);
  }
}
