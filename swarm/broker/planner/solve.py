"""Solution of a problem: the best plan by its objective, then, among equally good ones, the one that moves least.

Up to ``EXACT`` devices, every set of them in every order is considered; beyond, see ``ordering``. Either way a device
that would make the plan slower is left out, since sets without it are considered too.

Plans within the problem's tolerance are equally good: measurements are not more exact than that. Among such plans the
fewest bytes are loaded; then shares are even, and hops short. Where stages take turns on the cores of one machine, any
cut is as quick as any other: there, even shares come before staying in place, so that a new worker gets its part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swarm.broker.planner import tables
from swarm.broker.planner.bound import most_layers
from swarm.broker.planner.lacking import shortage, shut_off
from swarm.broker.planner.orders import good_line
from swarm.broker.planner.problem import NOBODY, Device, Line, Problem, Share, Shortage
from swarm.broker.planner.search import EQUAL, Combine, along, best

EXACT = 8  # devices up to which every set and order is considered
_PLACES = 4  # number of places where one more device is tried in a long line
_SHORT_S = 1e-12  # lower limit of a divisor
_STAYING = 1000.0  # weight of staying in place against even shares
_EVEN_IN_TURNS = 4.0  # weight of even shares against staying in place, where any cut is as quick


def solve(problem: Problem, must: frozenset[int] = frozenset()) -> Line | Shortage:
    """Return stages in pipeline order that cover every layer once; or why there is no plan. ``must``: devices that may
    not be left out, whatever the cost; devices with pinned layers never are."""
    if not problem.devices:
        return Shortage(NOBODY, 0)
    combine: Combine = np.add if problem.takes_turns else np.maximum
    hops = tables.hops(problem)
    must |= frozenset(i for i, device in enumerate(problem.devices) if device.pinned is not None)
    if len(problem.devices) <= EXACT:
        own = [tables.seconds(problem.model, device, problem.kv_positions) for device in problem.devices]
        found = best(own, hops, combine, must)
    else:
        found = good_line(problem, combine, hops, must)
    if found is None:
        return shortage(problem, fits_by_itself=_fits_by_itself(problem))
    settled = _settled(problem, found[0], found[1], hops, must)
    open_ones = [line for line in (settled, found[1]) if tables.is_open(problem, line)]
    return open_ones[0] if open_ones else shut_off(problem)


def in_this_order(problem: Problem) -> Line | None:
    """Return a good line of the devices in the order given, except that the last device may stand at a few places: far
    less work than finding the best, whatever their number. None if there is none in this order."""
    combine: Combine = np.add if problem.takes_turns else np.maximum
    between, last = tables.hops(problem), len(problem.devices) - 1
    own = [tables.seconds(problem.model, device, problem.kv_positions) for device in problem.devices]
    must = frozenset(i for i, device in enumerate(problem.devices) if device.pinned is not None)
    found = []
    for place in sorted({int(p) for p in np.linspace(0, last, _PLACES)}):
        order = [*range(place), last, *range(place, last)]
        way = along(own, between, combine, order, must)
        if way is not None:
            found.append(way)
    _, line = min(found, key=lambda way: way[0], default=(np.inf, ()))
    return line if line and tables.is_open(problem, line) else None


def _settled(problem: Problem, cost: float, line: Line, hops: tables.Table, must: frozenset[int]) -> Line:
    """Return, among plans that are as good, the one that moves least."""
    many = len(problem.devices) > EXACT
    chosen = _worth_a_look(problem, line) if many else list(range(len(problem.devices)))
    limit = cost * (1 + problem.tolerance) * (1 + EQUAL)
    costs = [_second_cost(problem, problem.devices[i], cost, limit) for i in chosen]
    between = hops[np.ix_(chosen, chosen)]
    if problem.takes_turns:
        room = max(problem.tolerance, EQUAL) * cost
        second = [own + room * more for own, more in costs]
    else:
        second = [more for _, more in costs]
        between = np.where(between <= limit, _latencies(problem)[np.ix_(chosen, chosen)] / max(cost, _SHORT_S), np.inf)
    places = {device: place for place, device in enumerate(chosen)}
    needed = frozenset(places[i] for i in must)
    if many:
        orders = [[places[i] for i in order] for order in _orders(problem, line, chosen)]
        ways = [way for order in orders if (way := along(second, between, np.add, order, needed)) is not None]
    else:
        ways = [way for way in [best(second, between, np.add, needed)] if way is not None]
    for _, found in sorted(ways, key=lambda way: way[0]):
        settled = tuple(Share(chosen[share.device], share.layers) for share in found)
        if tables.step_seconds(problem, settled, hops) <= limit:
            return settled
    return line


def _worth_a_look(problem: Problem, line: Line) -> list[int]:
    """Choose, of many devices, those of the line and those that hold layers; where stages take turns, so that shares
    are even, any others too, up to the number of layers."""
    devices, num = problem.devices, problem.model.num_layers
    holding = [i for i, device in enumerate(devices) if device.held is not None and len(device.held)]
    found = dict.fromkeys([*(share.device for share in line), *holding[: 2 * num]])
    if problem.takes_turns:
        most = most_layers(problem)
        rest = [i for i in range(len(devices)) if i not in found and most[i] > 0]
        found.update(dict.fromkeys(rest[: max(0, num - len(found))]))
    return list(found)


def _orders(problem: Problem, line: Line, chosen: list[int]) -> list[list[int]]:
    """Return the order in which layers are held, and that of the line, each with the others after the last of their
    machine."""
    own = [share.device for share in line]
    held = {i: device.held for i in chosen if (device := problem.devices[i]).held is not None and len(device.held)}
    return [_joined(problem, sorted(held, key=lambda i: held[i].first), chosen), _joined(problem, own, chosen)]


def _joined(problem: Problem, order: list[int], chosen: list[int]) -> list[int]:
    order = list(order)
    for index in sorted(set(chosen) - set(order)):
        host = problem.devices[index].host
        near = [place for place, other in enumerate(order) if host and problem.devices[other].host == host]
        order.insert(near[-1] + 1 if near else len(order), index)
    return order


def _second_cost(problem: Problem, device: Device, cost: float, limit: float) -> tuple[tables.Table, tables.Table]:
    """Return the device's time, and the secondary cost where times are equal: bytes to load, and unevenness of the
    shares."""
    own = tables.seconds(problem.model, device, problem.kv_positions)
    moved = tables.moved_bytes(problem.model, device)
    moved = moved / max(1, problem.model.weight_bytes(problem.model.all_layers))
    finite = np.where(np.isfinite(own), own, 0.0)
    uneven = (finite / max(cost, _SHORT_S)) ** 2
    if problem.takes_turns:
        return own, (moved + _EVEN_IN_TURNS * uneven) / (1 + _EVEN_IN_TURNS)
    return own, np.where(own <= limit, _STAYING * moved + uneven, np.inf)


def _latencies(problem: Problem) -> tables.Table:
    return tables.hops(replace(problem, takes_turns=True))


def _fits_by_itself(problem: Problem) -> bool:
    """Whether there is a plan without pins and caps."""
    if all(device.pinned is None and device.max_layers is None for device in problem.devices):
        return False
    free = tuple(replace(device, pinned=None, max_layers=None) for device in problem.devices)
    return not isinstance(solve(replace(problem, devices=free)), Shortage)
