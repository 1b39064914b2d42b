"""Solution of a problem: the best plan by its objective; among equally good plans, the plan that loads the fewest
bytes.

Up to ``MAX_EXACT`` devices, every set of them in every order is considered; beyond, see ``ordering``. Either way a
device that would make the plan slower is left out, since sets without it are considered too.

Plans within the problem's tolerance are equally good: measurements are not more exact than that. Among such plans the
fewest bytes are loaded, and the fewest layers leave the worker that has their keys and values; then shares are even,
and hops short. Where stages take turns on the cores of one machine, any cut is as quick as any other: there, even
shares come before staying in place, so that a new worker gets its part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swarm.broker.planner import tables
from swarm.broker.planner.bound import most_layers
from swarm.broker.planner.ordering import heuristic_line
from swarm.broker.planner.problem import NO_WORKER, Device, LayerShare, Line, PlanningProblem, Shortage
from swarm.broker.planner.search import ROUNDING, Combine, search_all, search_order
from swarm.broker.planner.shortage import explain_blocked_routes, explain_shortage

MAX_EXACT = 8  # devices up to which every set and order is considered
_NUM_PLACES = 4  # number of places where one more device is tried in a long line
_MIN_S = 1e-12  # lower limit of a divisor
_STAYING_WEIGHT = 1000.0  # weight of staying in place against even shares
_KV_WEIGHT = 0.25  # weight of a layer that is loaded, but not its keys and values, against one that is not loaded
_EVENNESS_WEIGHT = 4.0  # weight of even shares against staying in place, where any cut is as quick


def solve(problem: PlanningProblem, required: frozenset[int] = frozenset()) -> Line | Shortage:
    """Return stages in pipeline order that cover every layer once; or why there is no plan. ``required``: devices that
    must get layers, whatever the cost. Devices with pinned layers always get them."""
    if not problem.devices:
        return Shortage(NO_WORKER, 0)
    combine: Combine = np.add if problem.takes_turns else np.maximum
    hops = tables.hop_seconds(problem)
    required |= frozenset(i for i, device in enumerate(problem.devices) if device.pinned is not None)
    if len(problem.devices) <= MAX_EXACT:
        device_tables = [
            tables.range_seconds(problem.model, device, problem.kv_positions) for device in problem.devices
        ]
        solution = search_all(device_tables, hops, combine, required)
    else:
        solution = heuristic_line(problem, combine, hops, required)
    if solution is None:
        return explain_shortage(problem, fits_unconstrained=_fits_unconstrained(problem))
    settled = _choose_least_moved(problem, solution[0], solution[1], hops, required)
    connected = [line for line in (settled, solution[1]) if tables.is_connected(problem, line)]
    return connected[0] if connected else explain_blocked_routes(problem)


def solve_fixed_order(problem: PlanningProblem) -> Line | None:
    """Return a good line of the devices in the order given, except that the last device may stand at a few places: far
    less work than finding the best, whatever their number. None if there is none in this order."""
    combine: Combine = np.add if problem.takes_turns else np.maximum
    between, last = tables.hop_seconds(problem), len(problem.devices) - 1
    device_tables = [tables.range_seconds(problem.model, device, problem.kv_positions) for device in problem.devices]
    required = frozenset(i for i, device in enumerate(problem.devices) if device.pinned is not None)
    results = []
    for place in sorted({int(p) for p in np.linspace(0, last, _NUM_PLACES)}):
        order = [*range(place), last, *range(place, last)]
        way = search_order(device_tables, between, combine, order, required)
        if way is not None:
            results.append(way)
    _, line = min(results, key=lambda way: way[0], default=(np.inf, ()))
    return line if line and tables.is_connected(problem, line) else None


def _choose_least_moved(
    problem: PlanningProblem, cost: float, line: Line, hops: tables.Table, required: frozenset[int]
) -> Line:
    """Return, among the plans whose cost is within the tolerance, the plan that loads the fewest bytes."""
    many = len(problem.devices) > MAX_EXACT
    chosen = _select_candidates(problem, line) if many else list(range(len(problem.devices)))
    limit = cost * (1 + problem.tolerance) * (1 + ROUNDING)
    costs = [_secondary_cost(problem, problem.devices[i], cost, limit) for i in chosen]
    between = hops[np.ix_(chosen, chosen)]
    if problem.takes_turns:
        room = max(problem.tolerance, ROUNDING) * cost
        second = [own + room * more for own, more in costs]
    else:
        second = [more for _, more in costs]
        between = np.where(between <= limit, _latencies(problem)[np.ix_(chosen, chosen)] / max(cost, _MIN_S), np.inf)
    places = {device: place for place, device in enumerate(chosen)}
    needed = frozenset(places[i] for i in required)
    if many:
        orders = [[places[i] for i in order] for order in _candidate_orders(problem, line, chosen)]
        ways = [way for order in orders if (way := search_order(second, between, np.add, order, needed)) is not None]
    else:
        ways = [way for way in [search_all(second, between, np.add, needed)] if way is not None]
    for _, found in sorted(ways, key=lambda way: way[0]):
        settled = tuple(LayerShare(chosen[share.device], share.layers) for share in found)
        if tables.step_seconds(problem, settled, hops) <= limit:
            return settled
    return line


def _select_candidates(problem: PlanningProblem, line: Line) -> list[int]:
    """Choose the devices for the search when there are too many for an exact one: the devices of the best line so far,
    and devices that hold layers.

    Where stages take turns, and shares are therefore even, add other devices, up to the number of layers.
    """
    devices, num = problem.devices, problem.model.num_layers
    holding = [i for i, device in enumerate(devices) if device.held is not None and len(device.held)]
    candidates = dict.fromkeys([*(share.device for share in line), *holding[: 2 * num]])
    if problem.takes_turns:
        most = most_layers(problem)
        rest = [i for i in range(len(devices)) if i not in candidates and most[i] > 0]
        candidates.update(dict.fromkeys(rest[: max(0, num - len(candidates))]))
    return list(candidates)


def _candidate_orders(problem: PlanningProblem, line: Line, chosen: list[int]) -> list[list[int]]:
    """Return two orders of the devices: by the layers that they hold now, and as in the line. Each device that is
    missing there is inserted after the last device of its machine."""
    own = [share.device for share in line]
    held = {i: device.held for i in chosen if (device := problem.devices[i]).held is not None and len(device.held)}
    return [
        _complete_order(problem, sorted(held, key=lambda i: held[i].first), chosen),
        _complete_order(problem, own, chosen),
    ]


def _complete_order(problem: PlanningProblem, order: list[int], chosen: list[int]) -> list[int]:
    order = list(order)
    for index in sorted(set(chosen) - set(order)):
        host = problem.devices[index].host
        near = [place for place, other in enumerate(order) if host and problem.devices[other].host == host]
        order.insert(near[-1] + 1 if near else len(order), index)
    return order


def _secondary_cost(
    problem: PlanningProblem, device: Device, cost: float, limit: float
) -> tuple[tables.Table, tables.Table]:
    """Return the device's time, and the secondary cost where times are equal: bytes to load, layers whose keys and
    values it lacks, and unevenness of the shares."""
    own = tables.range_seconds(problem.model, device, problem.kv_positions)
    loaded = tables.moved_bytes(problem.model, device)
    lacking = tables.moved_bytes(problem.model, replace(device, kept=()))
    moved = (loaded + _KV_WEIGHT * lacking) / (1 + _KV_WEIGHT)
    moved = moved / max(1, problem.model.weight_bytes(problem.model.all_layers))
    finite = np.where(np.isfinite(own), own, 0.0)
    uneven = (finite / max(cost, _MIN_S)) ** 2
    if problem.takes_turns:
        return own, (moved + _EVENNESS_WEIGHT * uneven) / (1 + _EVENNESS_WEIGHT)
    return own, np.where(own <= limit, _STAYING_WEIGHT * moved + uneven, np.inf)


def _latencies(problem: PlanningProblem) -> tables.Table:
    return tables.hop_seconds(replace(problem, takes_turns=True))


def _fits_unconstrained(problem: PlanningProblem) -> bool:
    """Whether there is a plan without pins and caps."""
    if all(device.pinned is None and device.max_layers is None for device in problem.devices):
        return False
    free = tuple(replace(device, pinned=None, max_layers=None) for device in problem.devices)
    return not isinstance(solve(replace(problem, devices=free)), Shortage)
