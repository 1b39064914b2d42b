"""Measure what copies of keys and values bring when a worker dies, and what they cost while nothing happens.

Two swarms run side by side, one with copies and one without, and take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

from bench_lib import BenchError, note, random_prompt, turns, vocabulary_of
from bench_swarm import Body, Stream, answers, check_tokens
from recovery_goals import Facts, Figure, Figures, cost_goal, longest_gaps, slope, slope_goal, stall_goal
from recovery_overhead import halves, paired
from recovery_stall import PARTS, Case, Way, one_kill, usual_gap
from recovery_swarm import Parts

SIDES = {"on": "neighbours", "off": "none"}  # by side: value of plan.standby_kv
WAY = Way("copies", standby="neighbours")
COPIED_WITHIN_S = 8.0
POLL_S = 0.05
LAG = 64  # positions of a sequence that copies may lack
WARM_UP = 40  # tokens
ENOUGH = 20  # tokens of each answer after a change
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
            await answers(swarms[side].client, [random_prompt(WARM_UP, vocabulary_of(model))], 1, WARM_UP)
        yield swarms


def with_context(model: Path, positions: int) -> Path:
    """Return this model; if its context is too short, a folder beside it with the same weights and a longer context.
    Its answers need not make sense."""
    config = json.loads((model / "config.json").read_text())
    if config["max_position_embeddings"] >= positions:
        return model
    folder = model.with_name(f"{model.name}-{positions}")
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


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

    async def wait(self, side: str, parts: Parts, case: Case) -> None:
        began = time.monotonic()
        if side == "on":
            await until_copied(parts, case)
            self.waited_s = time.monotonic() - began
        else:
            await asyncio.sleep(self.waited_s)


async def until_copied(parts: Parts, case: Case) -> None:
    """Wait until all layers of these positions have been copied but for ``LAG`` of each sequence, at most
    ``COPIED_WITHIN_S``."""
    nodes = cast(Body, await parts.client.query("nodes"))["workers"]
    positions = case.sequences * max(1, case.context - LAG)
    wanted = position_bytes(parts.model, nodes[0]["dtype"]) * positions
    give_up_at = time.monotonic() + COPIED_WITHIN_S
    while True:
        stages = cast(Body, await parts.client.query("stats"))["stages"]
        share = sum(values.get("kv_copy_bytes") or 0.0 for values in stages.values()) / wanted
        if share >= 1.0 or time.monotonic() > give_up_at:
            return
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
    """Prompts of a case. Answers are read until ``ENOUGH`` tokens after the change; the undisturbed ones come last, and
    are as long as the longest of the others."""

    case: Case
    prompts: list[list[int]]
    copies: CopyWait = field(default_factory=CopyWait)
    streams: list[list[Stream]] = field(default_factory=list)  # answers of each change so far
    calm: list[Stream] = field(default_factory=list)

    @classmethod
    def of(cls, model: Path, case: Case) -> Run:
        return cls(case, case.prompts(vocabulary_of(model)))

    @property
    def usual_s(self) -> float:
        return usual_gap(self.calm)

    async def disturb(self, parts: Parts, change: Callable[[], Awaitable[None]]) -> list[Stream]:
        """Answer the prompts while something changes."""
        case = self.case
        self.streams.append(await answers(parts.client, self.prompts, case.before, case.after, change, enough=ENOUGH))
        return self.streams[-1]

    async def compare(self, parts: Parts, what: str) -> None:
        """Answer the prompts without any disturbance, and check that the tokens are the same."""
        longest = max(len(stream.tokens) for streams in self.streams for stream in streams)
        self.calm = await answers(parts.client, self.prompts, 1, longest - 1)
        for streams in self.streams:
            check_tokens(streams, self.calm, what)


# --- stall ------------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """What one kill showed, in seconds; positions times layers."""

    stall_s: float
    rebuilt_s: float
    resumed_s: float
    predicted_s: float | None
    replayed: int
    copied: int
    tokens: int  # of the answers at the kill
    split: dict[str, float | None]  # what the broker recorded; ``detect`` counts from the signal

    @property
    def copied_share(self) -> float:
        """Share of the lost positions that copies had."""
        return self.copied / max(1, self.copied + self.replayed)


async def kill_once(side: str, parts: Parts, run: Run) -> Kill:
    """Kill the middle stage while these answers run. The stall still includes the usual gap."""
    case = run.case
    killed = await one_kill(
        parts,
        WAY,
        run.prompts,
        before_kill=lambda: run.copies.wait(side, parts, case),
        lengths=(case.before, case.after),
        enough=ENOUGH,
    )
    entry, sent_at, streams = killed["entry"], killed["sent_at"], killed["streams"]
    run.streams.append(streams)
    times = [stream.times for stream in streams]
    gaps = longest_gaps(times, entry["activated_at"], entry["replayed_at"] or entry["resumed_all_at"])
    return Kill(
        stall_s=stall_of(streams, sent_at, entry["resumed_all_at"]),
        rebuilt_s=gaps.rebuilt,
        resumed_s=gaps.resumed,
        predicted_s=entry["predicted"]["replay_s"],
        replayed=entry["layer_positions"],
        copied=entry.get("copied_layer_positions", 0),
        tokens=sum(moment <= sent_at for own in times for moment in own),
        split=killed["split"],
    )


async def stall_rows(
    swarms: dict[str, Parts], cases: list[Case], rounds: int, figures: Figures, *, demo: bool
) -> dict[str, Any]:
    """Kill in every case, on both sides in turns. Return the samples."""
    samples: dict[Case, dict[str, list[Kill]]] = {}
    for case in cases:
        run = Run.of(swarms["off"].model, case)
        kills = samples[case] = {side: [] for side in swarms}
        for side, _ in list(turns(swarms, rounds))[len(swarms) :]:
            kills[side].append(await kill_once(side, swarms[side], run))
        await run.compare(swarms["off"], f"kill, {case.name}")
        for side, own in kills.items():
            for kill in own:
                kill.stall_s -= run.usual_s
                note(f"{case.name}, copies {side}: {kill}")
        figures.add(_stall_row(case, kills, demo=demo))
    for row in _slope_rows(samples):
        figures.add(row)
    return {
        case.name: {side: [vars(kill) for kill in kills] for side, kills in of.items()} for case, of in samples.items()
    }


def _stall_row(case: Case, kills: dict[str, list[Kill]], *, demo: bool) -> Figure:
    """Return the row of a case; its facts are medians."""
    on, off = kills["on"], kills["off"]
    stalls = ([kill.stall_s * 1e3 for kill in own] for own in (on, off))
    also: Facts = {
        "copied at the kill": f"{median(kill.copied_share for kill in on):.1%}",
        "least": f"{min(kill.copied_share for kill in on):.1%}",
        "replayed": median(kill.replayed for kill in on),
        **{f"{name}, ms": median(kill.split[name] or 0.0 for kill in on) * 1e3 for name in PARTS},
        "rebuilt, ms": median(kill.rebuilt_s for kill in on) * 1e3,
        "resumed, ms": median(kill.resumed_s for kill in on) * 1e3,
        "worst, ms": max(kill.stall_s for kill in on) * 1e3,
        "off: replay, ms": median(kill.split["replay"] or 0.0 for kill in off) * 1e3,
        "predicted, ms": median(kill.predicted_s or 0.0 for kill in off) * 1e3,
    }
    return Figure(f"stall, {case.name}", "ms", *stalls, stall_goal(case.sequences, case.context, demo=demo), also)


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
    swarms: dict[str, Parts], sequences: tuple[int, ...], pairs: int, tokens: int, figures: Figures, *, demo: bool
) -> dict[str, Any]:
    """Decode on both sides in turns: the part of the throughput that copies take. Return the samples."""
    raw: dict[str, Any] = {}
    for num in sequences:
        found = await paired(swarms["on"], swarms["off"], pairs, num, tokens)
        low, high = halves(found.costs)
        also = {"half between": f"{low:.1%} and {high:.1%}", "cpu": f"{median(found.computed):+.1%}"}
        costs = [cost * 100 for cost in found.costs]
        figures.add(Figure(f"throughput lost, {num} × decode", "%", costs, [], cost_goal(demo=demo), dict(also)))
        raw[str(num)] = {
            "costs": found.costs,
            "computed": found.computed,
            "on": found.on.rates,
            "off": found.off.rates,
        }
        note(f"{num} sequences: on {found.on.rates} off {found.off.rates} tokens/s")
    return raw
