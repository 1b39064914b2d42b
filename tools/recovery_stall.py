"""Measure what a killed worker costs running answers, by where its layers come back."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_lib import note, random_prompt, vocabulary_of
from bench_swarm import Stream, answers, check_tokens
from recovery_swarm import STAGES, Parts, percentile, pins

BEFORE = 12  # tokens of each answer before the kill
AFTER = 24  # and after it
PARTS = ("detect", "plan", "load", "activate", "replay", "resume")


@dataclass(frozen=True)
class Case:
    """``before``, ``after``: tokens of each answer before the kill and after it."""

    sequences: int
    context: int
    before: int = BEFORE
    after: int = AFTER

    @property
    def name(self) -> str:
        return f"{self.sequences} × {self.context}"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        return [random_prompt(max(1, self.context - self.before), vocabulary) for _ in range(self.sequences)]


@dataclass(frozen=True)
class Way:
    """One way back. ``cold``: who takes over is started anew before each kill, so that it has loaded nothing.
    ``restarts``: nobody else can take the layers, and the worker is started again as soon as it has ended."""

    name: str
    standby: str = "none"
    pinned: bool = False
    spare: bool = False
    restarts: bool = False
    source: str = "logs"


WAYS = {
    way.name: way
    for way in (
        Way("standby", standby="neighbours"),
        Way("spare", pinned=True, spare=True),
        Way("restart", pinned=True, restarts=True),
        Way("tokens", standby="neighbours", source="tokens"),
    )
}


def usual_gap(calm: list[Stream]) -> float:
    """Find the 99th percentile of undisturbed gaps, once all go on together: before, prompts were still computed."""
    since = max(stream.times[0] for stream in calm)
    return percentile([gap for stream in calm for gap in stream.gaps(since)[1:]], 99)


@dataclass
class Outcome:
    """The outcome of one kill, in seconds. ``split``: what the broker recorded; ``detect`` counts from the signal."""

    way: str
    case: str
    stall_s: float
    usual_s: float
    split: dict[str, float | None]
    predicted_s: float | None
    ratio: float | None
    choice: str


@asynccontextmanager
async def swarm_for(way: Way, model: Path) -> AsyncIterator[Parts]:
    num_layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    settings = {
        "SWARM_RECOVERY__SOURCE": way.source,
        "SWARM_PLAN__STANDBY": way.standby,
        "SWARM_BROKER__PREFIX_CACHE": "false",
        "SWARM_BROKER__SETTLE_S": "0.2",
    }
    spares = ("spare",) if way.spare else ()
    async with Parts(model, pins(num_layers) if way.pinned else "", settings, spares) as parts:
        yield parts


async def nothing() -> None:
    """Do nothing before a kill."""


async def one_kill(
    parts: Parts,
    way: Way,
    prompts: list[list[int]],
    *,
    before_kill: Callable[[], Awaitable[None]] = nothing,
    lengths: tuple[int, int] = (BEFORE, AFTER),
    enough: int | None = None,
) -> dict[str, Any]:
    """Kill the middle stage's process while these answers run, and bring the swarm back to what it was. ``lengths``:
    tokens of an answer before the kill and after it."""
    victim = await parts.stage(1)
    sent_at = 0.0

    async def kill() -> None:
        nonlocal sent_at
        await before_kill()
        sent_at = parts.signal(victim, signal.SIGKILL)
        await parts.ended(victim)
        if way.restarts:
            parts.start(victim)

    streams = await answers(parts.client, prompts, *lengths, kill, enough=enough)
    entry = await parts.recovery(sent_at)
    if not way.restarts:
        parts.start(victim)
    if way.spare:  # a new process, which has loaded nothing
        await parts.until("status", lambda status: status["num_workers"] == STAGES + 1)
        await parts.kill("spare")
        parts.start("spare")
    await parts.whole()
    split = {part: entry["measured"][f"{part}_s"] for part in PARTS}
    split["detect"] = entry["detected_at"] - sent_at
    # The record ends with the broker's step, the stall with the client's token.
    return {"streams": streams, "split": split, "entry": entry, "sent_at": sent_at}


async def stall(model: Path, ways: list[str], cases: list[Case], repetitions: int) -> list[Outcome]:
    """Kill in every case by every way. One swarm for each way; the undisturbed runs are those of the first."""
    vocabulary = vocabulary_of(model)
    prompts = {case: case.prompts(vocabulary) for case in cases}
    calm: dict[Case, list[Stream]] = {}
    found: list[Outcome] = []
    for way in (WAYS[name] for name in ways):
        note(f"{way.name}: a swarm starts …")
        async with swarm_for(way, model) as parts:
            for case in cases:
                if case not in calm:
                    calm[case] = await answers(parts.client, prompts[case], BEFORE, AFTER)
                usual_s = usual_gap(calm[case])
                for _ in range(repetitions):
                    killed = await one_kill(parts, way, prompts[case])
                    check_tokens(killed["streams"], calm[case], way.name)
                    found.append(_outcome(way, case, usual_s, killed))
                    split = ", ".join(f"{part} {(found[-1].split[part] or 0.0) * 1e3:.1f}" for part in PARTS)
                    note(f"{way.name}, {case.name}: {found[-1].stall_s * 1e3:.1f} ms; {split}")
    return found


def _outcome(way: Way, case: Case, usual_s: float, killed: dict[str, Any]) -> Outcome:
    longest_s = max(gap for stream in killed["streams"] for gap in stream.gaps(killed["sent_at"]))
    entry = killed["entry"]
    least = entry["least_layer_positions"]
    return Outcome(
        way=way.name,
        case=case.name,
        stall_s=longest_s - usual_s,
        usual_s=usual_s,
        split=killed["split"],
        predicted_s=entry["predicted"]["total_s"],
        ratio=entry["layer_positions"] / least if least else None,
        choice=str(entry["choice"]),
    )
