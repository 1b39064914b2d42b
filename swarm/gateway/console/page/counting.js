// Counts the tokens of a long prompt exactly, by the gateway, as soon as typing rests. A short one is estimated.

import { FRAME } from "./room.js";

const SPARE = 64; // tokens by which the sum of its parts may differ from a conversation's length
const RESTS_MS = 300;
const LONG = 400; // characters from which on an estimate may be far off
const LONGEST = 400_000; // characters; the count of a longer one costs more than it tells

export function exactCounter(talk, api) {
  let timer = 0;
  let asked = [];
  const count = async () => {
    const { counting: of } = talk;
    try {
      talk.set({ exact: { of, tokens: await tokensOf(talk, api) } });
    } catch (error) {
      if (error.name !== "ApiError") throw error; // the estimate stays
    }
  };
  talk.subscribe(() => {
    const { counting, draft, model, isBusy } = talk;
    if (counting.every((part, at) => part === asked[at])) return;
    asked = counting;
    clearTimeout(timer);
    const isWorth = draft.length >= LONG && draft.length <= LONGEST;
    if (model && isWorth && !isBusy) timer = setTimeout(count, RESTS_MS);
  });
}

// The gateway counts a conversation only if the model can hold it: of one that it can't, the prompt is counted, and the
// rest is what it was before.
async function tokensOf({ model, mode, draft, request, room }, api) {
  const countOf = async (body) => (await api.post("/tokenize", { model: model.id, ...body })).count;
  const own = await countOf({ prompt: draft, add_special_tokens: mode === "raw" });
  if (mode === "raw") return own;
  const whole = room.past + own + FRAME;
  return whole > model.context - SPARE ? whole : countOf({ messages: request.body.messages });
}
