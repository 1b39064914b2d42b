"""Figures computed from records. Pure.

Latencies are measured from requests that were due within the window and succeeded. Rates count what arrived within the
window, whichever request it belongs to: so neither the start nor the end of a run distorts them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm.bench.plan import LatencyLimits
from swarm.bench.records import CUT, GapHistogram, PointRecords, RequestTiming

PERCENTILES = (50, 90, 95, 99)  # percentiles
CURVE_POINTS = 200  # points of a distribution's curve
MAX_SAMPLES = 1500  # requests that a report shows individually


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Distribution of a latency, in milliseconds."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Lengths of the answers that succeeded, in the tokens that were received."""

    mean: float
    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.mean:g} tokens" if self.min == self.max else f"{self.mean:g} tokens ({self.min} to {self.max})"


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every limit: their share of the requests that were due, and their rate within the window."""

    limits: str
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Count of one kind of error, and the text of the first one."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class PointFigures:
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
    answer_tokens: AnswerLengths | None
    counted_by: str  # "usage": the server's figures; "pieces": chunks with text; "mixed"
    ttft_ms: LatencySummary | None
    inter_token_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None
    send_delay_ms: LatencySummary | None  # how long after their due times requests were sent
    goodput: Goodput | None
    errors: dict[str, ErrorSummary]


@dataclass(frozen=True, slots=True)
class PlotSeries:
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


def summarise(seconds: Iterable[float]) -> LatencySummary | None:
    """Summarise times; None if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    p50, p90, p95, p99 = (_ms(percentile(ordered, share)) for share in PERCENTILES)
    return LatencySummary(len(ordered), _ms(math.fsum(ordered) / len(ordered)), p50, p90, p95, p99, _ms(ordered[-1]))


def summarise_histogram(gaps: GapHistogram) -> LatencySummary | None:
    """Summarise a histogram: percentiles within half a percent; mean and maximum are exact."""
    if not gaps.num:
        return None
    p50, p90, p95, p99 = (_ms(gaps.quantile(share / 100)) for share in PERCENTILES)
    return LatencySummary(gaps.num, _ms(gaps.mean), p50, p90, p95, p99, _ms(gaps.max_value))


def compute_figures(gathered: PointRecords, seconds: float, limits: LatencyLimits | None = None) -> PointFigures:
    """Compute the figures of a window of ``seconds`` that opened at 0."""
    inside = due_in_window(gathered.records, seconds)
    good = [record for record in inside if record.is_ok]
    failed = [record for record in inside if not record.is_ok and record.outcome != CUT]
    tokens = sum(tokens_inside(record) for record in gathered.records if record.is_ok or record.outcome == CUT)
    finished = sum(1 for record in gathered.records if record.is_ok and 0 <= record.end <= seconds)
    prompt_tokens = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
    return PointFigures(
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
        prompt_tokens=sum(prompt_tokens) if prompt_tokens else None,
        answer_tokens=_measure_answers(good),
        counted_by=_counted_by(good),
        ttft_ms=summarise(record.ttft for record in good if record.ttft is not None),
        inter_token_ms=summarise_histogram(gathered.gaps),
        tpot_ms=summarise(record.tpot for record in good if record.tpot is not None),
        e2e_ms=summarise(record.e2e for record in good),
        send_delay_ms=summarise(record.sent - record.due for record in inside),
        goodput=_goodput(gathered.records, inside, seconds, limits) if limits else None,
        errors=_errors(failed),
    )


def _measure_answers(good: Iterable[RequestTiming]) -> AnswerLengths | None:
    lengths = [record.num_tokens for record in good]
    return AnswerLengths(round(sum(lengths) / len(lengths), 1), min(lengths), max(lengths)) if lengths else None


def due_in_window(records: Iterable[RequestTiming], seconds: float) -> list[RequestTiming]:
    """Return the requests that were due within the window."""
    return [record for record in records if 0 <= record.due <= seconds]


def tokens_inside(record: RequestTiming) -> float:
    """Return a request's tokens within the window. If a chunk has several tokens, they are divided equally among
    chunks."""
    return record.num_tokens * record.pieces_inside / record.num_pieces if record.num_pieces else 0.0


def meets_limits(record: RequestTiming, limits: LatencyLimits) -> bool:
    """Return whether a request succeeded within every limit. A limit that does not apply counts as met (an answer of a
    single token has no time between tokens)."""
    pairs = ((record.ttft, limits.ttft), (record.tpot, limits.tpot), (record.e2e, limits.e2e))
    return record.is_ok and all(limit is None or time is None or time <= limit for time, limit in pairs)


def compute_series(gathered: PointRecords, seconds: float, bin_s: float) -> PlotSeries:
    """Collect the values for plots."""
    inside = sorted(due_in_window(gathered.records, seconds), key=lambda record: record.due)
    good = [record for record in inside if record.is_ok]
    step = max(1, math.ceil(len(good) / MAX_SAMPLES))
    curves = {
        "ttft": curve([record.ttft for record in good if record.ttft is not None]),
        "e2e": curve([record.e2e for record in good]),
        "inter_token": _histogram_curve(gathered.gaps),
    }
    pieces = sum(record.num_pieces for record in good)
    per_piece = sum(record.num_tokens for record in good) / pieces if pieces else 1.0
    num_bins = max(1, math.floor(seconds / bin_s + 1e-6))
    return PlotSeries(
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
        failures=[round(record.due, 4) for record in inside if not record.is_ok and record.outcome != CUT][
            :MAX_SAMPLES
        ],
    )


def curve(values: list[float]) -> list[tuple[float, float]]:
    """Return the cumulative distribution as (milliseconds, share)."""
    if not values:
        return []
    ordered = sorted(values)
    return [(_ms(percentile(ordered, 100 * n / CURVE_POINTS)), n / CURVE_POINTS) for n in range(CURVE_POINTS + 1)]


def _histogram_curve(gaps: GapHistogram) -> list[tuple[float, float]]:
    return (
        [(_ms(gaps.quantile(n / CURVE_POINTS)), n / CURVE_POINTS) for n in range(CURVE_POINTS + 1)] if gaps.num else []
    )


def _goodput(
    records: list[RequestTiming], inside: list[RequestTiming], seconds: float, limits: LatencyLimits
) -> Goodput:
    judged = [record for record in inside if record.outcome != CUT]
    num = sum(1 for record in judged if meets_limits(record, limits))
    in_time = sum(1 for record in records if 0 <= record.end <= seconds and meets_limits(record, limits))
    return Goodput(str(limits), round(num / len(judged), 4) if judged else 0.0, round(in_time / seconds, 3))


def _errors(failed: list[RequestTiming]) -> dict[str, ErrorSummary]:
    counts = Counter(record.outcome for record in failed)
    first = {record.outcome: record.detail for record in reversed(failed)}
    return {kind: ErrorSummary(count, first[kind]) for kind, count in counts.most_common()}


def _counted_by(good: list[RequestTiming]) -> str:
    has_usage = {record.has_usage for record in good}
    return "mixed" if len(has_usage) == 2 else "pieces" if has_usage == {False} else "usage"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
