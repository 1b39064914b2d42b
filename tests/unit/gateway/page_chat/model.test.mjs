import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError } from "../../../../swarm/gateway/console/page/api.js";
import { learnModel } from "../../../../swarm/gateway/console/page/model.js";
import { Store } from "../../../../swarm/gateway/console/page/store.js";

const VILLAGE = { id: "village", owned_by: "swarm", swarm: { chat: false, context: 2048, context_now: 512 } };
const LEARNT = { id: "village", chat: false, context: 512 };
const soon = () => new Promise((resolve) => setTimeout(resolve, 5));

// A page that was opened: answers are given in turn, an error is thrown.
function opened(...answers) {
  const store = new Store((draw) => setTimeout(draw));
  const talk = { model: null, notice: "not yet", set: (fields) => Object.assign(talk, fields) };
  const asked = [];
  const get = async (path) => {
    asked.push(path);
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    return answer;
  };
  learnModel(store, talk, { get });
  return { store, talk, asked };
}

test("a page that was opened while the swarm starts learns its model when it serves", async () => {
  const { store, talk, asked } = opened(new ApiError("no model yet", 503), { data: [VILLAGE] });
  await soon();
  store.setConnection("live");
  store.replace({ status: { state: "loading" } });
  await soon();
  assert.deepEqual([asked.length, talk.model], [1, null]);
  store.patch({ status: { state: "serving" } });
  await soon();
  assert.deepEqual([asked.length, talk.model, talk.mode, talk.notice], [2, LEARNT, "raw", ""]);
  store.patch({ status: { epoch: 2 } });
  await soon();
  assert.equal(asked.length, 2, "what is known is not asked for again");
});

test("a gateway that hears of the model later than the broker is asked once more", async () => {
  const { store, talk, asked } = opened({ data: [] }, { data: [] }, { data: [VILLAGE] });
  await soon();
  store.setConnection("live");
  store.replace({ status: { state: "serving" } });
  await soon();
  store.patch({ status: { epoch: 2 } });
  await soon();
  assert.equal(asked.length, 2, "each change of the status is no reason to ask at once");
  while (talk.model === null) await soon();
  assert.deepEqual([asked.length, talk.model], [3, LEARNT]);
});

test("of several models all can be chosen, and the chosen one stays", async () => {
  const other = { id: "town", owned_by: "swarm", swarm: { context: 4096 } };
  const external = { id: "far", owned_by: "others" };
  const data = [external, VILLAGE, other];
  const { store, talk } = opened({ data }, { data });
  await soon();
  assert.deepEqual(talk.models.map(({ id }) => id), ["village", "town", "far"]);
  assert.deepEqual(talk.model, LEARNT);
  talk.model = talk.models[1];
  store.setMe({});
  await soon();
  assert.deepEqual(talk.model, { id: "town", chat: true, context: 4096 });
});

test("that there is no model is said once the gateway has answered so, while the page is live", async () => {
  const { store, talk } = opened({ data: [] });
  store.setConnection("live");
  assert.equal(talk.lacks, undefined);
  await soon();
  assert.match(talk.lacks, /serves no model yet/);
  store.setConnection("reconnecting");
  await soon();
  assert.equal(talk.lacks, "");
  store.setConnection("locked");
  await soon();
  assert.match(talk.lacks, /needs a key/);
});

test("before the gateway has answered nothing is lacking", async () => {
  const store = new Store((draw) => setTimeout(draw));
  const talk = { model: null, set: (fields) => Object.assign(talk, fields) };
  learnModel(store, talk, { get: () => new Promise(() => {}) });
  store.setConnection("live");
  await soon();
  assert.equal(talk.lacks, "");
});
