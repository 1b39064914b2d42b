// Asks for traces: once for what has ended; for what runs once a second at most, the longer it is the more seldom, and
// only while its place on the page is looked at. Else just often enough to miss none: a report lists the newest
// thousand tokens.

const SECOND = 1000;
const TOKENS_A_SECOND = 150; // of a report: a thousand tokens are a megabyte, which is asked for every six seconds
const MOST_UNSEEN = 800; // tokens that may come before they are asked for, seen or not
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
  #isDue = false; // ask even if nobody looks
  #numTokens = 0;
  #numAsked = 0; // of them, when they were last asked for
  #askedAt = -Infinity;

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
    if (requestId !== this.#requestId) [this.#gap_s, this.#numTokens, this.#numAsked] = [1, 0, 0];
    this.#requestId = requestId;
    this.#isRunning = isRunning;
    this.#isDue ||= !isRunning;
    this.#plan(isRunning ? this.#gap_s / 2 : LAST_LOOK_S);
  }

  // So many tokens have come of what is followed.
  grown(numTokens) {
    this.#numTokens = numTokens;
    if (!this.#isRunning || this.#isDue || numTokens - this.#numAsked < MOST_UNSEEN) return;
    this.#isDue = true;
    this.#plan(0);
  }

  // Ask in so many seconds, if there is anything to ask; however often it comes into sight, once a second at most.
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
      this.#told(requestId, null, this.#isRunning ? "" : error.message); // it may be too young to be known
    } finally {
      this.#isAsking = false;
    }
    this.#plan(requestId === this.#requestId ? this.#gap_s : 0);
  }
}
