// Loads the served models and whether each has a chat template: when the user is identified, and, while the swarm
// starts, as soon as it serves. Draws nothing.

const NONE = "The swarm serves no model yet: Send works as soon as it does.";
const LOCKED = "This gateway needs a key: press “Key” above.";
const AGAIN_MS = 1000; // the broker may serve a moment before the gateway notices

export function learnModel(store, talk, api) {
  let isAsking = false;
  let hasNone = false; // the gateway has answered so
  let timer = 0;
  const isWanted = () => talk.model === null && store.view?.status?.state === "serving" && store.connection === "live";
  const again = () => {
    timer = 0;
    if (isWanted()) learn();
  };
  const explain = () => {
    const { connection } = store;
    talk.set({ lacks: connection === "locked" ? LOCKED : hasNone && connection === "live" ? NONE : "" });
  };
  const learn = async () => {
    if (isAsking) return;
    isAsking = true;
    clearTimeout(timer);
    const models = await served(api).finally(() => (isAsking = false));
    const model = models.find(({ id }) => id === talk.model?.id) ?? models[0];
    hasNone = !model;
    explain();
    if (model) talk.set({ model, models, notice: "", ...(model.chat ? {} : { mode: "raw" }) });
    else timer = isWanted() ? setTimeout(again, AGAIN_MS) : 0;
  };
  store.subscribe(["connection"], explain);
  store.subscribe(["me"], learn);
  store.subscribe(["status", "connection"], () => timer === 0 && again());
}

// [{id, chat, context}], those of swarms first; empty while the gateway has none.
async function served(api) {
  try {
    const { data } = await api.get("/v1/models");
    const isOwn = ({ owned_by: owner }) => owner === "swarm";
    return [...data.filter(isOwn), ...data.filter((each) => !isOwn(each))].map(({ id, swarm = {} }) => {
      const { chat = true, context = null, context_now: now = context } = swarm;
      return { id, chat, context: now };
    });
  } catch (error) {
    if (error.name !== "ApiError") throw error; // the text beside Send reports that there is no model yet
    return [];
  }
}
