#!/usr/bin/env python3
"""Measure what a death of the broker or of everything costs, and what the journal costs while the broker lives.

Broker and three workers are processes of their own. ``restart``: answers run, the broker is killed (SIGKILL) and
started again at once; told is how long until the next token, until everybody has one, and how much was computed again;
the tokens must be those of an undisturbed run. ``disk``: all processes are killed and started again; told is the time
to the first token of a long prompt that was answered before, with ``worker.spill`` and without. ``acceptance``: from a
request to the word that it is accepted, with its sync, one after the other. ``overhead``: decoding with a journal and
without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any, cast

import zmq
from bench_lib import (
    BenchError,
    Row,
    add_model_options,
    model_of,
    note,
    numbers,
    random_prompt,
    run,
    tell,
    vocabulary_of,
)
from bench_swarm import answers
from recovery_overhead import halves, paired
from recovery_swarm import Parts, percentile
from restart_disk import disk

from swarm.demo import model_path
from swarm.params import SamplingParams
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.messages import Accepted, Submit

WHAT = ("restart", "disk", "acceptance", "overhead")
BEFORE = 24  # tokens of each answer before the kill
AFTER = 40
WAIT_S = 600.0


async def one_restart(parts: Parts, vocabulary: int, sequences: int) -> dict[str, float]:
    prompts = [random_prompt(64, vocabulary) for _ in range(sequences)]
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        killed_at = parts.signal("broker", signal.SIGKILL)
        await parts.ended("broker")
        parts.start_broker()

    calm = await answers(parts.client, prompts, BEFORE, AFTER)
    disturbed = await answers(parts.client, prompts, BEFORE, AFTER, kill)
    if [stream.tokens for stream in calm] != [stream.tokens for stream in disturbed]:
        raise BenchError(f"{sequences} sequences: the tokens differ from those of the undisturbed run")
    gaps = [max(stream.gaps(stream.times[BEFORE // 2])) for stream in calm]
    # What was under way to the client when the broker died still arrives: the first after the longest pause counts.
    firsts = [_after_the_pause(stream.times, killed_at) - killed_at for stream in disturbed]
    pipeline = cast(dict[str, Any], (await parts.client.query("stats"))["pipeline"])
    return {
        "next": min(firsts),
        "all": max(firsts),
        "usual": max(gaps),
        "recomputed": float(pipeline.get("replayed_layer_positions", 0)),
        "taken_back": float(pipeline.get("sequences_taken_back", 0)),
    }


def _after_the_pause(times: list[float], since: float) -> float:
    pairs = [(after - before, after) for before, after in itertools.pairwise(times) if after > since]
    return max(pairs)[1]


async def restart(model: Path, sizes: Sequence[int], rounds: int) -> tuple[list[Row], dict[str, object]]:
    rows: list[Row] = []
    facts: dict[str, object] = {}
    async with Parts(model, journal=True, settings={"SWARM_BROKER__PREFIX_CACHE": "false"}) as parts:
        for size in sizes:
            found = []
            for number in range(rounds):
                note(f"{size} sequences, kill {number + 1} …")
                found.append(await one_restart(parts, vocabulary_of(model), size))
            samples = {f"to {name} token": [each[key] * 1e3 for each in found] for name, key in _NAMES.items()}
            rows.append(Row(f"{size} running", "ms", samples))
            again = sum(each["recomputed"] for each in found)
            facts[f"{size} running: layer·positions computed again"] = again
            facts[f"{size} running: went on from what workers held"] = [each["taken_back"] for each in found]
    return rows, facts


_NAMES = {"the next": "next", "everybody's": "all"}


async def acceptance(model: Path, num: int) -> tuple[list[Row], dict[str, object]]:
    samples: dict[str, list[float]] = {}
    facts: dict[str, object] = {}
    for name, journal in (("with journal", True), ("without", False)):
        async with Parts(model, journal=journal) as parts:
            samples[name] = await accepted(parts.url, num)
            if journal:
                facts |= await _bytes(parts, vocabulary_of(model))
    rows = [
        Row(f"p{percent}", "ms", {name: [percentile(values, percent) * 1e3] for name, values in samples.items()})
        for percent in (50, 99)
    ]
    return rows, facts


async def accepted(url: str, num: int) -> list[float]:
    """Measure seconds from a submission to its acceptance, over one connection, one at a time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = DealerChannel(context, url, b"bench", SERVER.frame_limit_bytes)
    found: list[float] = []
    sent_at = 0.0
    try:
        async for event in channel:
            if isinstance(event, ConnectionEvent):
                if event is ConnectionEvent.CONNECTED:
                    sent_at = _submit(channel, 0)
                continue
            message, _ = SERVER.decode(event)
            if isinstance(message, Accepted):
                found.append(time.perf_counter() - sent_at)
                if len(found) >= num:
                    break
                await asyncio.sleep(0.02)  # its one token is on its way meanwhile, and no rival
                sent_at = _submit(channel, len(found))
    finally:
        channel.close()
        context.term()
    return found


