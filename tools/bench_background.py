#!/usr/bin/env python3
"""Measure how far work in the background slows one answer: right after the start, and right after a recovery.

``swarm up`` serves a model with two workers. One sequence is decoded from the moment the swarm serves (``start``), and
again from the first token after a worker's SIGKILL (``recovery``). Each row compares the tokens of the first ten
seconds with the steady rate: the median of three windows once every worker has loaded what it keeps warm for others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench_lib import Row, add_model_options, model_of, note, random_prompt, run, tell, vocabulary_of
from bench_swarm import Stream, Swarm

NUM_WORKERS = 2
WINDOW_S = 10.0
STEADY_WINDOWS = 3
WARM_WITHIN_S = 600.0
BEFORE_KILL = 10  # tokens


async def decode(swarm: Swarm, vocabulary: int, stream: Stream, num_tokens: int) -> None:
    """Decode one sequence; the times of its tokens are in ``stream``."""
    prompt = random_prompt(16, vocabulary)
    async for piece in swarm.client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, timeout=WARM_WITHIN_S):
        stream.tokens.append(int(piece.token or 0))
        stream.times.append(time.monotonic())


async def rate(swarm: Swarm, vocabulary: int) -> float:
    """Tokens per second of one sequence, from its first token on, over a window."""
    stream = Stream()
    await _until_window_ends(asyncio.create_task(decode(swarm, vocabulary, stream, 1_500)), stream, 0.0)
    return per_second(stream, stream.times[0])


async def _until_window_ends(decoding: asyncio.Task[None], stream: Stream, since: float) -> float:
    """Let the answer run until a window after its first token later than ``since``; return when that token came."""
    first = 0.0
    while not decoding.done() and not (first and stream.times[-1] > first + WINDOW_S):
        await asyncio.sleep(0.02)
        first = first or next((at for at in stream.times if at > since), 0.0)
    decoding.cancel()
    await asyncio.wait([decoding])
    return first


def per_second(stream: Stream, first: float) -> float:
    times = [at for at in stream.times if first <= at <= first + WINDOW_S]
    return (len(times) - 1) / (times[-1] - times[0])


async def all_warm(swarm: Swarm) -> float:
    """Wait until all workers serve and every layer is kept warm by another one; return the seconds it took."""
    began = time.monotonic()

    def is_warm(nodes: Mapping[str, Any]) -> bool:
        members = [row for row in nodes["workers"] if row["state"] == "member" and row["layers"]]
        warm = {layer for row in members for first, stop in row["standby"] for layer in range(first, stop)}
        served = {layer for row in members for layer in range(*row["layers"])}
        return len(members) == NUM_WORKERS and warm == served

    await swarm.until("nodes", is_warm, WARM_WITHIN_S)
    return time.monotonic() - began


async def steady_rate(swarm: Swarm, vocabulary: int) -> float:
    await all_warm(swarm)
    return median([await rate(swarm, vocabulary) for _ in range(STEADY_WINDOWS)])


async def kill_a_worker(swarm: Swarm) -> float:
    nodes = await swarm.client.query("nodes")
    pid = next(row["pid"] for row in nodes["workers"] if row["state"] == "member")
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


async def one_round(model: Path) -> dict[str, float]:
    vocabulary = vocabulary_of(model)
    async with Swarm(model, NUM_WORKERS) as swarm:
        stream = Stream()
        await _until_window_ends(asyncio.create_task(decode(swarm, vocabulary, stream, 1_500)), stream, 0.0)
        found = {"start": per_second(stream, stream.times[0])}
        note(f"  start {found['start']:.1f} tokens/s; warm {await all_warm(swarm):.0f} s later")
        found["steady"] = await steady_rate(swarm, vocabulary)
        stream = Stream()
        decoding = asyncio.create_task(decode(swarm, vocabulary, stream, 1_500))
        while len(stream.times) < BEFORE_KILL:  # noqa: ASYNC110 (the answer's own task fills it)
            await asyncio.sleep(0.02)
        killed_at = await kill_a_worker(swarm)
        last = stream.times[-1]
        first = await _until_window_ends(decoding, stream, max(killed_at, last) + 0.2)
        found |= {"recovery": per_second(stream, first), "stall": first - killed_at}
        found["gaps"] = sum(gap for gap in stream.gaps(first) if gap > 0.5)
        note(f"  recovery {found['recovery']:.1f} tokens/s; warm {await all_warm(swarm):.0f} s later")
        found["steady after"] = await steady_rate(swarm, vocabulary)
    return found


async def measure(model: Path, rounds: int) -> tuple[list[Row], dict[str, object]]:
    found = []
    for number in range(rounds):
        note(f"round {number + 1} of {rounds} …")
        found.append(await one_round(model))
    rows = [
        Row(
            case, "tokens/s", {name: [each[case] for each in found], "steady": [each[calm] for each in found]}, "steady"
        )
        for case, calm, name in (("start", "steady", "first 10 s"), ("recovery", "steady after", "first 10 s"))
    ]
    facts = {"longest stall (s)": [round(each["stall"], 2) for each in found]}
    facts["gaps over 0.5 s within the ten seconds (s)"] = [round(each["gaps"], 2) for each in found]
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shape", default="1.1b", help="of the model that is made where none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    rows, facts = run(measure(model_of(arguments, arguments.shape), arguments.rounds))
    tell(rows, "one sequence beside work in the background", facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
