"""Modes of bench_decode.py for weights of few bits: GGUF files, experts, our own int4 and GPTQ, and starts.

Every file is written once, beside the plain model: GGUF files by llama.cpp's own quantizer, which needs an interpreter
that has it (--llama-python). The contestants of one file are loaded at a time.

The case "floor": the share of the memory's own speed at which one sequence reads the weights while it generates, in
percent; 85 is the goal. A probe that only reads as many bytes with as many threads takes its turn in every round.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import psutil
from bench_cases import OURS, Bench, Case, context_turns, peer_turn, steady_rate, swarm_turn
from bench_contestants import LLAMA, LLAMA_RPC, TRANSFORMERS, Peers, quantized_gguf, run_writer
from bench_lib import TOOLS, BenchError, Row, Turn, in_turns, note
from bench_memory import MemoryProbe
from bench_swarm import Swarm

from swarm.demo import model_path

Outcome = tuple[list[Row], dict[str, object]]
Goals = dict[str, float]
Samples = dict[str, list[float]]

KINDS = ("Q8_0", "Q4_0", "Q4_K_M")
EXPERT_KINDS = ("Q4_0", "Q4_K_M")
START_KINDS = ("int4", "Q4_K_M")
CASES = {
    case.name: case
    for case in (
        Case("decode-1", "decode", 1),
        Case("decode-4", "decode", 4),
        Case("decode-8", "decode", 8),
        Case("decode-16", "decode", 16),
        Case("prompt-512", "prompt", 1, 512),
        Case("floor", "context", 1, 16),
    )
}
CROWD: Goals = {LLAMA: 1.2, LLAMA_RPC: 1.4}
FILE_GOALS: dict[str, Goals] = {
    "decode-1": {LLAMA: 1.0, LLAMA_RPC: 1.2},
    "floor": {},
    "decode-4": CROWD,
    "decode-16": CROWD,
    "prompt-512": {LLAMA: 1.5, LLAMA_RPC: 1.5},
}
EXPERT_GOALS: dict[str, Goals] = {
    "decode-1": {LLAMA: 1.2, LLAMA_RPC: 1.2},
    "decode-8": {LLAMA: 1.2, LLAMA_RPC: 1.2},
}
PLAIN, INT4, INT4_INT8, GPTQ, GPTQ_INT8 = "bfloat16", "int4", "int4+a8", "GPTQ", "GPTQ+a8"  # a8: int8 rows
OWN_GOALS: dict[str, Goals] = {"decode-1": {INT4: 3.0}, "floor": {}, "prompt-512": {INT4: 0.95, INT4_INT8: 1.5}}
MEMORY_GOALS: Goals = {INT4: 1 / 0.30}
FIRST, AGAIN = "first start", "from the packed cache"
START_GOALS: Goals = {AGAIN: 1 / 0.3}
PROBE = "probe"

INT4_WEIGHTS = {"SWARM_WORKER__WEIGHTS": "int4"}
INT8_ROWS = {"SWARM_WORKER__ACTIVATIONS": "int8"}


# --- against llama.cpp ------------------------------------------------------------------------------------------------


async def gguf_files(bench: Bench) -> Outcome:
    """Measure GGUF files of several types, each against llama.cpp with the same file."""
    peers = with_llama(bench.peers)
    rows, facts = [], peers.versions()
    for kind in bench.kinds or KINDS:
        file = quantized_gguf(bench.model, kind, peers.llama_python)
        rows += await against_llama(bench, replace(peers, model=file), kind, FILE_GOALS, facts)
    return rows, facts


async def experts(bench: Bench) -> Outcome:
    """Measure a qwen3_moe of 32 experts against llama.cpp with the same file."""
    peers = with_llama(bench.peers)
    plain = bench.model.with_name(f"qwen3moe{'-tiny' if bench.quick else ''}.gguf")
    if not plain.is_file():
        run_writer(plain, [sys.executable, str(TOOLS / "bench_experts.py"), str(plain), *bench.quickly("--tiny")])
    bench = replace(bench, vocabulary=512 if bench.quick else 32000)
    rows, facts = [], peers.versions()
    for kind in bench.kinds or EXPERT_KINDS:
        file = quantized_gguf(plain, kind, peers.llama_python)
        rows += await against_llama(bench, replace(peers, model=file), f"experts {kind}", EXPERT_GOALS, facts)
    return rows, facts | {"model": str(plain)}


def with_llama(peers: Peers) -> Peers:
    """Return the peers that were asked for, without transformers; both of llama.cpp's if none is left."""
    names = tuple(name for name in peers.names if name != TRANSFORMERS)
    return replace(peers, names=names or (LLAMA, LLAMA_RPC))


