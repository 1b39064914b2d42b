"""Recent rates, medians and time series, from counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.admin.report_rows import Row, get_number
from swarm.gateway.console.patch import Tree

RATE_S: Final = 2.0  # seconds over which a rate is taken: short enough to show a stop, long enough not to flicker
MEDIAN_S: Final = 15.0  # seconds over which medians are taken
MIN_RATE_S: Final = 0.3  # seconds; over less, when a report was late, a rate is random
GAP_S: Final = 5.0  # seconds without a report after which earlier samples are dropped
SERIES_S: Final = 300  # seconds of time series kept
SERIES: Final = ("tokens_per_s", "first_token_s", "between_tokens_s", "queued")
_TIMES: Final = ("first_token_s", "between_tokens_s")
_COUNTERS: Final = ("tokens_per_s", "steps_per_s", "prompt_tokens_per_s")


def round_digits(value: float, digits: int = 3) -> float:
    """Round to this number of significant digits, so that insignificant changes send no updates."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    counters: tuple[float, ...]
    times: tuple[Sequence[float], ...]  # counts of histograms


@dataclass(slots=True)
class RecentMetrics:
    """Rates, medians and time series. Fed with each ``stats`` report and the time of a monotonic clock."""

    _samples: deque[_Sample] = field(default_factory=deque)
    _bounds: tuple[Sequence[float], ...] = ()
    _series: deque[tuple[int, Tree]] = field(default_factory=lambda: deque(maxlen=SERIES_S))
    _rates: Tree = field(default_factory=dict)

    def add(self, stats: Row, now: float) -> None:
        """Add a report. Start over if the broker has restarted, since its counters begin at zero again, or after a gap
        between reports."""
        pipeline, spread = _table(stats, "pipeline"), _table(stats, "histograms")
        tokens = get_number(pipeline, "tokens")
        prompt = max(0.0, get_number(pipeline, "positions") - tokens)
        times = [_table(spread, name) for name in _TIMES]
        self._bounds = tuple(_numbers(each.get("bounds")) for each in times)
        sample = _Sample(
            now,
            (tokens, get_number(pipeline, "steps"), prompt),
            tuple(_numbers(each.get("counts")) for each in times),
        )
        if self._samples and (sample.counters[0] < self._samples[-1].counters[0] or now > self._samples[-1].at + GAP_S):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= now - MEDIAN_S:
            self._samples.popleft()
        self._rates = self._make_rates(get_number(pipeline, "queued"), get_number(pipeline, "running"))

    @property
    def rates(self) -> Tree:
        return self._rates

    def tick(self, unix: float) -> None:
        """Add a point to the time series, one per second."""
        if self._rates and (not self._series or int(unix) > self._series[-1][0]):
            self._series.append((int(unix), {name: self._rates.get(name) for name in SERIES}))

    def series(self, unix: float) -> Tree:
        points = [point for point in self._series if point[0] > unix - SERIES_S]
        return {"at": [at for at, _ in points]} | {name: [row[name] for _, row in points] for name in SERIES}

    def _make_rates(self, queued: float, running: float) -> Tree:
        last = self._samples[-1]
        before = next((s for s in reversed(self._samples) if s.at <= last.at - RATE_S), self._samples[0])
        passed_s = last.at - before.at
        rates: Tree = {}
        for name, was, is_now in zip(_COUNTERS, before.counters, last.counters, strict=True):
            if passed_s >= MIN_RATE_S:
                rates[name] = round_digits(max(0.0, is_now - was) / passed_s)
            else:
                rates[name] = self._rates.get(name, 0.0) if passed_s > 0 else 0.0
        first = self._samples[0]
        for name, bounds, was_, is_ in zip(_TIMES, self._bounds, first.times, last.times, strict=True):
            rates[name] = median(bounds, [b - a for a, b in zip(was_, is_, strict=False)])
        return rates | {"queued": int(queued), "running": int(running)}


def median(bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the median of a histogram, interpolated within its bucket; None if the histogram is empty. The last bucket
    has no upper bound: in it, the result is its lower bound."""
    half = sum(counts) / 2
    if half <= 0:
        return None
    below = 0.0
    for index, count in enumerate(counts):
        if below + count >= half and count > 0:
            if index >= len(bounds):
                return round_digits(bounds[-1]) if bounds else None
            low = bounds[index - 1] if index else 0.0
            return round_digits(low + (bounds[index] - low) * (half - below) / count)
        below += count
    return None


def _table(row: Row, key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def _numbers(value: object) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else ()
