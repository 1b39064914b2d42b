"""Measurements of a swarm by requests, one after another and concurrently, timed at the client.

Prompts are random token ids, so any model can be used. Each prompt is different, so that the prefix cache has an effect
only in the phase that measures it. Answers have exactly the requested number of tokens (``ignore_eos``).
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from swarm.client.client import AsyncClient
from swarm.errors import Unavailable
from swarm.wire.messages import Json, Manifest

OUTPUTS = (5, 10, 20, 50)  # tokens of an answer
PROMPTS = {"short": 8, "medium": 64, "long": 512}  # tokens of a prompt
BATCHES = (1, 2, 4, 8, 16)  # concurrent requests
SUSTAINED_RUNS = 10
SERVING_TIMEOUT_S = 600.0  # limit for a swarm that does not serve yet: it may have to fetch a model
STATS_TIMEOUT_S = 5.0  # limit for statistics that cover all requests: workers report every second

_COMMUNICATION = ("queue_s", "wire_s", "broker_s")  # parts of a token's time that count as communication


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """Number and size of the measurements of each phase."""

    repeats: int = 3
    runs: int = SUSTAINED_RUNS
    tokens: int = 20
    batches: tuple[int, ...] = BATCHES

    @classmethod
    def quick(cls) -> ProfilePlan:
        return cls(repeats=1, tokens=10, batches=(1, 4))


@dataclass(frozen=True, slots=True)
class ProfiledRequest:
    """Timing of one request at its client."""

    request_id: str
    num_prompt: int
    first_s: float
    total_s: float
    gaps: tuple[float, ...]  # between consecutive tokens

    @property
    def num_tokens(self) -> int:
        return len(self.gaps) + 1

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


@dataclass(slots=True)
class Profiler:
    """Runs the phases against one swarm; ``on_phase`` is called with the current phase."""

    client: AsyncClient
    plan: ProfilePlan
    on_phase: Callable[[str], None]
    seed: int = 1
    now: Callable[[], float] = time.perf_counter
    _random: random.Random = field(init=False)
    _ids: list[int] = field(default_factory=list)  # token ids for random prompts
    _max_positions: int = 0  # positions that one sequence can have

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def run(self, *, fresh: bool) -> Json:
        """Run all phases. ``fresh``: the swarm has had no requests yet."""
        manifest = await self._wait_until_serving()
        plan, before = await self.client.query("plan"), await self.client.query("stats")
        warm_up = await self._measure_warm_up(plan, fresh)
        scaling = await self._measure_output_scaling()
        prompts = await self._measure_prompts()
        sustained_runs, overhead = await self._measure_sustained()
        batches = await self._measure_batches()
        prefix = await self._measure_prefix()
        return {
            "model": manifest.name,
            "url": self.client.url,
            "stages": [{"worker": s["worker"], "layers": s["layers"]} for s in _list(plan.get("stages"))],
            "warm_up": warm_up,
            "output_scaling": scaling,
            "prompts": prompts,
            "sustained": _sustained_stats(sustained_runs),
            "batches": batches,
            "latency": {
                "ttft_s": percentiles([run.first_s for run in sustained_runs]),
                "per_token_s": percentiles([gap for run in sustained_runs for gap in run.gaps]),
                "tokens_per_s": round(statistics.mean(run.tokens_per_s for run in sustained_runs), 2),
            },
            "caches": cache_rates(before, await self._settled_stats(before)) | {"prefix_ttft": prefix},
            "overhead": overhead,
        }

    # --- phases ------------------------------------------------------------------------------------------------------

    async def _wait_until_serving(self) -> Manifest:
        """Wait until the swarm serves."""
        limit = self.now() + SERVING_TIMEOUT_S
        waits_for = ""
        while True:
            description = await self.client.describe()
            if description.state == "serving" and description.manifest is not None:
                break
            if description.waits_for != waits_for:
                waits_for = description.waits_for
                self.on_phase(f"not serving yet: {waits_for or description.state}")
            if self.now() > limit:
                raise Unavailable(f"the swarm does not serve after {SERVING_TIMEOUT_S:g} s: it waits for {waits_for}")
            await asyncio.sleep(0.25)
        manifest = description.manifest
        held = _figure(await self.client.query("status"), "kv_capacity")
        self._max_positions = min(manifest.context, int(held) or manifest.context)
        self._ids = [i for i in range(min(manifest.vocab_size, 1 << 16)) if i not in manifest.eos_token_ids]
        return manifest

    async def _measure_warm_up(self, plan: Json, fresh: bool) -> Json:
        """Compare the first request with later ones like it.

        Stages warm up before they serve; their warm-up time is what the first request would have waited.
        """
        self.on_phase("warm-up")
        first, *later = [await self._time_random_request(16, self.plan.tokens) for _ in range(4)]
        stages = [float(s.get("warm_up_s") or 0.0) for s in _list(plan.get("stages"))]
        later_s = statistics.median(run.first_s for run in later)
        return {
            "first_ever": fresh,
            "first_ttft_s": round(first.first_s, 6),
            "later_ttft_s": round(later_s, 6),
            "first_total_s": round(first.total_s, 6),
            "later_total_s": round(statistics.median(run.total_s for run in later), 6),
            "extra_s": round(max(0.0, first.first_s - later_s), 6),
            "stages_warm_up_s": round(sum(stages), 6),
        }

    async def _measure_output_scaling(self) -> list[Json]:
        rows: list[Json] = []
        for num_tokens in OUTPUTS:
            self.on_phase(f"output scaling: {num_tokens} tokens")
            runs = [await self._time_random_request(16, num_tokens) for _ in range(self.plan.repeats)]
            rows.append({"tokens": num_tokens, **_medians(runs)})
        return rows

    async def _measure_prompts(self) -> list[Json]:
        rows: list[Json] = []
        for name, length in PROMPTS.items():
            num_prompt = min(length, max(1, self._max_positions - self.plan.tokens - 1))
            self.on_phase(f"prompts: {name}, {num_prompt} tokens")
            runs = [await self._time_random_request(num_prompt, self.plan.tokens) for _ in range(self.plan.repeats)]
            typical = _medians(runs)
            rate = num_prompt / statistics.median(run.first_s for run in runs)
            rows.append({"name": name, "prompt": num_prompt, **typical, "prompt_tokens_per_s": round(rate, 1)})
        return rows

    async def _measure_sustained(self) -> tuple[list[ProfiledRequest], Json]:
        """Make requests one after another, and read the swarm's traces of their time."""
        runs: list[ProfiledRequest] = []
        traces: list[Json] = []
        for number in range(self.plan.runs):
            self.on_phase(f"sustained: run {number + 1} of {self.plan.runs}")
            runs.append(await self._time_random_request(16, self.plan.tokens))
            traces.append(await self.client.trace(runs[-1].request_id))
        return runs, time_shares(traces)

    async def _measure_batches(self) -> list[Json]:
        rows: list[Json] = []
        single = 0.0
        for size in self.plan.batches:
            self.on_phase(f"batches: {size} at a time")
            runs: list[ProfiledRequest] = []
            rates: list[float] = []
            for _ in range(self.plan.repeats):
                began = self.now()
                together = await asyncio.gather(*(self._time_random_request(16, self.plan.tokens) for _ in range(size)))
                rates.append(sum(run.num_tokens for run in together) / (self.now() - began))
                runs += together
            rate = statistics.median(rates)
            single = single or rate / size
            row = {"size": size, "together_per_s": round(rate, 2), "speed_up": round(rate / single, 2)}
            rows.append(row | {"efficiency": round(rate / single / size, 3)} | _medians(runs))
        return rows

    async def _measure_prefix(self) -> Json:
        """Repeat a prompt while the stages hold its keys and values."""
        self.on_phase("prefix cache")
        prompt = self._prompt(min(256, max(1, self._max_positions - 8)))
        cold = await self._time_request(prompt, 4)
        again = [await self._time_request(prompt, 4) for _ in range(max(2, self.plan.repeats))]
        again_s = statistics.median(run.first_s for run in again)
        return {"prompt": len(prompt), "cold_s": round(cold.first_s, 6), "again_s": round(again_s, 6)}

    async def _settled_stats(self, before: Json) -> Json:
        """Wait for statistics in which the workers' own figures cover all requests: workers report once a second."""
        limit = self.now() + STATS_TIMEOUT_S
        while True:
            after = await self.client.query("stats")
            done = _figure(after, "pipeline", "calls") - _figure(before, "pipeline", "calls")
            stages = after.get("stages")
            names = list(stages) if isinstance(stages, Mapping) else []
            covered = [_figure(after, "stages", n, "calls") - _figure(before, "stages", n, "calls") for n in names]
            if all(each >= done for each in covered) or self.now() > limit:
                return after
            await asyncio.sleep(0.1)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)

    async def _time_random_request(self, num_prompt: int, num_tokens: int) -> ProfiledRequest:
        return await self._time_request(self._prompt(num_prompt), num_tokens)

    async def _time_request(self, prompt: list[int], num_tokens: int) -> ProfiledRequest:
        request_id = f"profile-{secrets.token_hex(8)}"
        moments: list[float] = []
        began = self.now()
        stream = self.client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, request_id=request_id)
        async for piece in stream:
            if piece.token is not None:
                moments.append(self.now())
        gaps = tuple(after - before for before, after in pairwise(moments))
        return ProfiledRequest(request_id, len(prompt), moments[0] - began, moments[-1] - began, gaps)


