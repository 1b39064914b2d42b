#!/usr/bin/env python3
"""Measure how fast a swarm generates, against others on the same machine, and what its parts cost or save.

All contestants are loaded at once and take turns within one run (A B, B A, …), so that whatever else the machine does
hits all alike; who is not on turn sleeps. The swarm is ``swarm up`` as anybody would start it. Ratios are medians over
rounds of neighbouring turns. Weights are random: what is computed costs the same.

    --what decode     tokens per second with 1 to 32 sequences, at a long context, and of prompts, against the peers
    --what pipeline   stages: one that holds everything, against two and three
    --what kv         the KV cache on and off
    --what bits       bits that are the same on every processor, against the quickest
    --what program    a step as one call, against module by module
    --what batching   ten requests of 50 tokens: one after the other, at the same time, as one batch
    --what prefix     time to the first token of a prompt whose beginning is known, and of one whose is not
    --what time       where the time of one token goes, with one sequence
    --what long       prompts of 4,000 to 24,000 tokens and decoding behind them, against the peers (a smaller model)
    --what sampled    sampled as people chat, out of 151,936 words, against greedy
    --what quantized  GGUF files (--kinds Q8_0,Q4_0,Q4_K_M) against llama.cpp, and shares of the memory's own speed
    --what int4       our own int4 and GPTQ, also with int8 rows, against plain weights; memory of each worker
    --what experts    a qwen3_moe in 4 bits (--kinds Q4_0,Q4_K_M) against llama.cpp
    --what starts     from the packed cache, against first starts (--kinds int4,Q4_K_M)

Peers (--peer A,B): transformers, its ``generate``; llama, llama.cpp in one process; llama-rpc, llama.cpp with its
layers on two RPC servers. llama.cpp needs an interpreter that has it (--llama-python), and gets a GGUF file of the same
weights, which is written beside the model's folder once. bench_agree.py shows that all compute the same.

Without --model, a Llama of bench_model.py's is written to --model-dir once: 1.1 B, for the last two modes smaller ones.
--float32 takes one in float32. See bench_load.py for loading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

import bench_weights as weights
from bench_cases import (
    OURS,
    TAIL,
    TIMEOUT_S,
    Bench,
    Case,
    compared,
    context_turns,
    generate,
    peer_turn,
    swarm_turn,
)
from bench_contestants import TRANSFORMERS, Peer, add_peer_options, peers_of
from bench_lib import (
    BenchError,
    Row,
    Turn,
    add_model_options,
    in_turns,
    model_of,
    note,
    random_prompt,
    run,
    tell,
    vocabulary_of,
)

from swarm import AsyncClient

CONTEXT = 1000
PREFIX = 1000
BLOCK = 32  # what the prefix cache counts in


CASES = (
    Case("decode-1", "decode", 1, target=2.0),
    Case("decode-4", "decode", 4),
    Case("decode-8", "decode", 8),
    Case("decode-10", "decode", 10, target=1.7),
    Case("decode-16", "decode", 16, target=1.7),
    Case("decode-32", "decode", 32),
    Case("context-16", "context", 16, CONTEXT, target=4.0),
    Case("prompt-128", "prompt", 1, 128),
    Case("prompt-512", "prompt", 1, 512),
    Case("prompt-1024", "prompt", 1, 1024),
)
PIPELINE_CASES = tuple(case for case in CASES if case.name in ("decode-1", "decode-4", "decode-16", "prompt-512"))
LONG_CASES = tuple(
    case
    for length in (4000, 12000, 24000)
    for case in (
        Case(f"prompt-{length}", "prompt", 1, length, target=1.2),
        Case(f"behind-{length}", "context", 1, length, target=1.3),
    )
)
SAMPLED_CASES = (Case("decode-1", "decode", 1), Case("decode-16", "decode", 16, target=0.97))
AS_PEOPLE_CHAT = {"temperature": 0.7, "top_p": 0.95}
KV_CASES = (
    Case("decode-1", "decode", 1),
    Case("decode-4", "decode", 4),
    Case("decode-1-after-256", "decode", 1, 256),
    Case("prompt-128", "prompt", 1, 128),
)
BATCH = (10, 50)  # requests, tokens of each


# --- modes ------------------------------------------------------------------------------------------------------------


async def decode(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    return await against_peers(bench, CASES)


async def long(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    return await against_peers(bench, LONG_CASES)


async def sampled(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    rows: list[Row] = []
    async with bench.swarm() as swarm:
        for case in bench.chosen(SAMPLED_CASES):
            note(f"{case.name} …")
            turns = {
                "greedy": swarm_turn(bench, swarm.client, case),
                "sampled": swarm_turn(bench, swarm.client, case, **AS_PEOPLE_CHAT),
            }
            rows.append(Row(case.name, "tok/s", await in_turns(turns, bench.rounds), "greedy", case.target))
    return rows, {"sampled": AS_PEOPLE_CHAT, "words": bench.vocabulary}


async def against_peers(bench: Bench, cases: Sequence[Case]) -> tuple[list[Row], dict[str, object]]:
    facts = bench.peers.versions()
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        peers = {name: await stack.enter_async_context(bench.peers.start(name)) for name in bench.peers.names}
        client = (await stack.enter_async_context(bench.swarm())).client
        bandwidth = await memory_speed(peers)
        for case in bench.chosen(cases):
            note(f"{case.name} …")
            if case.kind == "context":
                turns = await context_turns(bench, client, peers, case)
            else:
                turns = {name: peer_turn(bench, peer, case) for name, peer in peers.items()}
                turns[OURS] = swarm_turn(bench, client, case)
            target = case.target if TRANSFORMERS in peers else None
            rows.append(Row(case.name, "tok/s", await in_turns(turns, bench.rounds), target=target, subject=OURS))
        bandwidth = max(bandwidth, await memory_speed(peers))
    return rows, facts | (floor(bench.model, bandwidth, rows) if bandwidth else {})


async def memory_speed(peers: dict[str, Peer]) -> float:
    """Measure bytes per second as torch reads them; 0 if no peer has torch."""
    return await peers[TRANSFORMERS].ask("bandwidth") if TRANSFORMERS in peers else 0.0


def floor(model: Path, bandwidth: float, rows: list[Row]) -> dict[str, object]:
    """Compute what memory alone would allow one sequence: every weight but the embedding is read once per token."""
    config = json.loads((model / "config.json").read_text())
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    tied = bool(config.get("tie_word_embeddings"))
    embedding = 0 if tied else 2 * int(config["vocab_size"]) * int(config["hidden_size"])
    read = stored - embedding
    facts: dict[str, object] = {
        "memory": f"{bandwidth / 1e9:.1f} GB/s read",
        "floor": f"{read / 1e9:.2f} GB per token, {bandwidth / read:.1f} tok/s with one sequence",
    }
    for row in rows:
        if row.case == "decode-1":
            shares = {name: f"{100 * rate * read / bandwidth:.0f} %" for name, rate in row.medians.items()}
            facts["share of the floor"] = ", ".join(f"{name} {share}" for name, share in shares.items())
    return facts


async def pipeline(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    swarms = {f"{count} stage{'s' if count > 1 else ''}": bench.swarm(count) for count in (1, 2, 3)}
    return await compared(bench, swarms, PIPELINE_CASES), {"stages": "as stated"}


async def kv(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    swarms = {"without": bench.swarm(settings={"SWARM_BROKER__KV_CACHE": "false"}), "with KV cache": bench.swarm()}
    return await compared(bench, swarms, KV_CASES), {}


async def bits(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    swarms = {"fast": bench.swarm(), "portable": bench.swarm(settings={"SWARM_WORKER__BITS": "portable"})}
    return await compared(bench, swarms, PIPELINE_CASES), {}


async def program(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    swarms = {"modules": bench.swarm(settings={"SWARM_WORKER__PROGRAM": "off"}), "program": bench.swarm()}
    return await compared(bench, swarms, PIPELINE_CASES), {}


async def batching(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    count, new = BATCH[0], bench.new if bench.quick else BATCH[1]
    case = Case("", "decode", count)

    async with bench.swarm() as swarm:
        client = swarm.client

        async def one(prompt: list[int]) -> None:
            await client.generate(prompt, max_tokens=new, ignore_eos=True, timeout=TIMEOUT_S)

        async def sequential() -> float:
            began = perf_counter()
            for prompt in bench.prompts(case):
                await one(prompt)
            return perf_counter() - began

        async def concurrent() -> float:
            began = perf_counter()
            async with asyncio.TaskGroup() as group:
                for prompt in bench.prompts(case):
                    group.create_task(one(prompt))
            return perf_counter() - began

        async def batched() -> float:
            return await generate(client, bench.prompts(case), new)

        turns: dict[str, Turn] = {"sequential": sequential, "concurrent": concurrent, "batched": batched}
        seconds = await in_turns(turns, bench.rounds)
    rates = {name: [count * new / taken for taken in values] for name, values in seconds.items()}
    return [
        Row(f"{count} × {new} tokens", "s", seconds, "sequential"),
        Row(f"{count} × {new} tokens", "tok/s", rates, "sequential"),
    ], {}


async def prefix(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    async with bench.swarm() as swarm:
        known = random_prompt(PREFIX, bench.vocabulary)

        async def first_token(beginning: list[int]) -> float:
            return 1000 * await generate(swarm.client, [[*beginning, *random_prompt(TAIL, bench.vocabulary)]], 1)

        async def miss() -> float:
            return await first_token(random_prompt(PREFIX, bench.vocabulary))

        async def hit() -> float:
            return await first_token(known)

        await hit()
        before = await prefix_counters(swarm.client)
        samples = await in_turns({"unknown": miss, "known": hit}, bench.rounds)
        after = await prefix_counters(swarm.client)
    hits, positions = (now - then for now, then in zip(after, before, strict=True))
    if hits != bench.rounds + 1 or positions != hits * (PREFIX // BLOCK * BLOCK):
        raise BenchError(f"the cache was hit {hits} times with {positions} positions, not in every second turn")
    facts: dict[str, object] = {"positions taken from the cache": f"{PREFIX // BLOCK * BLOCK} of {PREFIX + TAIL}"}
    return [Row(f"first token, {PREFIX} known", "ms", samples, "unknown", 5.0)], facts


async def prefix_counters(client: AsyncClient) -> tuple[int, int]:
    found = (await client.query("stats"))["pipeline"]
    assert isinstance(found, dict)
    return int(found.get("prefix_hits", 0)), int(found.get("prefix_positions", 0))


async def time(bench: Bench) -> tuple[list[Row], dict[str, object]]:
    """Per token of one sequence, in milliseconds: each stage's computing and sampling; the rest is wire and broker."""
    shares: dict[str, list[float]] = {}

    def add(what: str, seconds: float) -> None:
        shares.setdefault(what, []).append(1000 * seconds)

    async with bench.swarm() as swarm:
        await generate(swarm.client, bench.prompts(CASES[0]), 2)
        for _ in range(bench.rounds):
            last: float | None = None
            stream = swarm.client.stream(
                bench.prompts(CASES[0])[0], max_tokens=bench.new, ignore_eos=True, hops=True, timeout=TIMEOUT_S
            )
            async for piece in stream:
                now = perf_counter()
                if last is not None and piece.hops:
                    add("a token", now - last)
                    known = 0.0
                    for number, hop in enumerate(piece.hops):
                        add(f"stage {number}: waiting", hop.wait_s)
                        add(f"stage {number}: computing", hop.compute_s)
                        add(f"stage {number}: sampling", hop.sample_s)
                        known += hop.wait_s + hop.compute_s + hop.sample_s
                    add("wire, broker, client", now - last - known)
                last = now
    return [Row(what, "ms", {"per token": values}) for what, values in shares.items()], {}


