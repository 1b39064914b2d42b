// An answer as it arrives: handles its events, where to resume it, and breaks of its stream. Pure: takes events and
// times; talk.js reads the stream and acts on the results.

const MOST_PIECES = 20_000; // over all continuations, with borders and alternatives; beyond this only the text grows
const MOST_TEXT = 4_000_000; // characters over all continuations
const PATIENCE_S = 180; // seconds of breaks without progress after which an answer is given up
const LIVED_S = 5; // seconds; a stream that was open longer counts as a success even if it brought only heartbeats
const FIRST_WAIT_S = 0.25;
const LONGEST_WAIT_S = 3;

const PASSING = new Set([401, 408, 429]); // temporary: a key is required, or the gateway is busy

// asking → streaming ⇄ broken → ended, stopped, failed or elsewhere.
export const ENDS = new Set(["ended", "stopped", "failed", "elsewhere"]);

export class Answer {
  constructor(request, now) {
    this.request = request;
    this.requestId = "";
    this.eventId = ""; // id of the last event; the stream resumes after it
    this.state = "asking";
    this.words = ""; // reason of a failure, or of a wait
    this.choices = Array.from({ length: request.body.n ?? 1 }, newChoice);
    this.usage = null;
    this.askedAt = now;
    this.firstAt = null;
    this.lastAt = null;
    this.endedAt = null;
    this.openedAt = now;
    this.numBreaks = 0;
    this.numFailures = 0; // consecutive
    this.brokenSince = null;
    this.isCut = false; // the text is longer than this page keeps
    this.numPieces = 0;
    this.numCharacters = 0;
  }

  get isOver() {
    return ENDS.has(this.state);
  }

  get isChat() {
    return this.request.path.includes("chat");
  }

  // The headers have arrived. `id` identifies the request for cancelling, tracing and resuming.
  opened(id, now) {
    this.requestId ||= id ?? "";
    if (this.isOver) return;
    this.openedAt = now;
    this.state = "streaming";
    this.#isAway = false;
    this.words = "";
  }

  take({ id, data }, now) {
    if (this.isOver) return;
    if (data !== "[DONE]") {
      const chunk = JSON.parse(data);
      if (chunk.error) this.#refused(chunk.error, now);
      else this.#add(chunk, now);
    } else if (!this.#isAway) this.#end("ended", "", now);
    if (id) this.#heard(id);
  }

  #isAway = false; // the gateway cannot reach the swarm: the stream ends, but the answer does not

  #heard(id) {
    this.eventId = id;
    this.numFailures = 0;
    this.brokenSince = null;
  }

