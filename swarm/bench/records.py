"""What is kept of requests: a record of each, and a histogram of the times between their tokens. Plain values, which
travel from the client processes as JSON; a million gaps take no more room than a thousand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

OK = "ok"
CUT = "cut"  # we ended it: Ctrl-C, or the run's deadline. No error of the server's
STEP = math.log(1.01)  # a histogram's bins: a value is known within half a percent


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the point's window opened. ``due``: when it should have been sent; ``sent``:
    when it first was; ``first``: when its first token came; ``outcome``: ``ok``, ``cut`` or the kind of its error.
    ``pieces_inside``: how many pieces with text came within the window."""

    index: int
    due: float
    sent: float
    end: float = 0.0
    first: float | None = None
    outcome: str = OK
    detail: str = ""
    num_tokens: int = 0
    num_pieces: int = 0
    pieces_inside: int = 0
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
        """Time per token after the first, on average."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.end - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class Histogram:
    """Positive values, in bins that grow by one percent each. ``bins``: from a bin's number to its count."""

    num: int = 0
    total: float = 0.0
    most: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add_all(self, values: Iterable[float]) -> None:
        bins, log = self.bins, math.log
        for value in values:
            number = int(log(value) // STEP) if value > 1e-6 else _LEAST
            bins[number] = bins.get(number, 0) + 1
            self.total += value
            self.num += 1
            if value > self.most:  # noqa: PLR1730 (as in swarm.series)
                self.most = value

    def merge(self, other: Histogram) -> None:
        self.num += other.num
        self.total += other.total
        self.most = max(self.most, other.most)
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count

    def quantile(self, share: float) -> float:
        """The least value that so great a share does not exceed, within half a percent; 0 if there are none."""
        wanted, seen = max(1, math.ceil(share * self.num)), 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                return min(self.most, 0.0 if number == _LEAST else math.exp((number + 0.5) * STEP))
        return 0.0

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else 0.0


_LEAST = int(math.log(1e-6) // STEP)


@dataclass(slots=True)
class Gathered:
    """All that is known of a point when it has ended. ``pieces``: how many came in each bin of the window; ``cpu``:
    what share of a core each client process used."""

    records: list[Record] = field(default_factory=list)
    gaps: Histogram = field(default_factory=Histogram)
    pieces: dict[int, int] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)

    def merge(self, other: Gathered) -> None:
        self.records += other.records
        self.gaps.merge(other.gaps)
        self.cpu += other.cpu
        for number, count in other.pieces.items():
            self.pieces[number] = self.pieces.get(number, 0) + count