def _submit(channel: DealerChannel, number: int) -> float:
    request = Submit(request_id=f"bench-{number}", prompt=(5, 6, 7), params=SamplingParams(max_tokens=1), seed=1)
    began = time.perf_counter()
    channel.send(CLIENT.encode(request))
    return began


async def _bytes(parts: Parts, vocabulary: int) -> dict[str, object]:
    """Measure what an ended request takes in the journal."""
    file = parts.folder / "state" / "journal.db"
    before = _size(file)
    num, length = 32, 256
    prompts = [random_prompt(64, vocabulary) for _ in range(num)]
    await asyncio.gather(
        *(parts.client.generate(p, max_tokens=length, ignore_eos=True, timeout=WAIT_S) for p in prompts)
    )
    await asyncio.sleep(1.0)  # the last ends are written when nobody waits for them
    each = (_size(file) - before) / num
    return {
        f"journal bytes for an ended request of 64 + {length} tokens": round(each),
        "and for each of its tokens": round(each / (64 + length), 1),
    }


def _size(file: Path) -> int:
    """Measure what is in the database, its write-ahead log counted."""
    with closing(sqlite3.connect(file)) as db:
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return int((pages - free) * size)


async def overhead(model: Path, pairs: int, sequences: int, tokens: int) -> tuple[list[Row], dict[str, object]]:
    async with AsyncExitStack() as stack:
        swarms = []
        for journal in (True, False):
            parts = Parts(model, journal=journal, settings={"SWARM_BROKER__PREFIX_CACHE": "false"})
            swarms.append(await stack.enter_async_context(parts))
        on, off = swarms
        found = await paired(on, off, pairs, sequences, tokens)
        journal = cast(dict[str, Any], (await on.client.query("stats"))["journal"])
    facts: dict[str, object] = {"journal": journal}
    for name, values in (("throughput lost", found.costs), ("more to compute", found.computed)):
        low, high = halves(values)
        facts[name] = f"{median(values):.1%}, half of the pairs between {low:.1%} and {high:.1%}"
    rates = {"with journal": found.on.rates, "without": found.off.rates}
    computed = {"with journal": _us(found.on.computed), "without": _us(found.off.computed)}
    return [
        Row(f"{sequences} sequences", "tok/s", rates, baseline="without"),
        Row("processor time of a token", "µs", computed, baseline="without"),
    ], facts


def _us(seconds: list[float]) -> list[float]:
    return [each * 1e6 for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--demo", action="store_true", help="the embedded model")
    parser.add_argument("--what", choices=WHAT, default="restart")
    parser.add_argument("--sequences", type=numbers, default=(1, 16, 64), metavar="N,N", help="for restart")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each size, or of each side")
    parser.add_argument("--positions", type=int, default=4000, help="of the prompt, for disk")
    parser.add_argument("--times", type=int, default=200, help="acceptances")
    parser.add_argument("--pairs", type=int, default=10, help="for overhead")
    parser.add_argument("--tokens", type=int, default=128, help="for overhead")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    shape = "200m" if arguments.what == "disk" else "1.1b"
    model = Path(model_path()) if arguments.demo else model_of(arguments, shape)
    measured = {
        "restart": lambda: restart(model, arguments.sequences, arguments.rounds),
        "disk": lambda: disk(model, arguments.positions, arguments.rounds),
        "acceptance": lambda: acceptance(model, arguments.times),
        "overhead": lambda: overhead(model, arguments.pairs, 16, arguments.tokens),
    }[arguments.what]
    rows, facts = run(measured())
    title = "a restart of everything" if arguments.what == "disk" else f"the broker's {arguments.what}"
    tell(rows, title, {"model": str(model), **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()