  #add(chunk, now) {
    for (const entry of chunk.choices ?? []) {
      const choice = this.choices[entry.index];
      if (choice === undefined) continue;
      const thought = entry.delta?.reasoning ?? "";
      const text = thought + ((this.isChat ? entry.delta?.content : entry.text) ?? "");
      const chances = chancesOf(entry.logprobs);
      const isThinking = thought !== "" && choice.numThought === choice.text.length;
      if (text !== "" || chances.length > 0) this.#addText(choice, text, chances, now);
      if (isThinking) choice.numThought = choice.text.length - (text.length - thought.length);
      if (entry.finish_reason) choice.reason = entry.finish_reason;
    }
    if (chunk.usage) this.usage = chunk.usage;
  }

  #addText(choice, text, chances, now) {
    this.firstAt ??= now;
    this.lastAt = now;
    if (this.numCharacters + text.length > MOST_TEXT) {
      this.isCut = true;
      return;
    }
    choice.text += text;
    this.numCharacters += text.length;
    if (this.numPieces >= MOST_PIECES) return;
    this.numPieces += Math.max(1, chances.length);
    for (const chance of chances.slice(0, -1)) addPiece(choice, choice.text.length - text.length, chance);
    addPiece(choice, choice.text.length, chances.at(-1) ?? null);
  }

  #refused({ message, code }, now) {
    if (code === "ReadElsewhere") this.#end("elsewhere", "Another tab reads this answer now.", now);
    else if (code === "RequestCancelled") this.#end("stopped", "", now);
    else if (code === "Unavailable") this.#away(message);
    else this.#end("failed", message, now);
  }

  #away(message) {
    this.#isAway = true;
    this.words = message;
  }

  #end(state, words, now) {
    this.state = state;
    this.words = words;
    this.endedAt = now;
  }

  stopped(now) {
    if (!this.isOver) this.#end("stopped", "", now);
  }

  // The stream ended before the answer, or could not be opened. `problem`: {status, message} if the gateway gave a
  // reason. Returns the seconds to wait before resuming; null if the answer has failed.
  broke(problem, now) {
    if (this.isOver) return null;
    if (this.requestId && this.state !== "broken") this.#broken(now); // a refused request had not begun
    const why = this.#hopeless(problem, now);
    if (why !== null) {
      this.#end("failed", why, now);
      return null;
    }
    this.words = problem?.message ?? this.words;
    this.numFailures += 1;
    return Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (this.numFailures - 1));
  }

  #broken(now) {
    if (this.state === "streaming" && now - this.openedAt > LIVED_S * 1000) {
      this.numFailures = 0;
      this.brokenSince = null;
    }
    this.numBreaks += this.brokenSince === null ? 1 : 0;
    this.brokenSince ??= now;
    this.state = "broken";
  }

  #hopeless(problem, now) {
    const status = problem?.status ?? 0;
    if (!this.requestId) return problem?.message ?? "The gateway does not answer.";
    if (status === 404) return "The swarm no longer has this answer, so it can't be resumed.";
    if (status >= 400 && status < 500 && !PASSING.has(status)) return problem.message;
    if (now - this.brokenSince <= PATIENCE_S * 1000) return null;
    return `Given up: for ${PATIENCE_S} seconds no data came.`;
  }

  // The address to resume the stream: after the last event, or from the beginning.
  get resumption() {
    return `/v1/streams/${encodeURIComponent(this.eventId || this.requestId)}`;
  }

  // Read the answer here again after another tab took it over.
  takenBack() {
    if (this.state !== "elsewhere") return;
    this.state = "broken";
    this.words = "";
    this.endedAt = this.brokenSince = null;
  }

  // Plain values for sessionStorage, without pieces if there is no space for them.
  kept({ withPieces = true } = {}) {
    const choices = this.choices.map((choice) => (withPieces ? choice : { ...choice, ends: [], chances: [] }));
    return { ...this, choices };
  }

  static restored(kept) {
    const answer = Object.assign(new Answer(kept.request, kept.askedAt), kept);
    if (!answer.isOver) {
      if (answer.requestId) answer.state = "broken";
      else answer.#end("failed", "The page was reloaded before the gateway had answered.", kept.askedAt);
    }
    return answer;
  }
}

// `text`: what the model wrote, of which the first `numThought` characters are its reasoning.
const newChoice = () => ({ text: "", numThought: 0, ends: [], chances: [], reason: null });

export const answeredIn = ({ text, numThought = 0 }) => text.slice(numThought);

// `ends`: the end of each token's text. `chances`: its {logprob, others} if requested.
function addPiece(choice, end, chance) {
  choice.ends.push(end);
  choice.chances.push(chance);
}

// Of /v1/chat/completions or /v1/completions: {logprob, others: [[token, logprob]]} per token.
function chancesOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      token, logprob, others: (top_logprobs ?? []).map((each) => [each.token, each.logprob]),
    }));
  }
  const { tokens = [], token_logprobs = [], top_logprobs = [] } = logprobs;
  return tokens.map((token, at) => ({
    token, logprob: token_logprobs[at], others: Object.entries(top_logprobs[at] ?? {}),
  }));
}

export const pieceOf = (choice, index) => choice.text.slice(choice.ends[index - 1] ?? 0, choice.ends[index]);
