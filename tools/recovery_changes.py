"""Measure changes of plan under load: a drained stage, two deaths in a row, and a worker that joins."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

from bench_lib import note, random_prompt, turns, vocabulary_of
from bench_swarm import START_S, Body, Processes, Stream
from recovery_copies import SIDES, Run, stall_of
from recovery_goals import DEATHS_REPLAYED, DRAIN_GAP, DRAIN_REPLAYED, GAIN_ERROR, Facts, Figure, Figures, gain_error
from recovery_overhead import throughput
from recovery_stall import Case
from recovery_swarm import STAGES, Parts

from swarm.wire.messages import PlanCommand

T = TypeVar("T")

BETWEEN_DEATHS_S = 0.5
SETTLE_S = 1.0  # after a change of plan, in which a gap still counts
NEWCOMER_SEQUENCES = 16  # as many as the plan's forecast is for, with two steps in flight
NEWCOMER_TOKENS = 64
AFTER_CHANGE = 10  # tokens that are read after the change of plan


@dataclass
class Change:
    """What one change of plan showed. Positions are times layers, computed again and taken from copies."""

    gap_s: float  # longest one; in the end less the usual gap
    replayed: float
    copied: float
    losses: int = 0
    took_s: float = 0.0  # until the next plan serves


async def _counted(parts: Parts, name: str) -> float:
    stats = cast(Body, await parts.client.query("stats"))
    return float(stats["pipeline"].get(name) or 0.0)


# --- drain ------------------------------------------------------------------------------------------------------------


async def drain_once(side: str, parts: Parts, run: Run) -> Change:
    """Drain the middle stage while these answers run, then let it have layers again."""
    victim = await parts.stage(1)
    before = await _counted(parts, "replayed_layer_positions")
    began = took_s = 0.0

    async def drain() -> None:
        nonlocal began, took_s
        await run.copies.wait(side, parts, run.case)
        began = time.monotonic()
        await parts.client.steer(PlanCommand("drain", victim))
        await parts.until("plan", lambda plan: _serves_without(plan, victim))
        took_s = time.monotonic() - began

    streams = await run.disturb(parts, drain)
    replayed = await _counted(parts, "replayed_layer_positions") - before
    await parts.client.steer(PlanCommand("uncordon", victim))
    await parts.whole()
    gap_s = stall_of(streams, began, began + took_s + SETTLE_S)
    return Change(gap_s, replayed, 0.0, took_s=took_s)


def _serves_without(plan: Body, worker: str) -> bool:
    return plan["state"] == "serving" and worker not in workers_of(plan)


def workers_of(plan: Body) -> list[str]:
    return [stage["worker"] for stage in plan.get("stages") or []]


# --- two deaths -------------------------------------------------------------------------------------------------------


async def two_deaths(side: str, parts: Parts, run: Run) -> Change:
    """Kill the middle stage, and half a second later the last one."""
    victims = [await parts.stage(1), await parts.stage(2)]
    began = 0.0

    async def kill() -> None:
        nonlocal began
        await run.copies.wait(side, parts, run.case)
        began = parts.signal(victims[0], signal.SIGKILL)
        await asyncio.sleep(BETWEEN_DEATHS_S)
        parts.signal(victims[1], signal.SIGKILL)
        for victim in victims:
            await parts.ended(victim)

    streams = await run.disturb(parts, kill)
    entries = await _recoveries(parts, began, len(victims))
    for victim in victims:
        parts.start(victim)
    await parts.whole()
    gap_s = stall_of(streams, began, max(entry["resumed_all_at"] for entry in entries))
    replayed, copied = (
        float(sum(entry.get(name) or 0 for entry in entries)) for name in ("layer_positions", "copied_layer_positions")
    )
    return Change(gap_s, replayed, copied, losses=sum(entry["losses"] for entry in entries))


async def _recoveries(parts: Parts, since: float, losses: int) -> list[Body]:
    """Return the records of recoveries since then, once they name this number of losses and all have ended. The second
    loss belongs to the first recovery if that was still under way."""

    def found(report: Body) -> list[Body]:
        return [entry for entry in report["recoveries"] if (entry["detected_at"] or 0.0) >= since]

    def is_over(report: Body) -> bool:
        entries = found(report)
        all_ended = all(entry["resumed_all_at"] is not None for entry in entries)
        return all_ended and sum(entry["losses"] for entry in entries) >= losses

    return found(await parts.until("recoveries", is_over, START_S))


# --- a newcomer -------------------------------------------------------------------------------------------------------


class OwnMachines(Processes):
    """Run a broker and workers that take each other to be on machines of their own, each on a core of its own.

    Needs root, for a host name of its own; then stages compute at the same time.
    """

    def __init__(self, model: Path, settings: Mapping[str, str]) -> None:
        super().__init__({"SWARM_LOG__FORMAT": "json", **settings})
        self.model = model

    async def begin(self) -> None:
        self.launch_broker("--min-workers", "1")
        self.launch_on(0)
        await self.until_serving(1)

    def launch_on(self, core: int) -> None:
        """Start a worker on this core."""
        about = ["--url", self.url, "--name", f"w{core}", "--model", str(self.model), "--threads", "1"]
        enter = ("unshare", "--uts", "sh", "-c", f'hostname machine{core} && exec taskset -c {core} "$@"', "sh")
        self.launch(f"w{core}", ["worker", *about], under=enter)


@dataclass
class Newcomer:
    """Throughput before and after, in tokens/s; the gains are ratios. ``took_s``: from the start of its process to its
    part in the plan that serves. ``told``: the broker's own account of the change."""

    before: float
    after: float
    predicted: float
    took_s: float
    gap_s: float
    told: Body | None

    @property
    def achieved(self) -> float:
        return self.after / self.before


