"""Send times of requests, and their division among processes. Pure, seeded: the same seed gives the same load, whatever
the number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from swarm.bench.plan import LoadPoint


@dataclass(frozen=True, slots=True)
class PointShare:
    """One process's part of a point: it sends the requests ``first``, ``first + step``, ``first + 2 · step`` …"""

    first: int
    step: int
    point: LoadPoint


def split_point(point: LoadPoint, num_processes: int) -> list[PointShare]:
    """Divide a point among processes as evenly as possible. With fewer concurrent requests than processes, some stay
    idle."""
    concurrency = point.concurrency if point.concurrency is not None else num_processes
    active = min(num_processes, concurrency, point.count or num_processes)
    return [PointShare(number, active, _part(point, number, active)) for number in range(active)]


def _part(point: LoadPoint, number: int, active: int) -> LoadPoint:
    def part(whole: int) -> int:
        return whole // active + (1 if number < whole % active else 0)

    return replace(
        point,
        concurrency=None if point.concurrency is None else part(point.concurrency),
        count=None if point.count is None else part(point.count),
        max_in_flight=max(1, part(point.max_in_flight)),
    )


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield due times in seconds: a Poisson process of ``rate`` per second, without end."""
    chance, at = Random(f"{seed}:arrivals"), 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def share_arrivals(rate: float, seed: int, share: PointShare) -> Iterator[tuple[int, float]]:
    """Yield one process's part of the arrivals: number and due time of each request."""
    for index, at in enumerate(arrivals(rate, seed)):
        if index % share.step == share.first:
            yield index, at
