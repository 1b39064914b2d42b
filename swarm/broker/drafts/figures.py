"""What workers have measured of themselves and of their ways, as figures that a plan is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from swarm.broker.planner.load import MOST_S, Load, Speeds
from swarm.broker.planner.problem import Device, Link
from swarm.broker.state import State, Worker
from swarm.broker.state.workers import BROKER, Way
from swarm.wire.messages import LayerCost, LinkCost

UNKNOWN_S = 0.001  # a layer's time, if nobody measured one: then all are alike
MOST_BYTES_PER_S = 1e15  # whatever a worker says about its wire
NEAR_S = 5e-4  # a shorter way is mostly what sockets and loops take, with all first and last stages alike
AS_QUICK = 0.95  # measured twice, the same differs by less


def ways(state: State, workers: Sequence[Worker], kind: Way) -> dict[str, frozenset[str]]:
    """To whom the ways of each of them, and of the broker, are of this kind: by incarnation, the names. One that is
    supposed reaches all."""
    if not state.ways.found and not state.ways.avoided:
        return {BROKER: frozenset()}
    names = {worker.incarnation: worker.name for worker in workers}
    return {
        source: frozenset(names[target] for target in state.ways.from_(source, kind, state.now) if target in names)
        for source in (BROKER, *names)
    }


def link(measured: LinkCost | None) -> Link:
    """Take the way as it was measured, within bounds that can be reckoned with."""
    if measured is None:
        return Link()
    return Link(min(measured.round_trip_s / 2, MOST_S), max(1.0, min(measured.bytes_per_s, MOST_BYTES_PER_S)))


def far(links: Sequence[tuple[str, LinkCost | None]]) -> dict[str, float]:
    """Find what a step that takes turns waits for the way between the broker and each machine that is not next to it:
    the least that was measured there, since whatever else goes on makes a message slower."""
    found: dict[str, float] = {}
    for host, measured in links:
        if measured is not None:
            found[host] = min(link(measured).latency_s, found.get(host, MOST_S))
    return {host: way for host, way in found.items() if way > NEAR_S}


def by_machine(workers: Sequence[Worker], hosts: Sequence[str], load: Load) -> list[list[int]]:
    """Group workers by the machine whose cores they use, the quickest first; one list of all if there is but one
    machine. ``hosts``: the machine of each."""
    if any(worker.hello.device != "cpu" for worker in workers):
        found: dict[str, list[int]] = {"": []}
    else:
        found = {}
    for index, worker in enumerate(workers):
        if worker.hello.device == "cpu":
            found.setdefault(hosts[index], []).append(index)
    speed = {host: min((alone_s(workers[i], load) for i in group), default=0.0) for host, group in found.items()}
    groups = sorted((host for host in found), key=lambda host: speed[host])
    return [found[host] for host in groups if found[host] or len(found) > 1]


def unknown_s(workers: Sequence[Worker], load: Load, *, alone: bool) -> float:
    """Guess a layer's time with somebody who has not measured it."""
    known = [s.layer_s(load) for w in workers if (s := Speeds.of(w.hello.costs, alone=alone))]
    return median(known) if known else UNKNOWN_S


def alone_s(worker: Worker, load: Load) -> float:
    """A layer's time with all cores of the host."""
    speeds = Speeds.of(worker.hello.costs, alone=True)
    return UNKNOWN_S if speeds is None else speeds.layer_s(load)


def rest_s(costs: Sequence[LayerCost], load: Load) -> float:
    """How much longer a step takes in a stage that has rested: only those are measured so that were measured alone."""
    among, alone = Speeds.of(costs, alone=False), Speeds.of(costs, alone=True)
    return 0.0 if among is None or alone is None else max(0.0, alone.stage_s(load) - among.stage_s(load))


def use(costs: Sequence[LayerCost], load: Load) -> float:
    """What part of its machine's cores a stage takes while it computes among others, as its work is quicker with all of
    them. One that is not quicker has no more to itself, and takes nothing from others; what their memory gives all of
    them together nobody has measured."""
    among, alone = Speeds.of(costs, alone=False), Speeds.of(costs, alone=True)
    if among is None or alone is None:
        return 0.0
    part = alone.layer_s(load) / among.layer_s(load)
    return part if part < AS_QUICK else 0.0


def alike(devices: Sequence[Device]) -> list[Device]:
    """Make processes that use the same cores in turn equally quick: whatever tells them apart disturbed a measurement.
    The best figure of each kind is the least disturbed."""
    groups: dict[tuple[str, str, int], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.host, device.kind, device.cores), []).append(device)
    found = []
    for device in devices:
        group = groups[device.host, device.kind, device.cores] if device.host and device.kind == "cpu" else [device]
        found.append(
            replace(
                device,
                layer_s=min(d.layer_s for d in group),
                stage_s=min(d.stage_s for d in group),
                embed_s=min(d.embed_s for d in group),
                head_s=min(d.head_s for d in group),
                replay_s=min(d.replay_s for d in group),
            )
        )
    return found