async def newcomer(model: Path, side: str) -> Newcomer:
    """Start a second worker while one serves alone, and measure what it brings."""
    settings = {
        "SWARM_PLAN__STANDBY_KV": SIDES[side],
        "SWARM_BROKER__SETTLE_S": "0.2",
        "SWARM_BROKER__PREFIX_CACHE": "false",
        "SWARM_PLAN__COOLDOWN_S": "1",
    }
    vocabulary = vocabulary_of(model)
    async with OwnMachines(model, settings) as swarm:
        predicted = predicted_gain(cast(Body, await swarm.client.query("plan")))
        before = await throughput(swarm.client, vocabulary, NEWCOMER_SEQUENCES, NEWCOMER_TOKENS)
        began = time.monotonic()
        swarm.launch_on(1)
        reading = asyncio.create_task(_read_along(swarm, vocabulary))
        await swarm.until("plan", lambda p: p["state"] == "serving" and "w1" in workers_of(p))
        took_s = time.monotonic() - began
        gaps = (await reading).gaps(began)
        await throughput(swarm.client, vocabulary, NEWCOMER_SEQUENCES, NEWCOMER_TOKENS)  # warms up
        after = await throughput(swarm.client, vocabulary, NEWCOMER_SEQUENCES, NEWCOMER_TOKENS)
        told = (cast(Body, await swarm.client.query("plan")).get("moves") or [None])[-1]
        if told is not None and told["predicted"]["gain"]:
            predicted = float(told["predicted"]["gain"])
        note(f"newcomer, copies {side}: {before:.1f}, then {after:.1f} tokens/s; predicted × {predicted:.2f}; {told}")
        return Newcomer(before, after, predicted, took_s, max(gaps, default=0.0), told)


async def _read_along(swarm: OwnMachines, vocabulary: int) -> Stream:
    """Read an answer until the plan has both workers and some more tokens have come."""
    found, left = Stream(), AFTER_CHANGE
    ongoing = swarm.client.stream(random_prompt(64, vocabulary), max_tokens=1500, ignore_eos=True, timeout=START_S)
    async with aclosing(ongoing):
        async for piece in ongoing:
            found.tokens.append(int(piece.token or 0))
            found.times.append(time.monotonic())
            if left < AFTER_CHANGE or "w1" in workers_of(cast(Body, await swarm.client.query("plan"))):
                left -= 1
            if left < 0:
                return found
    return found


def predicted_gain(plan: Body) -> float:
    """Return by how much another worker on a machine of its own would raise the throughput, by the plan's text for the
    same number of sequences; 1 if it would not. The broker's prediction of the change itself is preferred later."""
    text = next((line for line in plan["why"] if line.startswith("one more worker like")), "")
    found = re.search(r"would give ([\d.]+) (ms|s) a step.*which take ([\d.]+) (ms|s) now", text)
    if found is None:
        return 1.0
    scale = {"ms": 1e-3, "s": 1.0}
    return float(found[3]) * scale[found[4]] / (float(found[1]) * scale[found[2]])


