"""Dynamic programme: which device holds which layers, in which order, at the least cost.

``best`` considers every set of devices in every order. Its state is (devices used, the last of them, layers covered);
its value the cost so far, which grows with each stage's and each hop's cost either by adding up or by taking the
larger. ``search_order`` keeps to one order, any device of which may be left out.

Devices that are equal in every cost (twins) are used in the order given, which divides the work by their number's
factorial. Among equal costs the earlier stages get the larger shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.broker.planner.problem import LayerShare, Line
from swarm.broker.planner.tables import Table
from swarm.wire.messages import LayerRange

Combine = Callable[..., NDArray[np.float64]]
ROUNDING = 1e-9  # relative difference of sums in another order is less


def search_all(
    tables: Sequence[Table], hops: Table, combine: Combine, required: frozenset[int] = frozenset()
) -> tuple[float, Line] | None:
    """Return the least cost of all sets and orders of devices that include every device in ``required``, and its line;
    None if there is none."""
    return _Search(tables, hops, combine, required).run()


class _Search:
    def __init__(self, tables: Sequence[Table], hops: Table, combine: Combine, required: frozenset[int]) -> None:
        self._tables, self._hops, self._combine, self._required = tables, hops, combine, required
        self._num = len(tables)
        self._elder_twins = _find_elder_twins(tables, hops, required)  # by device: its twin that must be used first
        self._start = np.full(tables[0].shape[0], np.inf)
        self._start[0] = 0.0
        self._values: dict[int, NDArray[np.float64]] = {}  # set of devices -> [last device, layers covered]

    def run(self) -> tuple[float, Line] | None:
        for devices in range(1, 1 << self._num):
            if self._is_canonical(devices):
                self._values[devices] = self._extend(devices)
        needed = sum(1 << device for device in self._required)
        ends = [(float(v[:, -1].min()), s) for s, v in self._values.items() if s & needed == needed]
        cost = min((cost for cost, _ in ends), default=np.inf)
        if not np.isfinite(cost):
            return None
        devices = next(s for c, s in ends if c <= cost * (1 + ROUNDING))
        return cost, self._line(devices)

    def _is_canonical(self, devices: int) -> bool:
        return all(
            elder is None or not devices >> device & 1 or devices >> elder & 1
            for device, elder in self._elder_twins.items()
        )

    def _extend(self, devices: int) -> NDArray[np.float64]:
        values = np.full((self._num, len(self._start)), np.inf)
        for last in range(self._num):
            before = devices ^ (1 << last)
            if devices >> last & 1 and (before == 0 or before in self._values):
                values[last] = self._through(before, last).min(axis=0)
        return values

    def _through(self, before: int, last: int) -> Table:
        """Return the cost by where the last device begins and ends."""
        arrive = self._start
        if before:
            arrive = self._combine(self._values[before], self._hops[:, last, None]).min(axis=0)
        return self._combine(arrive[:, None], self._tables[last])

    def _line(self, devices: int) -> Line:
        stop, shares = len(self._start) - 1, list[LayerShare]()
        last = _first_minimum(self._values[devices][:, stop])
        while True:
            before = devices ^ (1 << last)
            first = _last_minimum(self._through(before, last)[:, stop])
            shares.append(LayerShare(last, LayerRange(first, stop)))
            if not before:
                return tuple(reversed(shares))
            last, devices, stop = (
                _first_minimum(self._combine(self._values[before][:, first], self._hops[:, last])),
                before,
                first,
            )


def _find_elder_twins(tables: Sequence[Table], hops: Table, required: frozenset[int]) -> dict[int, int | None]:
    """Return for each device the last one before it that is its twin. (Only sets without gaps are considered.) Devices
    that must be used are never twins."""
    elder_twins: dict[int, int | None] = {}
    for device in range(len(tables)):
        elders = (
            o for o in reversed(range(device)) if not {o, device} & required and _are_twins(tables, hops, o, device)
        )
        elder_twins[device] = next(elders, None)
    return elder_twins


def _are_twins(tables: Sequence[Table], hops: Table, one: int, other: int) -> bool:
    if not np.array_equal(tables[one], tables[other]) or hops[one, other] != hops[other, one]:
        return False
    rest = [i for i in range(len(tables)) if i not in (one, other)]
    return bool(
        np.array_equal(hops[one, rest], hops[other, rest]) and np.array_equal(hops[rest, one], hops[rest, other])
    )


def search_order(
    tables: Sequence[Table], hops: Table, combine: Combine, order: Sequence[int], required: frozenset[int] = frozenset()
) -> tuple[float, Line] | None:
    """Return the least cost in this order of devices; a device not in ``required`` is left out where that is cheaper.

    Exact if all hops cost the same. Otherwise a line can be overlooked that was more expensive so far, but ends at a
    nearer device.
    """
    size = tables[0].shape[0]
    value = np.full(size, np.inf)
    value[0] = 0.0
    last_devices = np.full(size, -1)  # the device that each best line so far ends with
    history: list[tuple[int, NDArray[np.int64], NDArray[np.bool_]]] = []
    for device in order:
        way = np.where(last_devices < 0, 0.0, hops[last_devices, device])
        cost = combine(combine(value, way)[:, None], tables[device])
        first = size - 1 - np.argmin(cost[::-1], axis=0)
        new = cost[first, np.arange(size)]
        taken = np.ones(size, np.bool_) if device in required else new < value
        history.append((device, first, taken))
        value, last_devices = np.where(taken, new, value), np.where(taken, device, last_devices)
    if not np.isfinite(value[-1]):
        return None
    return float(value[-1]), _trace(history, size - 1)


def _trace(history: list[tuple[int, NDArray[np.int64], NDArray[np.bool_]]], stop: int) -> Line:
    shares: list[LayerShare] = []
    for device, first, taken in reversed(history):
        if stop and taken[stop]:
            shares.append(LayerShare(device, LayerRange(int(first[stop]), stop)))
            stop = int(first[stop])
    return tuple(reversed(shares))


def _first_minimum(values: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(values <= values.min() * (1 + ROUNDING))[0])


def _last_minimum(values: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(values <= values.min() * (1 + ROUNDING))[-1])
