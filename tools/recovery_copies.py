"""Measure what copies of keys and values bring when a worker dies, and what they cost while nothing happens.

Two swarms run side by side, one with copies and one without, and take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from bench_lib import BenchError, note, turns, vocabulary_of
from bench_swarm import Body, Stream, answers
from recovery_goals import Figure, cost_goal, longest_gaps, slope, slope_goal, stall_goal
from recovery_overhead import halves, paired
from recovery_stall import Case, Way, one_kill, usual_gap
from recovery_swarm import Parts

SIDES = {"on": "neighbours", "off": "none"}  # by side: value of plan.standby_kv
WAY = Way("copies", standby="neighbours")
COPIED_WITHIN_S = 8.0
POLL_S = 0.05
LAG = 64  # positions of a sequence that copies may lack
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@asynccontextmanager
async def both_sides(model: Path) -> AsyncIterator[dict[str, Parts]]:
    """Run a swarm of each side. Their workers keep layers warm for each other; only one side copies keys and values."""
    async with AsyncExitStack() as stack:
        swarms = {}
        for side, standby_kv in SIDES.items():
            note(f"a swarm with copies {side} starts …")
            own = {
                "SWARM_PLAN__STANDBY": WAY.standby,
                "SWARM_PLAN__STANDBY_KV": standby_kv,
                "SWARM_BROKER__PREFIX_CACHE": "false",
                "SWARM_BROKER__SETTLE_S": "0.2",
            }
            swarms[side] = await stack.enter_async_context(Parts(model, settings=own))
        yield swarms


def position_bytes(model: Path, dtype: str) -> int:
    """Return the bytes of keys and values of one position in all layers."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config["num_hidden_layers"]) * config.get("num_key_value_heads", heads) * size * WIDTHS[dtype]


@dataclass
class CopyWait:
    """Wait before a change until copies are level. The side without copies waits as long as the other one last did, so
    that the answers of both have the same length."""

    waited_s: float = 0.0
    share: float | None = None  # of the copies, at the end of the last wait

    async def wait(self, side: str, parts: Parts, case: Case) -> None:
        began = time.monotonic()
        if side == "on":
            self.share = await until_copied(parts, case)
            self.waited_s = time.monotonic() - began
        else:
            await asyncio.sleep(self.waited_s)


async def until_copied(parts: Parts, case: Case) -> float:
    """Wait until all layers of these positions have been copied but for ``LAG`` of each sequence; return the share that
    has been. Gives up after ``COPIED_WITHIN_S``: then the share shows it."""
    nodes = cast(Body, await parts.client.query("nodes"))["workers"]
    positions = case.sequences * max(1, case.context - LAG)
    wanted = position_bytes(parts.model, nodes[0]["dtype"]) * positions
    give_up_at = time.monotonic() + COPIED_WITHIN_S
    while True:
        stages = cast(Body, await parts.client.query("stats"))["stages"]
        share = sum(values.get("kv_copy_bytes") or 0.0 for values in stages.values()) / wanted
        if share >= 1.0 or time.monotonic() > give_up_at:
            return float(min(1.0, share))
        await asyncio.sleep(POLL_S)


def stall_of(streams: Iterable[Stream], since: float, until: float) -> float:
    """Return the longest gap that ended after ``since`` and began before ``until``, when all answers went on again."""
    gaps = [
        later - sooner
        for stream in streams
        for sooner, later in pairwise(stream.times)
        if later > since and sooner < until
    ]
    if not gaps:
        raise BenchError("all answers ended before the change: raise --after")
    return max(gaps)


@dataclass
class Run:
    """Prompts of a case, with their undisturbed answers."""

    prompts: list[list[int]]
    calm: list[Stream]
    copies: CopyWait = field(default_factory=CopyWait)


async def undisturbed(parts: Parts, case: Case) -> Run:
    """Answer new prompts of this case without any disturbance."""
    prompts = case.prompts(vocabulary_of(parts.model))
    return Run(prompts, await answers(parts.client, prompts, case.before, case.after))


# --- stall ------------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """What one kill showed, in seconds; positions times layers."""

    stall_s: float
    rebuilt_s: float
    resumed_s: float
    replay_s: float
    predicted_s: float | None
    replayed: int
    copied: int
    copied_share: float | None


