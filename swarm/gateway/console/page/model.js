// Loads the served model and whether it has a chat template: when the user is identified, and, while the swarm starts,
// as soon as it serves. Draws nothing.

const AGAIN_MS = 1000; // the broker may serve a moment before the gateway notices

export function learnModel(store, talk, api) {
  let isAsking = false;
  let timer = 0;
  const isWanted = () => talk.model === null && store.view?.status?.state === "serving" && store.connection === "live";
  const again = () => {
    timer = 0;
    if (isWanted()) learn();
  };
  const learn = async () => {
    if (isAsking) return;
    isAsking = true;
    clearTimeout(timer);
    const model = await served(api).finally(() => (isAsking = false));
    if (model) talk.set({ model, notice: "", ...(model.chat ? {} : { mode: "raw" }) });
    else timer = isWanted() ? setTimeout(again, AGAIN_MS) : 0;
  };
  store.subscribe(["me"], learn);
  store.subscribe(["status", "connection"], () => timer === 0 && again());
}

// {id, chat, context}; null while the gateway has no model.
async function served(api) {
  try {
    const { data } = await api.get("/v1/models");
    const found = data.find((each) => each.owned_by === "swarm") ?? data[0];
    if (!found) return null;
    const { chat = true, context = null, context_now: now = context } = found.swarm ?? {};
    return { id: found.id, chat, context: now };
  } catch (error) {
    if (error.name !== "ApiError") throw error; // the text below the box reports that there is no model yet
    return null;
  }
}
