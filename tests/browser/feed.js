// Takes the place of the gateway's stream at /console/live: a test says what is told, and how fast. Everything else is
// fetched as ever. `window.feed.view` is set before the page's scripts run.
(() => {
  const fetched = window.fetch.bind(window);
  const encoder = new TextEncoder();
  const readers = new Set();
  let number = 0;
  let ticks = 0;
  let recoveries = [];

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

  window.fetch = async (asked, options = {}) => {
    const { pathname } = new URL(asked.url ?? asked, location.href);
    const headers = { "content-type": "text/event-stream" };
    if (pathname === "/console/live") return new Response(stream(options.signal), { headers });
    if (window.feed.words === null) return fetched(asked, options);
    if (pathname.startsWith("/console/trace/")) return Response.json(trace());
    if (pathname !== "/v1/completions") return fetched(asked, options);
    await new Promise(requestAnimationFrame);
    if (window.feed.answered >= window.feed.until) await new Promise((go) => (window.feed.go = go));
    return new Response(answer(), { headers: { ...headers, "x-request-id": came() } });
  };

  // The answer to any prompt, where a test gives its words: at once, a token each.
  function answer() {
    const chunk = (text, finish_reason = null) => ({ choices: [{ index: 0, text, finish_reason }] });
    const chunks = [...window.feed.words.map((word) => chunk(word)), chunk("", "stop")];
    return [...chunks.map((each) => JSON.stringify(each)), "[DONE]"].map((data, at) => `id: answer-${at}\ndata: ${data}\n\n`).join("");
  }

  function trace() {
    const stages = [{ worker: "w0", layers: [0, 8], compute_s: 0.01 }];
    const times = { total_s: 0.012, wire_s: 0.002, stages };
    const tokens = window.feed.words.map((_, index) => ({ index, began_s: index / 100, ...times }));
    const [num, sums] = [tokens.length, { wire_s: 0.002 * tokens.length, total_s: 0.012 * tokens.length }];
    return { sequences: [{ num_tokens: num, num_traced: num, sums, stages, tokens }] };
  }

  // What is told beside each answer: it comes and the one before it has ended, something happens, something healed.
  function came() {
    const at = window.feed.view.at + (window.feed.answered += 1);
    const [row] = Object.values(window.feed.view.requests);
    const id = (number) => number.toString(16).padStart(32, "a");
    const [own, last, old] = [0, 1, 20].map((ago) => id(window.feed.answered - ago));
    const named = (request_id, state) => ({ ...row, request_id, state, began_at: at, ended_at: at });
    const healed = { key: own, began_at: at, sentence: `healed before ${own}`, phases: [], workers: [] };
    recoveries = [healed, ...recoveries].slice(0, 8);
    push("delta", {
      at,
      requests: { [own]: named(own, "running"), [last]: null },
      ended: { [last]: named(last, "ended"), [old]: null },
      recoveries,
    });
    push("events", [{ time: at, event: "worker_joined", text: `before ${own}` }]);
    return own;
  }

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

  window.feed = { view: null, words: null, answered: 0, until: Infinity, push, hurry };
})();
