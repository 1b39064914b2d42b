// What an answer took, in one line. Pure.

import { count, plural, rate, seconds } from "./format.js";
import { answeredIn } from "./reading.js";
import { isCutByContext } from "./room.js";
import { added, endOf } from "./thread.js";

const SHORTEST_S = 0.1; // from the first token on; a shorter time gives no meaningful rate
export const REASONS = { stop: "reached its end", length: "cut at the maximum length", tool_calls: "calls a tool" };

export function factsOf(answer, context, now = Date.now()) {
  const { usage, askedAt, firstAt, endedAt, numBreaks, request, requestId, isCut } = answer;
  const end = endedAt ?? now;
  // until the report arrives, the number of pieces is a good estimate
  const num = usage?.completion_tokens ?? answer.numPieces;
  const streamed_s = firstAt === null ? 0 : (end - firstAt) / 1000;
  const speed = streamed_s >= SHORTEST_S && num > 1 ? num / streamed_s : null;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const reason = answer.choices.length === 1 ? answer.choices[0].reason : null;
  const howItEnded = isCutByContext(answer, context) ? "cut: the model's context is full" : (REASONS[reason] ?? reason);
  return [
    reason ? howItEnded : "",
    usage ? `prompt ${count(usage.prompt_tokens)}${cached ? ` (${count(cached)} of them cached)` : ""}` : "",
    usage ? `answer ${plural(usage.completion_tokens, "token")}` : "",
    firstAt === null ? "" : `first token ${seconds((firstAt - askedAt) / 1000)}`,
    `${answer.isOver ? "in all" : "so far"} ${seconds((end - askedAt) / 1000)}`,
    speed ? `${usage ? "" : "about "}${rate(speed)} tokens/s` : "",
    numBreaks ? `resumed after ${plural(numBreaks, "break")}` : "", `seed ${request.body.seed}`,
    requestId ? `request ${requestId.slice(0, 8)}` : "",
    isCut ? "longer than this page keeps: its end is not shown" : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

// The chosen continuation comes last, so that it is shown.
export function settledIn(thread, answer, chosen, context) {
  const parent = endOf(thread);
  const { requestId, isChat } = answer;
  const of = { role: "assistant", facts: factsOf(answer, context), requestId, isRaw: !isChat };
  const turnOf = (choice) => ({
    ...of, content: answeredIn(choice), thought: choice.text.slice(0, choice.numThought ?? 0), isPlain: isPlain(answer),
  });
  const { [chosen]: last, ...others } = answer.choices;
  return [...Object.values(others), last]
    .filter((choice) => choice !== undefined && choice.text !== "")
    .reduce((made, choice) => added(made, turnOf(choice), parent), thread);
}

// A text that was continued, and an answer with a format, are no Markdown.
export const isPlain = ({ isChat, request }) => !isChat || request.body.response_format !== undefined;
