"""Search for saturation: double the requests in flight until throughput gains too little or limits are exceeded.

Pure: measured points in, the next load or the verdict out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_GOOD_SHARE = 0.95  # a point meets its limits if at least this share of its requests does
MAX_FAILED_SHARE = 0.05  # with a larger share of failures, more load would measure the rejections


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Values of a point for the sweep."""

    concurrency: int
    tokens_per_s: float
    failed_share: float
    good_share: float | None  # None without limits


@dataclass(frozen=True, slots=True)
class SweepVerdict:
    """Result of a sweep."""

    concurrency: int | None  # the recommended load; None: not even the first load was served
    tokens_per_s: float
    reason: str
    is_saturated: bool


def next_step(points: Sequence[SweepPoint], first: int, most: int, gain: float) -> int | SweepVerdict:
    """Return the next number of requests in flight, or the verdict.

    ``gain``: the smallest growth of tokens/s, as a share, that doubling the load must bring.
    """
    if not points:
        return first
    last = points[-1]
    before = points[-2] if len(points) > 1 else None
    if last.failed_share > MAX_FAILED_SHARE:
        return _end_at(before, f"{last.failed_share:.0%} of the requests failed with {last.concurrency} in flight")
    if last.good_share is not None and last.good_share < MIN_GOOD_SHARE:
        return _end_at(before, f"only {last.good_share:.0%} met the limits with {last.concurrency} in flight")
    if before is not None and last.tokens_per_s < before.tokens_per_s * (1 + _required_gain(before, last, gain)):
        change = last.tokens_per_s / before.tokens_per_s - 1
        reason = (
            f"with {last.concurrency} in flight, tokens/s change by {change:+.1%} compared with {before.concurrency}, "
            f"less than the required {_required_gain(before, last, gain):+.1%}"
        )
        return SweepVerdict(before.concurrency, before.tokens_per_s, reason, True)
    if last.concurrency >= most:
        return SweepVerdict(
            last.concurrency, last.tokens_per_s, f"not saturated yet at {most}, the highest load to be tried", False
        )
    return min(most, last.concurrency * 2)


def _required_gain(before: SweepPoint, last: SweepPoint, gain: float) -> float:
    """Return the required growth of a step; the last step may be less than a doubling."""
    return gain * (last.concurrency / before.concurrency - 1)


def _end_at(before: SweepPoint | None, reason: str) -> SweepVerdict:
    if before is None:
        return SweepVerdict(None, 0.0, f"{reason}, the lowest load tried", True)
    return SweepVerdict(before.concurrency, before.tokens_per_s, reason, True)