# --- rows -------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[str, Parts, Run], Awaitable[Change]]] = {
    "drain": drain_once,
    "deaths": two_deaths,
}


async def change_rows(swarms: dict[str, Parts], what: str, case: Case, rounds: int, figures: Figures) -> dict[str, Any]:
    """Measure a drain, or two deaths, on both sides in turns. Return the samples."""
    run = Run.of(swarms["off"].model, case)
    samples: dict[str, list[Change]] = {side: [] for side in swarms}
    for side, _ in list(turns(swarms, rounds))[len(swarms) :]:
        samples[side].append(await KINDS[what](side, swarms[side], run))
    await run.compare(swarms["off"], f"{what}, {case.name}")
    for side, changes in samples.items():
        for change in changes:
            change.gap_s -= run.usual_s
            note(f"{what}, copies {side}: {change}")
    for row in drain_figures(case, samples) if what == "drain" else death_figures(case, samples):
        figures.add(row)
    return {side: list(map(asdict, changes)) for side, changes in samples.items()}


def both(samples: Mapping[str, Sequence[T]], figure: Callable[[T], float]) -> tuple[list[float], list[float]]:
    """Return a figure of all samples with copies, and of all without."""
    on, off = (list(map(figure, samples[side])) for side in ("on", "off"))
    return on, off


def drain_figures(case: Case, samples: Mapping[str, Sequence[Change]]) -> list[Figure]:
    gaps_on, gaps_off = both(samples, lambda change: change.gap_s * 1e3)
    replayed_on, replayed_off = both(samples, lambda change: change.replayed)
    took_on, _ = both(samples, lambda change: change.took_s)
    also: Facts = {"until the plan serves, s": median(took_on) if took_on else None}
    return [
        Figure(f"drain, {case.name}: longest gap", "ms", gaps_on, gaps_off, DRAIN_GAP, also),
        Figure(f"drain, {case.name}: computed again", "layer positions", replayed_on, replayed_off, DRAIN_REPLAYED),
    ]


def death_figures(case: Case, samples: Mapping[str, Sequence[Change]]) -> list[Figure]:
    """Replays are compared with one replay of everything that was lost: what was replayed or taken from copies."""
    gaps_on, gaps_off = both(samples, lambda change: change.gap_s * 1e3)
    replayed_on, replayed_off = both(samples, lambda change: change.replayed)
    copied_on, _ = both(samples, lambda change: change.copied)
    parts_on, parts_off = both(samples, lambda change: change.replayed / max(1.0, change.replayed + change.copied))
    also: Facts = {"copied": median(copied_on), "losses told": float(samples["on"][-1].losses)} if copied_on else {}
    return [
        Figure(f"two deaths, {case.name}: longest gap", "ms", gaps_on, gaps_off),
        Figure(f"two deaths, {case.name}: replayed", "layer positions", replayed_on, replayed_off, None, also),
        Figure(f"two deaths, {case.name}: replayed ÷ lost", "", parts_on, parts_off, DEATHS_REPLAYED),
    ]


async def newcomer_rows(model: Path, rounds: int, figures: Figures) -> dict[str, Any]:
    """Measure a newcomer, with copies and without in turns. Return the samples."""
    samples: dict[str, list[Newcomer]] = {"on": [], "off": []}
    for side, _ in list(turns(samples, rounds))[len(samples) :]:
        samples[side].append(await newcomer(model, side))
    for row in newcomer_figures(samples):
        figures.add(row)
    return {side: list(map(asdict, found)) for side, found in samples.items()}


def newcomer_figures(samples: Mapping[str, Sequence[Newcomer]]) -> list[Figure]:
    errors_on, errors_off = both(samples, lambda n: gain_error(n.predicted, n.achieved))
    took_on, took_off = both(samples, lambda n: n.took_s)
    gaps_on, gaps_off = both(samples, lambda n: n.gap_s)
    gains = {"predicted ×": lambda n: n.predicted, "achieved ×": lambda n: n.achieved}
    also: Facts = {name: median(both(samples, gain)[0]) for name, gain in gains.items()} if errors_on else {}
    return [
        Figure("a newcomer's gain: error", "%", errors_on, errors_off, GAIN_ERROR, also),
        Figure("a newcomer: from its start to its part", "s", took_on, took_off),
        Figure("a newcomer: longest gap meanwhile", "s", gaps_on, gaps_off),
    ]


assert STAGES >= 3  # two deaths need a survivor
