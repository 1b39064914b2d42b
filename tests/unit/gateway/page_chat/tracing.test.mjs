import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { TraceReader } from "../../../../swarm/gateway/console/page/tracing.js";

const report = (numTokens) => ({ sequences: [{ tokens: Array.from({ length: numTokens }, () => ({})) }] });

// A page whose timeline is in sight or not, with a clock that the test moves.
function reading({ isSeen = true, numTokens = 1 } = {}) {
  mock.timers.enable({ apis: ["setTimeout"] });
  let now = 0;
  mock.method(performance, "now", () => now);
  globalThis.document = Object.assign(new EventTarget(), { hidden: false });
  let look;
  globalThis.IntersectionObserver = class {
    constructor(told) {
      look = (isIntersecting) => told([{ isIntersecting }]);
    }
    observe() {}
  };
  const asked = [];
  const api = { get: async (path) => (asked.push(path), report(numTokens)) };
  const told = [];
  const reader = new TraceReader(api, null, (...words) => told.push(words));
  look(isSeen);
  const pass = async (seconds) => {
    for (let tenth = 0; tenth < seconds * 10; tenth += 1) {
      now += 100;
      mock.timers.tick(100);
      await new Promise(setImmediate);
    }
  };
  return { reader, asked, told, pass, look };
}

test("what runs and is looked at is asked for once a second", async () => {
  const { reader, asked, pass, look } = reading();
  reader.follow("8f3c", true);
  await pass(5);
  assert.ok(asked.length >= 4 && asked.length <= 5, `${asked.length} times`);
  const before = asked.length;
  for (let times = 0; times < 9; times += 1) {
    look(false);
    look(true);
    await pass(0.1);
  }
  assert.ok(asked.length <= before + 1); // scrolling to and fro asks no more often
  mock.reset();
  mock.timers.reset();
});

test("a long report is asked for more seldom", async () => {
  const { reader, asked, pass } = reading({ numTokens: 900 });
  reader.follow("8f3c", true);
  await pass(13);
  assert.equal(asked.length, 3);
  mock.reset();
  mock.timers.reset();
});

test("what nobody looks at is asked for when it ends, and before its tokens are forgotten", async () => {
  const { reader, asked, pass } = reading({ isSeen: false });
  reader.follow("8f3c", true);
  reader.grown(799);
  await pass(5);
  assert.equal(asked.length, 0);
  reader.grown(800);
  await pass(2);
  assert.equal(asked.length, 1);
  reader.follow("8f3c", false);
  await pass(5);
  assert.equal(asked.length, 2);
  mock.reset();
  mock.timers.reset();
});
