"""Measure how soon the broker notices that a worker has died, frozen, hung or wishes to go."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from time import monotonic, time

from bench_lib import BenchError, note, vocabulary_of
from bench_swarm import POLL_S
from recovery_swarm import Parts, Work

SETTLE_S = 0.4  # longer than a beat: a fault comes at any moment between two
HANG_AFTER = (30, 120)  # steps that a worker computes before it hangs


async def crash(parts: Parts) -> float:
    """Send SIGKILL to the process of the middle stage."""
    name = await parts.stage(1)
    sent_at = parts.signal(name, signal.SIGKILL)
    noticed_at = await parts.detected_at(sent_at)
    await parts.ended(name)
    parts.start(name)
    return noticed_at - sent_at


async def freeze(parts: Parts) -> float:
    """Send SIGSTOP; the worker goes on afterwards, and joins anew."""
    name = await parts.stage(1)
    sent_at = parts.signal(name, signal.SIGSTOP)
    try:
        return await parts.detected_at(sent_at) - sent_at
    finally:
        parts.signal(name, signal.SIGCONT)


async def hang(parts: Parts) -> float:
    """Hang the compute thread in the middle of its steps; the process lives and beats."""
    name = await parts.stage(1)
    await parts.kill(name)
    trace = parts.folder / f"hang-{random.randrange(1 << 40):x}"
    fault = f"step.computes=hang@{random.randint(*HANG_AFTER)}"
    parts.start(name, SWARM_FAILPOINTS=fault, SWARM_FAILPOINTS_TRACE=str(trace))
    hung_at = await _traced(trace)
    noticed_at = await parts.detected_at(hung_at)
    await parts.kill(name)
    parts.start(name)
    return noticed_at - hung_at


async def terminate(parts: Parts) -> float:
    """Send SIGTERM: the worker wishes to go, and is let go. Told by the broker's log, since nothing is lost by it."""
    name = await parts.stage(1)
    before = len(parts.logged("broker", "worker_leaves"))
    sent_at = time()
    parts.signal(name, signal.SIGTERM)
    await parts.ended(name)
    said = parts.logged("broker", "worker_leaves")[before:]
    if not said:
        raise BenchError(f"{name} ended without a word when it was asked to end")
    parts.start(name)
    return datetime.fromisoformat(str(said[0]["timestamp"])).timestamp() - sent_at


CLASSES: dict[str, Callable[[Parts], Awaitable[float]]] = {
    "crash": crash,
    "freeze": freeze,
    "hang": hang,
    "terminate": terminate,
}


async def _traced(trace: Path, within_s: float = 120.0) -> float:
    """Tell when the fault happened, by the process's own word."""
    give_up_at = monotonic() + within_s
    while monotonic() < give_up_at:
        if words := _words(trace):
            return float(words[-1])
        await asyncio.sleep(POLL_S)
    raise BenchError("the worker that was to hang did not")


async def detection(model: Path, classes: list[str], repetitions: int) -> dict[str, list[float]]:
    """Measure the seconds from the fault until the broker knows, of each class."""
    samples: dict[str, list[float]] = {name: [] for name in classes}
    async with Parts(model) as parts:
        for name in classes:
            for number in range(repetitions):
                await parts.whole()
                async with Work(parts.client, vocabulary_of(model)):
                    await asyncio.sleep(SETTLE_S + random.uniform(0.0, 0.2))
                    samples[name].append(await CLASSES[name](parts))
                note(f"{name} {number + 1} of {repetitions}: {samples[name][-1] * 1e3:.1f} ms")
    return samples


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
