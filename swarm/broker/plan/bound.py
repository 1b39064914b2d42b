"""What no plan can beat, found without looking at orders: how far from the best can a plan be?

It lets every device take the lightest layers that there are, in any order, with no hop slower than the quickest; that
is never more than a real plan must bear.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm.broker.plan.problem import KV_FRACTION, Device, Problem

Counts = NDArray[np.int64]
_NEVER = 1 << 40


def lower_bound(problem: Problem) -> float:
    """Seconds that no plan's step can be quicker than; infinite if there can be no plan."""
    return _sum_bound(problem) if problem.takes_turns else _slowest_bound(problem)


def most_layers(problem: Problem, extra_bytes: int = 0) -> Counts:
    """How many layers each device's memory and cap allow beside ``extra_bytes``, were they the smallest."""
    model = problem.model
    sizes = np.concatenate(([0], np.cumsum(sorted(model.layer_bytes)))) + extra_bytes
    kv = np.concatenate(([0], np.cumsum(sorted(model.kv_bytes)))) * (problem.kv_positions / KV_FRACTION)
    needed = sizes + np.maximum(model.buffer_bytes, np.floor(kv))
    room = np.array([d.memory_bytes - d.standby_bytes for d in problem.devices])
    counts: Counts = np.searchsorted(needed, room, side="right") - 1
    caps = [model.num_layers if d.max_layers is None else d.max_layers for d in problem.devices]
    pins = [model.num_layers if d.pinned is None else len(d.pinned) for d in problem.devices]
    return np.maximum(0, np.minimum(counts, np.minimum(caps, pins)))


def _slowest_bound(problem: Problem) -> float:
    low, high = 0.0, 2.0 * sum(problem.model.layer_weights) * max(d.layer_s for d in problem.devices)
    high += sum(d.stage_s + d.embed_s + d.head_s for d in problem.devices)
    if covered_within(problem, high) < problem.model.num_layers:
        return np.inf
    for _ in range(40):
        middle = (low + high) / 2
        if covered_within(problem, middle) >= problem.model.num_layers:
            high = middle
        else:
            low = middle
    return low


def covered_within(problem: Problem, limit_s: float) -> int:
    """The most layers that all devices together could do in this time each, whoever has the embedding and the head."""
    devices, model = problem.devices, problem.model
    counts = _within(problem, most_layers(problem), [limit_s - d.stage_s for d in devices])
    embeds = _within(
        problem, most_layers(problem, model.embed_bytes), [limit_s - d.stage_s - d.embed_s for d in devices]
    )
    heads = _within(problem, most_layers(problem, model.head_bytes), [limit_s - d.stage_s - d.head_s for d in devices])
    alone = int(np.minimum(embeds, heads).max(initial=0))
    if len(devices) == 1 or alone >= model.num_layers:
        return alone
    first, last = np.where(embeds > 0, counts - embeds, _NEVER), np.where(heads > 0, counts - heads, _NEVER)
    return max(alone, int(counts.sum()) - _least_pair(first, last))


def _least_pair(first: Counts, last: Counts) -> int:
    """The least of first[i] + last[j] for two different places."""
    one, other = np.argsort(first, kind="stable")[:2], np.argsort(last, kind="stable")[:2]
    return min(int(first[i] + last[j]) for i in one for j in other if i != j)


def _within(problem: Problem, most: Counts, limits: list[float]) -> Counts:
    """How many of the lightest layers each device does in its time."""
    work = np.concatenate(([0.0], np.cumsum(sorted(problem.model.layer_weights))))
    speed = np.array([d.layer_s for d in problem.devices])
    allowance = np.maximum(np.asarray(limits), 0.0) * (1 + 1e-9)
    found = np.searchsorted(work, allowance / np.maximum(speed, 1e-12), side="right") - 1
    counts: Counts = np.minimum(found, most)
    return counts


def _sum_bound(problem: Problem) -> float:
    most = most_layers(problem)
    heavy = np.concatenate(([0.0], np.cumsum(sorted(problem.model.layer_weights, reverse=True))))
    order = sorted(range(len(problem.devices)), key=lambda i: problem.devices[i].layer_s)
    rest, total = sum(problem.model.layer_weights), min(d.stage_s for d in problem.devices)
    for index in order:
        work = min(rest, float(heavy[most[index]]))
        total += work * problem.devices[index].layer_s
        rest -= work
    if rest > 1e-9 or most.sum() < problem.model.num_layers:
        return np.inf
    return total + min(d.embed_s for d in problem.devices) + min(d.head_s for d in problem.devices)


def quickest_first(devices: tuple[Device, ...], most: Counts) -> list[int]:
    """Devices that can hold something at all, the quickest per layer first."""
    able = [i for i in range(len(devices)) if most[i] > 0]
    return sorted(able, key=lambda i: (devices[i].layer_s, i))
