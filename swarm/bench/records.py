"""Records of requests, and a histogram of the times between their tokens.

Plain values, which are sent from the client processes as JSON; a histogram of a million values is as small as one of a
thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

OK = "ok"
CUT = "cut"  # ended by the load generator: Ctrl-C, or the run's deadline. Not an error of the server
BIN_STEP = math.log(1.01)  # relative width of a histogram's bins: a value is known within half a percent


@dataclass(slots=True)
class RequestTiming:
    """One request. Times are seconds since the point's window opened."""

    index: int
    due: float  # when it should have been sent
    sent: float  # when it was sent for the first time
    end: float = 0.0
    first: float | None = None  # when its first token arrived
    outcome: str = OK  # "ok", "cut", or the kind of error
    detail: str = ""
    num_tokens: int = 0
    num_pieces: int = 0  # chunks with text
    pieces_inside: int = 0  # chunks with text within the window
    prompt_tokens: int | None = None
    has_usage: bool = False
    num_retries: int = 0

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first one."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.end - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class GapHistogram:
    """Times between tokens, in bins whose bounds grow by one percent. Tokens that come together share the time for
    which they were waited; the maximum is the longest wait."""

    num: int = 0
    total: float = 0.0
    max_value: float = 0.0  # the longest wait
    bins: dict[int, int] = field(default_factory=dict)  # bin number -> count

    def add_all(self, waits: Iterable[tuple[float, int]]) -> None:
        """Add waits, each with the number of tokens that ended it."""
        bins, log = self.bins, math.log
        for wait, num in waits:
            value = wait / num
            number = int(log(value) // BIN_STEP) if value > 1e-6 else _LOWEST_BIN
            bins[number] = bins.get(number, 0) + num
            self.total += wait
            self.num += num
            if wait > self.max_value:  # noqa: PLR1730 (as in swarm.series)
                self.max_value = wait

    def merge(self, other: GapHistogram) -> None:
        self.num += other.num
        self.total += other.total
        self.max_value = max(self.max_value, other.max_value)
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count

    def quantile(self, share: float) -> float:
        """Return the smallest value that at least this share does not exceed, within half a percent; 0 if empty."""
        wanted, seen = max(1, math.ceil(share * self.num)), 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                return min(self.max_value, 0.0 if number == _LOWEST_BIN else math.exp((number + 0.5) * BIN_STEP))
        return 0.0

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else 0.0


_LOWEST_BIN = int(math.log(1e-6) // BIN_STEP)


@dataclass(slots=True)
class PointRecords:
    """Records of a point, from all client processes."""

    records: list[RequestTiming] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)  # times between tokens
    pieces: dict[int, int] = field(default_factory=dict)  # bin of the window -> chunks with text
    cpu: list[float] = field(default_factory=list)  # each client process's share of a core

    def merge(self, other: PointRecords) -> None:
        self.records += other.records
        self.gaps.merge(other.gaps)
        self.cpu += other.cpu
        for number, count in other.pieces.items():
            self.pieces[number] = self.pieces.get(number, 0) + count