# --- figures ----------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> Json:
    """Return mean and percentiles; a percentile is a measured value (nearest rank)."""
    if not values:
        return {"mean": None, "p50": None, "p95": None, "p99": None}
    ranked = sorted(values)
    stats: Json = {"mean": round(statistics.mean(ranked), 6)}
    for percent in (50, 95, 99):
        stats[f"p{percent}"] = round(ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)], 6)
    return stats


def cache_rates(before: Json, after: Json) -> Json:
    """Return hits and misses of the stages' tables and of the prefix cache between two reports."""
    rates: Json = {}
    stages = after.get("stages")
    names = list(stages) if isinstance(stages, Mapping) else []
    for table in ("rope", "mask"):
        counts = []
        for kind in ("hits", "misses"):
            key = f"{table}_{kind}"
            counts.append(sum(_figure(after, "stages", n, key) - _figure(before, "stages", n, key) for n in names))
        rates[table] = _rate(*counts)
    hits = _figure(after, "pipeline", "prefix_hits") - _figure(before, "pipeline", "prefix_hits")
    ended = [_figure(r, "pipeline", "sequences_length") for r in (before, after)]
    rates["prefix"] = _rate(hits, max(0.0, ended[1] - ended[0] - hits))
    return rates


def time_shares(traces: Sequence[Json]) -> Json:
    """Return the average parts of a token's time, with their shares.

    Communication is the time that is neither computing nor sampling nor waiting for other micro-batches.
    """
    sums: dict[str, float] = {}
    num_tokens = 0
    for trace in traces:
        for sequence in _list(trace.get("sequences")):
            num_tokens += int(sequence["num_traced"])
            for part, seconds in sequence["sums"].items():
                sums[part] = sums.get(part, 0.0) + float(seconds)
    total = sums.pop("total_s", 0.0)
    if not num_tokens or not total:
        return {"tokens": 0, "per_token_s": {}, "share": {}, "communication": None}
    return {
        "tokens": num_tokens,
        "per_token_s": {part: round(seconds / num_tokens, 6) for part, seconds in sums.items()},
        "share": {part: round(seconds / total, 4) for part, seconds in sums.items()},
        "communication": round(sum(sums.get(part, 0.0) for part in _COMMUNICATION) / total, 4),
    }


