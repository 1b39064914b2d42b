"""Search for saturation: double the requests in flight until throughput gains too little or limits are exceeded.

Pure: measured points in, the next load or the verdict out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GOOD_SHARE = 0.95  # a point meets its limits if at least this share of its requests does
BAD_SHARE = 0.05  # with a larger share of failures, more load would measure the rejections


@dataclass(frozen=True, slots=True)
class Measured:
    """Values of a point for the sweep."""

    concurrency: int
    tokens_per_s: float
    failed_share: float
    good_share: float | None  # None without limits


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a sweep."""

    concurrency: int | None  # the recommended load; None: not even the first load was served
    tokens_per_s: float
    reason: str
    is_saturated: bool


def following(points: Sequence[Measured], first: int, most: int, gain: float) -> int | Verdict:
    """Return the next number of requests in flight, or the verdict.

    ``gain``: the smallest growth of tokens/s, as a share, that doubling the load must bring.
    """
    if not points:
        return first
    last = points[-1]
    before = points[-2] if len(points) > 1 else None
    if last.failed_share > BAD_SHARE:
        return _broken(before, f"{last.failed_share:.0%} of the requests failed with {last.concurrency} in flight")
    if last.good_share is not None and last.good_share < GOOD_SHARE:
        return _broken(before, f"only {last.good_share:.0%} met the limits with {last.concurrency} in flight")
    if before is not None and last.tokens_per_s < before.tokens_per_s * (1 + _wanted(before, last, gain)):
        change = last.tokens_per_s / before.tokens_per_s - 1
        reason = (
            f"with {last.concurrency} in flight, tokens/s change by {change:+.1%} compared with {before.concurrency}, "
            f"less than the required {_wanted(before, last, gain):+.1%}"
        )
        return Verdict(before.concurrency, before.tokens_per_s, reason, True)
    if last.concurrency >= most:
        return Verdict(
            last.concurrency, last.tokens_per_s, f"not saturated yet at {most}, the highest load to be tried", False
        )
    return min(most, last.concurrency * 2)


def _wanted(before: Measured, last: Measured, gain: float) -> float:
    """Return the required growth of a step; the last step may be less than a doubling."""
    return gain * (last.concurrency / before.concurrency - 1)


def _broken(before: Measured | None, reason: str) -> Verdict:
    if before is None:
        return Verdict(None, 0.0, f"{reason}, the lowest load tried", True)
    return Verdict(before.concurrency, before.tokens_per_s, reason, True)
