"""Figures computed from records. Pure.

Latencies are those of requests that were due within the window and succeeded. Rates count what arrived within the
window, whichever request it belongs to: so neither the start nor the end of a run distorts them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm.bench.plan import Limits
from swarm.bench.records import CUT, Gathered, Histogram, Record

SHARES = (50, 90, 95, 99)  # percentiles
CURVE = 200  # points of a distribution's curve
SAMPLES = 1500  # requests that a report shows individually


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a latency, in milliseconds."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every limit: their share of the requests that were due, and their rate within the window."""

    limits: str
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Count of one kind of error, and the text of the first one."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one point."""

    seconds: float
    requests: int
    succeeded: int
    failed: int
    cut: int  # requests ended by the load generator itself
    retries: int
    requests_per_s: float
    tokens_per_s: float
    tokens: int
    tokens_of_failed: int
    prompt_tokens: int | None
    counted_by: str  # "usage": the server's figures; "pieces": chunks with text; "mixed"
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    send_delay_ms: Spread | None  # how long after their due times requests were sent
    goodput: Goodput | None
    errors: dict[str, Errors]


@dataclass(frozen=True, slots=True)
class Series:
    """Values for plots."""

    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # distributions as (milliseconds, share)
    bin_s: float = 1.0
    tokens_per_s: list[tuple[float, float]] = field(default_factory=list)  # (seconds, rate)
    # (due, first token or None, end) of single requests
    requests: list[tuple[float, float | None, float]] = field(default_factory=list)
    failures: list[float] = field(default_factory=list)  # due times of failed requests


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ordered values, with linear interpolation as in numpy."""
    if not ordered:
        raise ValueError("no values")
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(seconds: Iterable[float]) -> Spread | None:
    """Summarise times; None if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    p50, p90, p95, p99 = (_ms(percentile(ordered, share)) for share in SHARES)
    return Spread(len(ordered), _ms(math.fsum(ordered) / len(ordered)), p50, p90, p95, p99, _ms(ordered[-1]))


def spread_of(gaps: Histogram) -> Spread | None:
    """Summarise a histogram: percentiles within half a percent; mean and maximum are exact."""
    if not gaps.num:
        return None
    p50, p90, p95, p99 = (_ms(gaps.quantile(share / 100)) for share in SHARES)
    return Spread(gaps.num, _ms(gaps.mean), p50, p90, p95, p99, _ms(gaps.most))


def figures(gathered: Gathered, seconds: float, limits: Limits | None = None) -> Figures:
    """Compute the figures of a window of ``seconds`` that opened at 0."""
    inside = measured(gathered.records, seconds)
    good = [record for record in inside if record.is_ok]
    failed = [record for record in inside if not record.is_ok and record.outcome != CUT]
    tokens = sum(tokens_inside(record) for record in gathered.records if record.is_ok or record.outcome == CUT)
    finished = sum(1 for record in gathered.records if record.is_ok and 0 <= record.end <= seconds)
    known = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
    return Figures(
        seconds=round(seconds, 3),
        requests=len(inside),
        succeeded=len(good),
        failed=len(failed),
        cut=len(inside) - len(good) - len(failed),
        retries=sum(record.num_retries for record in inside),
        requests_per_s=round(finished / seconds, 3),
        tokens_per_s=round(tokens / seconds, 2),
        tokens=round(tokens),
        tokens_of_failed=sum(record.num_tokens for record in failed),
        prompt_tokens=sum(known) if known else None,
        counted_by=_counted_by(good),
        ttft_ms=spread(record.ttft for record in good if record.ttft is not None),
        inter_token_ms=spread_of(gathered.gaps),
        tpot_ms=spread(record.tpot for record in good if record.tpot is not None),
        e2e_ms=spread(record.e2e for record in good),
        send_delay_ms=spread(record.sent - record.due for record in inside),
        goodput=_goodput(gathered.records, inside, seconds, limits) if limits else None,
        errors=_errors(failed),
    )


def measured(records: Iterable[Record], seconds: float) -> list[Record]:
    """Return the requests that were due within the window."""
    return [record for record in records if 0 <= record.due <= seconds]


def tokens_inside(record: Record) -> float:
    """Return a request's tokens within the window. If a chunk has several tokens, they are divided equally among
    chunks."""
    return record.num_tokens * record.pieces_inside / record.num_pieces if record.num_pieces else 0.0


def keeps(record: Record, limits: Limits) -> bool:
    """Return whether a request succeeded within every limit. A limit without a time (a single token has no next) is
    met."""
    pairs = ((record.ttft, limits.ttft), (record.tpot, limits.tpot), (record.e2e, limits.e2e))
    return record.is_ok and all(limit is None or time is None or time <= limit for time, limit in pairs)


def series(gathered: Gathered, seconds: float, bin_s: float) -> Series:
    """Collect the values for plots."""
    inside = sorted(measured(gathered.records, seconds), key=lambda record: record.due)
    good = [record for record in inside if record.is_ok]
    step = max(1, math.ceil(len(good) / SAMPLES))
    curves = {
        "ttft": curve([record.ttft for record in good if record.ttft is not None]),
        "e2e": curve([record.e2e for record in good]),
        "inter_token": _curve_of(gathered.gaps),
    }
    pieces = sum(record.num_pieces for record in good)
    per_piece = sum(record.num_tokens for record in good) / pieces if pieces else 1.0
    num_bins = max(1, math.floor(seconds / bin_s + 1e-6))
    return Series(
        curves={name: points for name, points in curves.items() if points},
        bin_s=bin_s,
        tokens_per_s=[
            (round((n + 0.5) * bin_s, 4), round(gathered.pieces.get(n, 0) * per_piece / bin_s, 2))
            for n in range(num_bins)
        ],
        requests=[
            (round(record.due, 4), None if record.ttft is None else _ms(record.ttft), _ms(record.e2e))
            for record in good[::step]
        ],
        failures=[round(record.due, 4) for record in inside if not record.is_ok and record.outcome != CUT][:SAMPLES],
    )


def curve(values: list[float]) -> list[tuple[float, float]]:
    """Return the cumulative distribution as (milliseconds, share)."""
    if not values:
        return []
    ordered = sorted(values)
    return [(_ms(percentile(ordered, 100 * n / CURVE)), n / CURVE) for n in range(CURVE + 1)]


def _curve_of(gaps: Histogram) -> list[tuple[float, float]]:
    return [(_ms(gaps.quantile(n / CURVE)), n / CURVE) for n in range(CURVE + 1)] if gaps.num else []


def _goodput(records: list[Record], inside: list[Record], seconds: float, limits: Limits) -> Goodput:
    judged = [record for record in inside if record.outcome != CUT]
    num = sum(1 for record in judged if keeps(record, limits))
    in_time = sum(1 for record in records if 0 <= record.end <= seconds and keeps(record, limits))
    return Goodput(str(limits), round(num / len(judged), 4) if judged else 0.0, round(in_time / seconds, 3))


def _errors(failed: list[Record]) -> dict[str, Errors]:
    counts = Counter(record.outcome for record in failed)
    first = {record.outcome: record.detail for record in reversed(failed)}
    return {kind: Errors(count, first[kind]) for kind, count in counts.most_common()}


def _counted_by(good: list[Record]) -> str:
    told = {record.has_usage for record in good}
    return "mixed" if len(told) == 2 else "pieces" if told == {False} else "usage"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