def _medians(runs: Sequence[ProfiledRequest]) -> Json:
    """Return the medians of similar runs."""
    gaps = [gap for run in runs for gap in run.gaps]
    return {
        "ttft_s": round(statistics.median(run.first_s for run in runs), 6),
        "total_s": round(statistics.median(run.total_s for run in runs), 6),
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 2),
        "per_token_s": round(statistics.median(gaps), 6) if gaps else None,
    }


def _sustained_stats(runs: Sequence[ProfiledRequest]) -> Json:
    rates = [run.tokens_per_s for run in runs]
    half = len(rates) // 2 or 1
    first, second = statistics.mean(rates[:half]), statistics.mean(rates[-half:])
    return {
        "runs": len(runs),
        "tokens_per_s": round(statistics.mean(rates), 2),
        "slowest": round(min(rates), 2),
        "fastest": round(max(rates), 2),
        "deviation": round(statistics.pstdev(rates), 2),
        "drift": round(second / first - 1, 4),
    }


def _rate(hits: float, misses: float) -> Json:
    total = hits + misses
    return {"hits": int(hits), "misses": int(misses), "rate": round(hits / total, 4) if total else None}


def _figure(report: Json, *path: str) -> float:
    """Return a number in a report; 0 if it is missing."""
    value: object = report
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else 0.0


def _list(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