async def against_llama(
    bench: Bench, peers: Peers, title: str, goals: Mapping[str, Goals], facts: dict[str, object]
) -> list[Row]:
    """Measure the cases that have goals with one file. What else there is to tell is added to ``facts``."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        others = {name: await stack.enter_async_context(peers.start(name)) for name in peers.names}
        swarm = await stack.enter_async_context(Swarm(peers.model, bench.stages, bench.threads, bench.settings))
        read = dict.fromkeys(others, file_bytes_per_token(peers.model)) | {OURS: await bytes_per_token(swarm)}
        probe = stack.enter_context(MemoryProbe(read[OURS], bench.threads))
        for case in bench.chosen([CASES[name] for name in goals]):
            note(f"{title} {case.name} …")
            if case.kind == "context":
                turns = await context_turns(bench, swarm.client, others, case)
            else:
                turns = {name: peer_turn(bench, peer, case) for name, peer in others.items()}
                turns[OURS] = swarm_turn(bench, swarm.client, case)
            samples, speeds = await beside_probe(bench, probe, turns)
            name = f"{title} {case.name}"
            if case.kind == "context":
                rows.append(Row(name, "%", floor_shares(samples, read, speeds), subject=OURS))
            else:
                rows.append(Row(name, "tok/s", samples, subject=OURS, goals=goals[case.name]))
        facts[f"{title}, weights without the embedding"] = f"{read[OURS] / 1e6:.0f} MB"
        facts[f"{title}, kernels"] = await kernels_of(swarm)
    return rows


# --- against our own bfloat16 -----------------------------------------------------------------------------------------


async def own(bench: Bench) -> Outcome:
    """Measure int4 that is quantized at load, and GPTQ, against the plain weights: speed, and memory of each worker."""
    gptq = bench.model.with_name(f"{bench.model.name}-gptq")
    if not (gptq / "config.json").is_file():
        run_writer(gptq, [sys.executable, str(TOOLS / "bench_gptq.py"), str(bench.model), str(gptq)])
    ways: dict[str, tuple[Path, dict[str, str]]] = {
        PLAIN: (bench.model, {}),
        INT4: (bench.model, INT4_WEIGHTS),
        INT4_INT8: (bench.model, INT4_WEIGHTS | INT8_ROWS),
        GPTQ: (gptq, {}),
        GPTQ_INT8: (gptq, INT8_ROWS),
    }
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        swarms = {
            name: await stack.enter_async_context(Swarm(model, bench.stages, bench.threads, bench.settings | settings))
            for name, (model, settings) in ways.items()
        }
        read = {name: await bytes_per_token(swarm) for name, swarm in swarms.items()}
        probe = stack.enter_context(MemoryProbe(read[INT4], bench.threads))
        for case in bench.chosen([CASES[name] for name in OWN_GOALS]):
            note(f"{case.name} …")
            turns = {name: own_turn(bench, swarm, case) for name, swarm in swarms.items()}
            samples, speeds = await beside_probe(bench, probe, turns)
            if case.kind == "context":
                rows.append(Row(case.name, "%", floor_shares(samples, read, speeds), PLAIN))
            else:
                rows.append(Row(case.name, "tok/s", samples, PLAIN, goals=OWN_GOALS[case.name]))
        empty = await stack.enter_async_context(Swarm(model_path(), bench.stages, bench.threads))
        base = max(resident for _, resident in await memory_of(empty))
        rows += memory_rows({name: await memory_of(swarm) for name, swarm in swarms.items()}, base)
        facts: dict[str, object] = {f"{name}, kernels": await kernels_of(swarm) for name, swarm in swarms.items()}
    return rows, facts


def own_turn(bench: Bench, swarm: Swarm, case: Case) -> Turn:
    if case.kind != "context":
        return swarm_turn(bench, swarm.client, case)

    async def turn() -> float:
        return await steady_rate(swarm.client, bench.prompts(case), bench.new)

    return turn


async def memory_of(swarm: Swarm) -> list[tuple[float, float]]:
    """Return, for each stage, MiB of the weights as the worker counts them, and of the whole process, resident."""
    plan = cast(Any, await swarm.client.query("plan"))
    nodes = cast(Any, await swarm.client.query("nodes"))
    pids = {worker["name"]: worker["pid"] for worker in nodes["workers"]}
    return [
        (stage["weight_bytes"] / 2**20, psutil.Process(pids[stage["worker"]]).memory_info().rss / 2**20)
        for stage in plan["stages"]
    ]


def memory_rows(memory: Mapping[str, list[tuple[float, float]]], base: float) -> list[Row]:
    """Make rows of each stage's memory. ``base``: resident MiB of a worker of the demo model, which has hardly any
    weights."""
    rows = []
    for stage in range(len(memory[PLAIN])):
        weights = {name: [stages[stage][0]] for name, stages in memory.items()}
        process = {name: [stages[stage][1]] for name, stages in memory.items()}
        above = {name: [max(1.0, figure - base) for figure in figures] for name, figures in process.items()}
        rows.append(Row(f"stage {stage}: weights", "MiB", weights, PLAIN, goals=MEMORY_GOALS))
        rows.append(Row(f"stage {stage}: resident above a demo worker", "MiB", above, PLAIN, goals=MEMORY_GOALS))
        rows.append(Row(f"stage {stage}: whole process, resident", "MiB", process, PLAIN))
    return rows


# --- starts -----------------------------------------------------------------------------------------------------------


async def starts(bench: Bench) -> Outcome:
    """Measure starts with nothing packed yet, and starts that map what the first one has packed."""
    rows: list[Row] = []
    facts: dict[str, object] = {}
    for kind in bench.kinds or START_KINDS:
        settings = bench.settings | (INT4_WEIGHTS if kind == INT4 else {})
        model = bench.model if kind == INT4 else quantized_gguf(bench.model, kind, bench.peers.llama_python)
        seconds: dict[str, Samples] = {}
        for round_ in range(bench.rounds):
            with tempfile.TemporaryDirectory(prefix="swarm-bench-", dir=bench.model.parent) as cache:
                for start in (FIRST, AGAIN):
                    note(f"{kind}, {start}, round {round_ + 1} …")
                    for what, took in (await one_start(bench, model, settings | caches_in(cache))).items():
                        seconds.setdefault(what, {}).setdefault(start, []).append(took)
                facts[f"{kind}, cached"] = f"{folder_bytes(Path(cache)) / 1e6:.0f} MB"
        rows += [Row(f"{kind}, {what}", "s", samples, FIRST, goals=START_GOALS) for what, samples in seconds.items()]
    return rows, facts


async def one_start(bench: Bench, model: Path, settings: dict[str, str]) -> dict[str, float]:
    """Return the seconds from the command until the swarm serves, and those in which its slowest stage loaded."""
    began = perf_counter()
    async with Swarm(model, bench.stages, bench.threads, settings) as swarm:
        took = perf_counter() - began
        plan = cast(Any, await swarm.client.query("plan"))
    return {"until it serves": took, "loading": max(stage["load_s"] for stage in plan["stages"])}


def caches_in(folder: str) -> dict[str, str]:
    return {"SWARM_CACHE": folder, "XDG_CACHE_HOME": folder}


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- the floor --------------------------------------------------------------------------------------------------------


async def beside_probe(bench: Bench, probe: MemoryProbe, turns: Mapping[str, Turn]) -> tuple[Samples, list[float]]:
    """Take turns with the probe among them; return the contestants' samples, and the memory's speed in each round."""
    samples = await in_turns({**turns, PROBE: probe.turn}, bench.rounds)
    speeds = samples.pop(PROBE)
    return samples, speeds


def floor_shares(rates: Samples, read: Mapping[str, int], speeds: list[float]) -> Samples:
    """Return the percentage of the memory's speed, in the same round, at which each contestant reads its weights."""
    return {
        name: [100 * rate * read[name] / speed for rate, speed in zip(rates[name], speeds, strict=True)]
        for name in rates
    }


async def bytes_per_token(swarm: Swarm) -> int:
    """Return the bytes of weights that a token reads in a swarm: all layers and the head, not the embedding."""
    manifest = (await swarm.client.describe()).manifest
    if manifest is None:
        raise BenchError("the swarm has no model")
    return sum(manifest.layer_bytes) + manifest.head_bytes


def file_bytes_per_token(file: Path) -> int:
    """Return the same of a GGUF file as it is stored."""
    import gguf  # noqa: PLC0415 (needs a package that nothing else needs)

    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors if tensor.name != "token_embd.weight")


async def kernels_of(swarm: Swarm) -> str:
    plan = cast(Any, await swarm.client.query("plan"))
    return "; ".join(dict.fromkeys(stage["kernels"] for stage in plan["stages"]))
