"""Times of steps by their number of positions, from which the cost of another position follows.

Times are averaged by size class: exact up to 16 positions, then eight classes for each power of two. A larger step
never takes less time by itself, so measurements that contradict this are averaged with their neighbours (isotonic
regression); between two classes the time is interpolated. Beyond the largest size that was measured, a position is
assumed to cost as much as on average below it, and at most ``UNMEASURED``: the first step of that size corrects this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

UNMEASURED: Final = 1 / 16  # cost of a position beyond all measured sizes, as a fraction of the largest step's time
FORGET_AFTER_STEPS: Final = 2048  # steps after which a size class that did not occur again is dropped
_HALF_LIFE: Final = 256  # steps in which the weight of a measurement halves
_WEIGHT: Final = 0.2  # weight of the newest step in the average of its class
_OUTLIER: Final = 2.0  # a time that exceeds the average by more than this factor counts as this factor


@dataclass(slots=True)
class _Class:
    """Averages of one size class."""

    positions: float
    seconds: float
    num_steps: int  # that were averaged
    measured_at: int  # number of the last of them


class StepTimes:
    """Measured times of steps (see the module)."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}  # by ``_class_of``
        self._num_steps = 0
        self._points: list[tuple[float, float]] | None = None  # (positions, seconds), increasing; None: out of date

    def record(self, positions: int, seconds: float) -> None:
        """Record a completed step."""
        self._num_steps += 1
        if positions <= 0:
            return
        self._points = None
        key = _class_of(positions)
        known = self._classes.get(key)
        if known is None:
            self._classes[key] = _Class(positions, seconds, 1, self._num_steps)
            return
        known.num_steps += 1
        weight = max(_WEIGHT, 1 / known.num_steps)
        known.positions += weight * (positions - known.positions)
        known.seconds += weight * (min(seconds, _OUTLIER * known.seconds) - known.seconds)
        known.measured_at = self._num_steps

    def clear(self) -> None:
        """Forget everything: another plan has other times."""
        self._classes.clear()
        self._points = None

    def age(self, positions: int) -> int | None:
        """Return how many steps ago a step of about this size was measured; None if there was none."""
        known = self._classes.get(_class_of(positions))
        return None if known is None else self._num_steps - known.measured_at

    def estimates(self, positions: int) -> Iterator[float]:
        """Yield the estimated times of steps of this size, of one position more, and so on; none before the first
        measurement."""
        points = self._points
        if points is None:
            points = self._points = self._fit()
        if not points:
            return
        size, index, last = positions, 0, len(points) - 1
        (least, first), (most, longest) = points[0], points[last]
        slope = min(UNMEASURED * longest, (longest - first) / (most - least) if last else longest)
        while True:
            while index < last and points[index + 1][0] <= size:
                index += 1
            below, seconds = points[index]
            if index < last:
                above, more = points[index + 1]
                yield seconds + (more - seconds) * max(0.0, size - below) / (above - below)
            else:
                yield seconds + slope * max(0.0, size - below)
            size += 1

    def _fit(self) -> list[tuple[float, float]]:
        """Return the smoothed times: positions and times increase."""
        now = self._num_steps
        blocks: list[tuple[float, float, list[float]]] = []  # weight, seconds, and the positions that share this time
        for key in sorted(self._classes):
            known = self._classes[key]
            age = now - known.measured_at
            if age > FORGET_AFTER_STEPS:
                del self._classes[key]
                continue
            weight, seconds, positions = (
                min(known.num_steps, 1 / _WEIGHT) * 0.5 ** (age / _HALF_LIFE),
                known.seconds,
                [known.positions],
            )
            while blocks and blocks[-1][1] >= seconds:
                other, their_seconds, their_positions = blocks.pop()
                seconds = (weight * seconds + other * their_seconds) / (weight + other)
                weight, positions = weight + other, their_positions + positions
            blocks.append((weight, seconds, positions))
        return [(position, seconds) for _, seconds, positions in blocks for position in positions]


def _class_of(positions: int) -> int:
    """Return the class. Up to 256 positions, none extends beyond a multiple of 16: kernels compute 16 rows together, so
    the next position costs more."""
    before = positions - 1
    if before < 8:
        return before
    bits = before.bit_length()
    return 8 * bits + (before >> bits - 4 & 7)
