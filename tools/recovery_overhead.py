"""What logs and beats cost while nothing happens: the same decoding with them and without, in turns."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
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
class Overhead:
    """Tokens per second with logs and beats and without, pair by pair. ``log_bytes_per_token``: in all logs together,
    for each position of a sequence."""

    on: list[float]
    off: list[float]
    log_bytes_per_token: float

    @property
    def costs(self) -> list[float]:
        """The part of the throughput that is lost, of each pair."""
        return [1 - mine / theirs for mine, theirs in zip(self.on, self.off, strict=True)]

    @property
    def cost(self) -> float:
        return median(self.costs)

    @property
    def spread(self) -> tuple[float, float]:
        """Between which half of all pairs lie."""
        if len(self.costs) < 2:
            return self.cost, self.cost
        low, _, high = quantiles(self.costs, n=4, method="inclusive")
        return low, high


async def overhead(model: Path, pairs: int, sequences: int, tokens: int) -> Overhead:
    vocabulary = vocabulary_of(model)
    async with AsyncExitStack() as stack:
        swarms = {}
        for name, settings in (("on", {}), ("off", OFF)):
            note(f"a swarm with logs and beats {name} starts …")
            swarms[name] = await stack.enter_async_context(
                Parts(model, settings={"SWARM_BROKER__PREFIX_CACHE": "false", **settings})
            )

        async def on() -> float:
            return await throughput(swarms["on"].client, vocabulary, sequences, tokens)

        async def off() -> float:
            return await throughput(swarms["off"].client, vocabulary, sequences, tokens)

        samples = await in_turns({"on": on, "off": off}, pairs)
        return Overhead(samples["on"], samples["off"], await log_bytes(swarms["on"].client, vocabulary))


async def throughput(client: AsyncClient, vocabulary: int, sequences: int, tokens: int) -> float:
    """Tokens per second of sequences that decode together, from when all of them do."""
    times: list[list[float]] = [[] for _ in range(sequences)]

    async def read(own: list[float]) -> None:
        prompt = random_prompt(PROMPT, vocabulary)
        async for _ in client.stream(prompt, max_tokens=tokens, ignore_eos=True, timeout=600.0):
            own.append(perf_counter())

    await asyncio.gather(*(read(own) for own in times))
    began, ended = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(began < moment <= ended for own in times for moment in own) / (ended - began)


async def log_bytes(client: AsyncClient, vocabulary: int) -> float:
    """Measured on a sequence that decodes for some seconds: each stage tells its log and its positions together."""
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
