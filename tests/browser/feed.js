// Takes the place of the gateway's stream at /console/live: a test says what is told, and how fast. Everything else is
// fetched as ever. `window.feed.view` is set before the page's scripts run.
(() => {
  const fetched = window.fetch.bind(window);
  const encoder = new TextEncoder();
  const readers = new Set();
  let number = 0;
  let ticks = 0;

  const written = (event, data) => encoder.encode(`id: test-${(number += 1)}\nevent: ${event}\ndata: ${JSON.stringify(data)}\n\n`);

  function push(event, data) {
    const bytes = written(event, data);
    for (const reader of readers) reader.enqueue(bytes);
  }

  function stream(signal) {
    let mine;
    const leave = () => readers.delete(mine);
    return new ReadableStream({
      start(reader) {
        mine = reader;
        readers.add(reader);
        reader.enqueue(written("snapshot", window.feed.view));
        signal?.addEventListener("abort", () => {
          leave();
          reader.error(new DOMException("the page hung up", "AbortError"));
        });
      },
      cancel: leave,
    });
  }

  window.fetch = (asked, options = {}) => {
    const { pathname } = new URL(asked.url ?? asked, location.href);
    if (pathname !== "/console/live") return fetched(asked, options);
    const headers = { "content-type": "text/event-stream" };
    return Promise.resolve(new Response(stream(options.signal), { headers }));
  };

  // Tell `count` deltas of a busy swarm, a tenth of a second apart by their own clock, `each` of them a frame.
  // Returns the milliseconds between frames.
  async function hurry(count, each) {
    const frames = [];
    let last = performance.now();
    for (let told = 1; told <= count; told += 1) {
      busy((ticks += 1));
      if (told % each > 0) continue;
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      frames.push(now - last);
      last = now;
    }
    return frames;
  }

  // Figures change all the while, and every five seconds a request comes, one ends, and a worker joins.
  function busy(tick) {
    const { view } = window.feed;
    const at = view.at + tick / 10;
    const incarnations = Object.keys(view.workers);
    const worker = incarnations[tick % incarnations.length];
    const verdict = tick % 11 ? "well" : "slow";
    push("delta", {
      at,
      rates: { tokens_per_s: 100 + (tick % 50), steps_per_s: 90 + (tick % 7), between_tokens_s: 0.01 + (tick % 9) / 1000 },
      workers: { [worker]: { kv_used: tick % 1000, verdict, evidence: `looked at ${tick} times` } },
      requests: { [Object.keys(view.requests)[0]]: { num_tokens: tick % 1500 } },
    });
    if (tick % 50 > 0) return;
    const [row] = Object.values(view.requests);
    const named = (id, state) => ({ [id]: { ...row, request_id: id, state } });
    push("delta", {
      requests: { ...named(`come-${tick}`, "running"), [`come-${tick - 500}`]: null },
      ended: { ...named(`come-${tick - 500}`, "ended"), [`come-${tick - 1500}`]: null },
    });
    push("events", [{ time: at, event: "worker_joined", text: `w${tick} is here`, worker: `w${tick}` }]);
  }

  window.feed = { view: null, push, hurry };
})();
