"""Running statistics of measured values: count, last, total, maximum, or a distribution over fixed buckets. Pure, and
cheap enough to be always on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(slots=True)
class RunningStats:
    """Running statistics of one measured value."""

    num: int = 0
    total: float = 0.0
    last: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value
        self.last = value
        if value > self.most:  # noqa: PLR1730 (twice as quick as a call of max)
            self.most = value

    @property
    def average(self) -> float:
        return self.total / self.num if self.num else 0.0

    def size_report(self) -> dict[str, float]:
        """Return the statistics of counts and sizes."""
        return {"total": self.total, "last": self.last, "average": round(self.average, 2), "most": self.most}

    def time_report(self) -> dict[str, float]:
        """Return the statistics of times in microseconds; the values are seconds."""
        parts = {"total": self.total, "last": self.last, "average": self.average}
        return {name: round(value * 1e6, 1) for name, value in parts.items()}

    def average_since(self, earlier: tuple[int, float]) -> float:
        """Return the average of the values added after ``snapshot()`` returned ``earlier``."""
        num, total = earlier
        return (self.total - total) / (self.num - num) if self.num > num else 0.0

    def snapshot(self) -> tuple[int, float]:
        return self.num, self.total


# Upper bounds in seconds. In the important range there are five buckets per decade, so values read from them are
# accurate to a factor of 1.6.
SHORT_S = (0.0005, 0.001, 0.0016, 0.0025, 0.004, 0.0063, 0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.63, 2.5)
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 25.0, 60.0, 150.0, 600.0)
POWERS = tuple(float(1 << n) for n in range(13))


@dataclass(slots=True)
class Histogram:
    """Number of values per bucket. ``bounds`` are the buckets' inclusive upper ends; one more bucket takes larger
    values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, num: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += num
        self.total += value * num

    def report(self) -> dict[str, object]:
        """Return it as JSON; ``counts`` are not cumulative."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


@dataclass(slots=True)
class ProfiledCalls:
    """Base class of call counters; a subclass has a :class:`Series` for each name in ``SIZES`` and ``TIMES``."""

    SIZES: ClassVar[tuple[str, ...]] = ()
    TIMES: ClassVar[tuple[str, ...]] = ()

    calls: int = 0
    overlapped_calls: int = 0
    _marks: dict[str, tuple[int, float]] = field(default_factory=dict)  # State of each series at the last ``profile``.

    def profile(self) -> dict[str, object]:
        """Return the averages since the last call, for a log line."""
        line: dict[str, object] = {"calls": self.calls, "overlapped_calls": self.overlapped_calls}
        line |= {name: round(value, 2) for name, value in self._averages(self.SIZES)}
        line |= {f"{name}_us": round(value * 1e6, 1) for name, value in self._averages(self.TIMES)}
        self._marks = {name: self.series(name).snapshot() for name in (*self.SIZES, *self.TIMES)}
        return line

    def series(self, name: str) -> RunningStats:
        series: RunningStats = getattr(self, name)
        return series

    def _averages(self, names: Iterable[str]) -> Iterable[tuple[str, float]]:
        return ((name, self.series(name).average_since(self._marks.get(name, (0, 0.0)))) for name in names)
