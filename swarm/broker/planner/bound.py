"""Lower bound of a step's time, independent of the order of devices. It limits how much better than a given plan the
best plan can be.

The relaxed problem lets every device take the lightest layers, in any order, with no hop slower than the fastest; its
cost is never above that of a real plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm.broker.planner.problem import PlanningProblem
from swarm.broker.planner.search import ROUNDING
from swarm.broker.planner.tables import Table, hop_seconds

Counts = NDArray[np.int64]
_NEVER = 1 << 40  # more layers than any model has


def lower_bound(problem: PlanningProblem) -> float:
    """Return a time in seconds that no plan's step can undercut; infinite if no plan is possible."""
    return _sum_bound(problem) if problem.takes_turns else _slowest_bound(problem)


def most_layers(problem: PlanningProblem, extra_bytes: int = 0) -> Counts:
    """Return how many layers each device's memory and cap allow besides ``extra_bytes``, counting the smallest layers
    first."""
    model = problem.model
    sizes = np.concatenate(([0], np.cumsum(sorted(model.layer_bytes)))) + extra_bytes
    kv = np.concatenate(([0], np.cumsum(sorted(model.kv_bytes)))) * problem.kv_positions
    room = np.array([d.memory_bytes - d.standby_bytes for d in problem.devices])
    shares = np.array([d.kv_share for d in problem.devices])
    counts: Counts = np.zeros(len(room), np.int64)
    for share in np.unique(shares):
        needed = sizes + np.maximum(model.buffer_bytes, np.floor(kv / share))
        alike = shares == share
        counts[alike] = np.searchsorted(needed, room[alike], side="right") - 1
    caps = [model.num_layers if d.max_layers is None else d.max_layers for d in problem.devices]
    pins = [model.num_layers if d.pinned is None else len(d.pinned) for d in problem.devices]
    return np.maximum(0, np.minimum(counts, np.minimum(caps, pins)))


def _slowest_bound(problem: PlanningProblem) -> float:
    low, high = 0.0, 2.0 * sum(problem.model.layer_weights) * max(d.layer_s for d in problem.devices)
    high += sum(d.stage_s + d.embed_s + d.head_s for d in problem.devices)
    if count_covered(problem, high) < problem.model.num_layers:
        return np.inf
    for _ in range(40):  # bisection: 40 halvings are as exact as the measurements, many times over
        middle = (low + high) / 2
        if count_covered(problem, middle) >= problem.model.num_layers:
            high = middle
        else:
            low = middle
    return low


def count_covered(problem: PlanningProblem, limit_s: float) -> int:
    """Return an upper bound of the number of layers that all devices together can compute within a time limit.

    ``limit_s``: time that each device has for one step. The devices with the embedding and the head compute fewer
    layers; the best choice of these two devices is assumed.
    """
    devices, model = problem.devices, problem.model
    counts = _count_computable(problem, most_layers(problem), [limit_s - d.stage_s for d in devices])
    embeds = _count_computable(
        problem, most_layers(problem, model.embed_bytes), [limit_s - d.stage_s - d.embed_s for d in devices]
    )
    heads = _count_computable(
        problem, most_layers(problem, model.head_bytes), [limit_s - d.stage_s - d.head_s for d in devices]
    )
    alone = int(np.minimum(embeds, heads).max(initial=0))
    if len(devices) == 1 or alone >= model.num_layers:
        return alone
    first, last = np.where(embeds > 0, counts - embeds, _NEVER), np.where(heads > 0, counts - heads, _NEVER)
    return max(alone, int(counts.sum()) - _least_pair(first, last))


def _least_pair(first: Counts, last: Counts) -> int:
    """Return the least sum ``first[i] + last[j]`` of two different devices ``i`` and ``j``."""
    one, other = np.argsort(first, kind="stable")[:2], np.argsort(last, kind="stable")[:2]
    return min(int(first[i] + last[j]) for i in one for j in other if i != j)


def _count_computable(problem: PlanningProblem, most: Counts, limits: list[float]) -> Counts:
    """Return for each device how many layers it computes within its time limit, if it takes the lightest layers.

    ``most``: upper limit of each device's layers. ``limits``: each device's time for layers, in seconds.
    """
    work = np.concatenate(([0.0], np.cumsum(sorted(problem.model.layer_weights))))
    speed = np.array([d.layer_s for d in problem.devices])
    allowance = np.maximum(np.asarray(limits), 0.0) * (1 + 1e-9)
    fitting = np.searchsorted(work, allowance / np.maximum(speed, 1e-12), side="right") - 1
    counts: Counts = np.minimum(fitting, most)
    return counts


def _sum_bound(problem: PlanningProblem) -> float:
    """Fill devices in the order of their cost per layer when full, with fractions of layers allowed."""
    devices, most = problem.devices, most_layers(problem)
    if most.sum() < problem.model.num_layers:
        return np.inf
    heavy = np.concatenate(([0.0], np.cumsum(sorted(problem.model.layer_weights, reverse=True))))
    rates, ways = full_rates(problem, most, heavy)
    rest, total = sum(problem.model.layer_weights), 0.0
    for index in np.argsort(rates, kind="stable"):
        work = min(rest, float(heavy[most[index]]))
        if work > 0:
            total += work * float(rates[index])
            rest -= work
    if rest > ROUNDING:
        return np.inf
    ends = min(d.embed_s for d in devices) + min(d.head_s for d in devices)
    return max(0.0, total - float(ways.max())) + ends  # the first stage needs no hop to it


def full_rates(problem: PlanningProblem, most: Counts, heavy: Table) -> tuple[Table, Table]:
    """Return the cost per layer at each device when its memory is full, including its stage and the cheapest hop to it;
    and these cheapest hops."""
    ways = hop_seconds(problem)
    np.fill_diagonal(ways, np.inf)
    nearest = ways.min(axis=0) if len(ways) > 1 else np.zeros(1)
    layer = np.array([d.layer_s for d in problem.devices])
    once = np.array([d.stage_s for d in problem.devices]) + nearest
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(most > 0, layer + once / heavy[most], np.inf)
    return rates, nearest


def sort_by_cost(problem: PlanningProblem, most: Counts) -> list[int]:
    """Return the devices that can hold any layer, in the order of what they add to the sum for each layer."""
    heavy = np.arange(problem.model.num_layers + 1, dtype=np.float64)
    rates, _ = full_rates(problem, most, heavy)
    return [int(i) for i in np.argsort(rates, kind="stable") if most[i] > 0]