async def kill_once(side: str, parts: Parts, case: Case, run: Run) -> Kill:
    """Kill the middle stage while these answers run."""
    killed = await one_kill(
        parts, WAY, run.prompts, run.calm, before_kill=lambda: run.copies.wait(side, parts, case), case=case
    )
    entry, sent_at = killed["entry"], killed["sent_at"]
    times = [stream.times for stream in killed["streams"]]
    gaps = longest_gaps(times, entry["activated_at"], entry["replayed_at"] or entry["resumed_all_at"])
    longest_s = stall_of(killed["streams"], sent_at, entry["resumed_all_at"])
    return Kill(
        stall_s=longest_s - usual_gap(run.calm),
        rebuilt_s=gaps.rebuilt,
        resumed_s=gaps.resumed,
        replay_s=entry["measured"]["replay_s"] or 0.0,
        predicted_s=entry["predicted"]["replay_s"],
        replayed=entry["layer_positions"],
        copied=entry.get("copied_layer_positions", 0),
        copied_share=run.copies.share if side == "on" else None,
    )


async def stall_rows(model: Path, cases: list[Case], rounds: int, *, demo: bool) -> tuple[list[Figure], dict[str, Any]]:
    """Kill in every case, on both sides in turns."""
    samples: dict[Case, dict[str, list[Kill]]] = {}
    async with both_sides(model) as swarms:
        for case in cases:
            run = await undisturbed(swarms["off"], case)
            kills = samples[case] = {side: [] for side in swarms}
            for side, _ in list(turns(swarms, rounds))[len(swarms) :]:  # the calm run has warmed up
                kills[side].append(await kill_once(side, swarms[side], case, run))
                note(f"{case.name}, copies {side}: {kills[side][-1]}")
    rows = [_stall_row(case, kills, demo=demo) for case, kills in samples.items()]
    rows += list(_slope_rows(samples))
    raw = {
        case.name: {side: [vars(kill) for kill in kills] for side, kills in of.items()} for case, of in samples.items()
    }
    return rows, raw


def _stall_row(case: Case, kills: dict[str, list[Kill]], *, demo: bool) -> Figure:
    on = kills["on"][-1]
    also = {
        "rebuilt, ms": on.rebuilt_s * 1e3,
        "resumed, ms": on.resumed_s * 1e3,
        "replayed": float(on.replayed),
        "copied": float(on.copied),
        "copied before": f"{on.copied_share or 0.0:.0%}",
        "off: replay, ms": kills["off"][-1].replay_s * 1e3 if kills["off"] else None,
        "predicted, ms": (kills["off"][-1].predicted_s or 0.0) * 1e3 if kills["off"] else None,
    }
    stalls = ([kill.stall_s * 1e3 for kill in kills[side]] for side in ("on", "off"))
    return Figure(f"stall, {case.name}", "ms", *stalls, stall_goal(case.sequences, case.context, demo=demo), dict(also))


def _slope_rows(samples: dict[Case, dict[str, list[Kill]]]) -> list[Figure]:
    rows = []
    for sequences in dict.fromkeys(case.sequences for case in samples):
        slopes = [
            slope(
                (sequences * case.context, kill.stall_s * 1e3)
                for case, kills in samples.items()
                if case.sequences == sequences
                for kill in kills[side]
            )
            for side in ("on", "off")
        ]
        on, off = ([] if each is None else [each] for each in slopes)
        if on:
            rows.append(Figure(f"per further position, {sequences} sequences", "ms", on, off, slope_goal()))
    return rows


# --- steady cost ------------------------------------------------------------------------------------------------------


async def cost_rows(
    model: Path, sequences: tuple[int, ...], pairs: int, tokens: int, *, demo: bool
) -> tuple[list[Figure], dict[str, Any]]:
    """Decode on both sides in turns: the part of the throughput that copies take."""
    rows: list[Figure] = []
    raw: dict[str, Any] = {}
    async with both_sides(model) as swarms:
        for num in sequences:
            found = await paired(swarms["on"], swarms["off"], pairs, num, tokens)
            low, high = halves(found.costs)
            also = {"half between": f"{low:.1%} and {high:.1%}", "cpu": f"{halves(found.computed)[0]:+.1%}"}
            costs = [cost * 100 for cost in found.costs]
            rows.append(Figure(f"throughput lost, {num} × decode", "%", costs, [], cost_goal(demo=demo), dict(also)))
            raw[str(num)] = {
                "costs": found.costs,
                "computed": found.computed,
                "on": found.on.rates,
                "off": found.off.rates,
            }
            note(f"{num} sequences: on {found.on.rates} off {found.off.rates} tokens/s")
    return rows, raw
