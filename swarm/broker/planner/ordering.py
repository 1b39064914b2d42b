"""Order of many devices: good orders to start with, then small changes as long as they help.

A line of devices is as good as its slowest (or its sum), which depends far more on the choice of devices than on their
order. So the first step is to choose: the devices that a bound rates as most productive in the required time, and a few
more. Then the order: workers of a host next to each other, so that few hops leave it; the best device for the head
last, for the embedding first. Starting from the best of a few such orders, devices are moved and exchanged, a bounded
number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from swarm.broker.planner import tables
from swarm.broker.planner.bound import count_covered, lower_bound, most_layers, sort_by_cost
from swarm.broker.planner.problem import Line, PlanningProblem
from swarm.broker.planner.search import Combine, search_order
from swarm.broker.planner.tables import Table

SPARE = 4  # devices beyond the number that a bound requires
MAX_EFFORT = 6_000  # devices considered in all changes together: a quarter of a second
# multiples of the bound: the time within which the chosen devices must be able to compute all layers
TIME_FACTORS = (1.001, 1.1, 8.0)
GOOD_ENOUGH = 1.002  # of the bound: nothing more can be gained
CLOSE = 1.05  # of the bound: not worth considering other devices too


@dataclass
class _LocalSearch:
    """Local search: the best line so far, and the remaining effort."""

    problem: PlanningProblem
    device_tables: dict[int, Table]  # by device: time of each range of layers
    hops: Table
    combine: Combine
    required: frozenset[int]  # devices that may not be left out
    goal: float  # cost at which the search stops
    effort: int = MAX_EFFORT  # devices that may still be considered
    cost: float = np.inf
    line: Line = ()
    order: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.effort <= 0 or self.cost <= self.goal

    def attempt(self, order: Sequence[int]) -> bool:
        """Evaluate this order; keep it if it is better."""
        self.effort -= len(order)
        result = search_order(_SparseTables(self.device_tables), self.hops, self.combine, order, self.required)
        if result is None:
            return False
        cost = tables.step_seconds(self.problem, result[1], self.hops)
        if cost >= self.cost * (1 - 1e-9):
            return False
        self.cost, self.line, self.order = cost, result[1], list(order)
        return True


class _SparseTables(Sequence[Table]):
    """Tables of chosen devices, by the devices' own numbers."""

    def __init__(self, chosen: dict[int, Table]) -> None:
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return next(iter(self._chosen.values())) if index not in self._chosen else self._chosen[index]


def heuristic_line(
    problem: PlanningProblem, combine: Combine, hops: Table, required: frozenset[int]
) -> tuple[float, Line] | None:
    """Return a line close to the best; None if none was found."""
    bound = lower_bound(problem)
    if not np.isfinite(bound):
        return None
    best: tuple[float, Line] | None = None
    for factor in TIME_FACTORS:
        chosen = _choose(problem, bound * factor, required)
        device_tables = {
            i: tables.range_seconds(problem.model, problem.devices[i], problem.kv_positions) for i in chosen
        }
        search = _LocalSearch(problem, device_tables, hops, combine, required, bound * GOOD_ENOUGH)
        for order in _first_orders(problem, chosen):
            if not search.is_over:
                search.attempt(order)
        _improve(search)
        if search.line and (best is None or search.cost < best[0]):
            best = search.cost, search.line
        if problem.takes_turns or (best is not None and best[0] <= bound * CLOSE):
            break
    return best


def _choose(problem: PlanningProblem, limit_s: float, required: frozenset[int]) -> list[int]:
    """Choose the fewest devices that could compute all layers within this time, the most productive first; and a few
    more."""
    most = most_layers(problem)
    devices, num = problem.devices, problem.model.num_layers
    if problem.takes_turns:
        ranked = sort_by_cost(problem, most)
        cover = np.cumsum([most[i] for i in ranked])
        enough = int(np.searchsorted(cover, num)) + 1
    else:
        able = [i for i in range(len(devices)) if most[i] > 0]
        mean = sum(problem.model.layer_weights) / num
        does = {
            i: min(float(most[i]), max(0.0, limit_s - devices[i].stage_s) / max(devices[i].layer_s * mean, 1e-12))
            for i in able
        }
        ranked = sorted(able, key=lambda i: (-int(does[i]), devices[i].layer_s, i))
        cover = np.cumsum([int(does[i]) for i in ranked])
        enough = int(np.searchsorted(cover, num)) + 1
        while enough < len(ranked) and _count_covered(problem, ranked[:enough], limit_s) < num:
            enough += 1
    chosen = dict.fromkeys(ranked[: enough + SPARE])
    able = [i for i in range(len(devices)) if most[i] > 0]
    for key in ("head_s", "embed_s"):
        ends = sorted(able, key=lambda i: getattr(devices[i], key) + devices[i].layer_s)
        chosen.update(dict.fromkeys(ends[:2]))
    return [*chosen, *(required - chosen.keys())]


