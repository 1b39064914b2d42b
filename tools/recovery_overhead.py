"""Measure what logs and beats cost while nothing happens: the same decoding with and without, in turns."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any, cast

from bench_lib import in_turns, note, random_prompt, vocabulary_of
from recovery_swarm import Parts

from swarm import AsyncClient

PROMPT = 16
# A swarm that notices nothing and could rebuild from nothing but tokens.
OFF = {
    "SWARM_WORKER__LOG_BYTES": "0",
    "SWARM_WORKER__BEAT_INTERVAL_S": "60",
    "SWARM_HEALTH__BEAT_TIMEOUT_S": "3600",
}


@dataclass(frozen=True)
class Side:
    """Collect of each turn tokens per second, and seconds of processor time of all processes for each token."""

    rates: list[float]
    computed: list[float]


@dataclass(frozen=True)
class Paired:
    """Compare turns with something and without, pair by pair."""

    on: Side
    off: Side

    @property
    def costs(self) -> list[float]:
        """The part of the throughput that is lost."""
        return [1 - mine / theirs for mine, theirs in zip(self.on.rates, self.off.rates, strict=True)]

    @property
    def computed(self) -> list[float]:
        """The part that there is more to compute: where processors are busy all the time, this is lost, and
        whatever else the machine does hardly moves it."""
        return [mine / theirs - 1 for mine, theirs in zip(self.on.computed, self.off.computed, strict=True)]


def halves(values: list[float]) -> tuple[float, float]:
    """Tell between which figures half of them lie."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Overhead:
    """``log_bytes_per_token``: in all logs together, for each position of a sequence."""

    pairs: Paired
    log_bytes_per_token: float


async def overhead(model: Path, pairs: int, sequences: int, tokens: int) -> Overhead:
    async with AsyncExitStack() as stack:
        swarms = []
        for name, settings in (("on", {}), ("off", OFF)):
            note(f"a swarm with logs and beats {name} starts …")
            parts = Parts(model, settings={"SWARM_BROKER__PREFIX_CACHE": "false", **settings})
            swarms.append(await stack.enter_async_context(parts))
        on, off = swarms
        found = await paired(on, off, pairs, sequences, tokens)
        return Overhead(found, await log_bytes(on.client, vocabulary_of(model)))


async def paired(on: Parts, off: Parts, pairs: int, sequences: int, tokens: int) -> Paired:
    """Decode sequences together in one swarm, then as many in the other."""
    vocabulary = vocabulary_of(on.model)
    computed: dict[str, list[float]] = {"on": [], "off": []}

    async def turn(name: str, parts: Parts) -> float:
        before = parts.computed_s()
        rate = await throughput(parts.client, vocabulary, sequences, tokens)
        computed[name].append((parts.computed_s() - before) / (sequences * tokens))
        return rate

    rates = await in_turns({"on": lambda: turn("on", on), "off": lambda: turn("off", off)}, pairs)
    return Paired(*(Side(rates[name], computed[name][-pairs:]) for name in ("on", "off")))


async def throughput(client: AsyncClient, vocabulary: int, sequences: int, tokens: int) -> float:
    """Measure tokens per second of sequences that decode together, from when all of them do."""
    times: list[list[float]] = [[] for _ in range(sequences)]

    async def read(own: list[float]) -> None:
        prompt = random_prompt(PROMPT, vocabulary)
        async for _ in client.stream(prompt, max_tokens=tokens, ignore_eos=True, timeout=600.0):
            own.append(perf_counter())

    await asyncio.gather(*(read(own) for own in times))
    began, ended = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(began < moment <= ended for own in times for moment in own) / (ended - began)


async def log_bytes(client: AsyncClient, vocabulary: int) -> float:
    """Measure the logs on a sequence that decodes for some seconds: stages tell their logs with their positions."""
    found: dict[str, float] = {}

    async def look() -> None:
        while True:
            stages = cast(dict[str, Any], (await client.query("stats"))["stages"])
            for name, values in stages.items():
                if values.get("log_bytes") and values.get("kv_used"):
                    found[name] = values["log_bytes"] / values["kv_used"]
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    ongoing = client.stream(random_prompt(480, vocabulary), max_tokens=480, ignore_eos=True, timeout=600.0)
    began = perf_counter()
    async for _ in ongoing:
        if len(found) >= 2 and perf_counter() - began > 4.0:
            break
    await ongoing.aclose()
    looking.cancel()
    return sum(found.values())