MODES = {
    "decode": decode,
    "pipeline": pipeline,
    "kv": kv,
    "bits": bits,
    "program": program,
    "batching": batching,
    "prefix": prefix,
    "time": time,
    "long": long,
    "sampled": sampled,
    "quantized": weights.gguf_files,
    "int4": weights.own,
    "experts": weights.experts,
    "starts": weights.starts,
}
SHAPES = {"long": "long", "sampled": "words"}  # of the modes that want another model than the usual one
QUICK_SHAPES = dict.fromkeys(("quantized", "int4", "starts"), "200m")  # the same with --quick


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=MODES, default="decode")
    add_model_options(parser)
    add_peer_options(parser)
    parser.add_argument("--cases", default="", metavar="A,B", help=f"some of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--kinds", default="", metavar="A,B", help="of quantized weights")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="environment of every swarm")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--new-tokens", type=int, default=32, help="per sequence")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each stage; 0: as swarm up chooses")
    parser.add_argument("--float32", action="store_true", help="a model in float32")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens: to see whether it works")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    shapes = SHAPES | (QUICK_SHAPES if arguments.quick else {})
    model = model_of(arguments, shapes.get(arguments.what, "1.1b"), wide=arguments.float32)
    bench = Bench(
        model,
        vocabulary_of(model),
        arguments.stages,
        arguments.threads,
        1 if arguments.quick else arguments.rounds,
        16 if arguments.quick else arguments.new_tokens,
        tuple(filter(None, arguments.cases.split(","))),
        arguments.quick,
        peers_of(arguments, model),
        tuple(filter(None, arguments.kinds.split(","))),
        dict(setting.split("=", 1) for setting in arguments.set),
    )
    rows, facts = run(MODES[arguments.what](bench))
    facts = {"model": str(model), "stages": bench.stages, **facts}
    tell(rows, arguments.what, facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