def _count_covered(problem: PlanningProblem, chosen: list[int], limit_s: float) -> int:
    part = _restrict(problem, chosen)
    return count_covered(part, limit_s)


def _restrict(problem: PlanningProblem, chosen: list[int]) -> PlanningProblem:
    return PlanningProblem(
        problem.model, tuple(problem.devices[i] for i in chosen), problem.takes_turns, kv_positions=problem.kv_positions
    )


def _first_orders(problem: PlanningProblem, chosen: list[int]) -> Iterator[list[int]]:
    """Yield orders to start with: hosts together, the quickest first; by the layers held now; by speed; by memory."""
    devices = problem.devices
    pinned = {i: devices[i].pinned for i in chosen}

    def place_pinned(order: list[int]) -> list[int]:
        """Put pinned devices at about their place: at the fraction of the line at which their layers begin."""
        rest = [i for i in order if pinned[i] is None]
        for i in sorted((i for i in order if pinned[i] is not None), key=lambda i: pinned[i].first):  # type: ignore[union-attr]
            share = pinned[i].first / problem.model.num_layers  # type: ignore[union-attr]
            rest.insert(round(share * len(rest)), i)
        return rest

    by_speed = sorted(chosen, key=lambda i: devices[i].layer_s)
    quickest: dict[str, float] = {}
    for i in by_speed:
        quickest.setdefault(devices[i].host or devices[i].name, devices[i].layer_s)

    def host_rank(i: int) -> tuple[float, str, float]:
        host = devices[i].host or devices[i].name
        return quickest[host], host, devices[i].layer_s

    hosts = sorted(chosen, key=host_rank)
    yield place_pinned(_place_best_ends(problem, hosts))
    yield place_pinned(hosts)
    yield place_pinned(sorted(chosen, key=lambda i: held.first if (held := devices[i].held) else 1 << 30))
    yield place_pinned(by_speed)
    yield place_pinned(by_speed[::-1])
    yield place_pinned(sorted(chosen, key=lambda i: -devices[i].memory_bytes))


def _place_best_ends(problem: PlanningProblem, order: list[int]) -> list[int]:
    devices = problem.devices
    last = min(order, key=lambda i: devices[i].head_s + devices[i].layer_s)
    rest = [i for i in order if i != last]
    if not rest:
        return order
    first = min(rest, key=lambda i: devices[i].embed_s + devices[i].layer_s)
    return [first, *(i for i in rest if i != first), last]


def _improve(search: _LocalSearch) -> None:
    """Move one device, or exchange two, while that helps and the effort allows; the most relevant changes first."""
    for turn in count():
        if search.is_over or not any(
            search.is_over or search.attempt(order) for order in _neighbour_orders(search, turn)
        ):
            return


def _neighbour_orders(search: _LocalSearch, turn: int) -> Iterator[list[int]]:
    """Yield orders near the present one: the slowest elsewhere, each device at either end, neighbours exchanged."""
    order = search.order
    if not search.line:
        return
    parts = tables.stage_seconds(search.problem, search.line)
    used = [share.device for share in search.line]
    slow = used[int(np.argmax(parts))]
    size = len(order)
    places = sorted({0, size - 1, *(int(p) for p in np.linspace(0, size - 1, 8)), turn % size})
    for place in places:
        rest = [i for i in order if i != slow]
        rest.insert(place, slow)
        yield rest
    for device in order:
        rest = [i for i in order if i != device]
        yield [*rest, device]
        yield [device, *rest]
    for place in range(size - 1):
        changed = list(order)
        changed[place], changed[place + 1] = changed[place + 1], changed[place]
        yield changed
