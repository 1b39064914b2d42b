"""Workers' measurements of themselves and of their links, as figures for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from swarm.broker.planner.load import MOST_S, Load, Speeds
from swarm.broker.planner.problem import Device, Link
from swarm.broker.state import State, Worker
from swarm.broker.state.workers import BROKER, Way
from swarm.wire.messages import LayerCost, LinkCost

UNKNOWN_S = 0.001  # time of a layer if no worker measured one: then all workers are equal
MOST_BYTES_PER_S = 1e15  # upper limit, whatever a worker reports of its link
NEAR_S = 5e-4  # a shorter latency is mostly that of sockets and loops, which all first and last stages share
AS_QUICK = 0.95  # two measurements of the same differ by less


def ways(state: State, workers: Sequence[Worker], kind: Way) -> dict[str, frozenset[str]]:
    """Return by incarnation the names of the workers to which the route from it, or from the broker, has this state. An
    assumed worker reaches all."""
    if not state.ways.found and not state.ways.avoided:
        return {BROKER: frozenset()}
    names = {worker.incarnation: worker.name for worker in workers}
    return {
        source: frozenset(names[target] for target in state.ways.from_(source, kind, state.now) if target in names)
        for source in (BROKER, *names)
    }


def link(measured: LinkCost | None) -> Link:
    """Return the measured link, with values bounded for arithmetic."""
    if measured is None:
        return Link()
    return Link(min(measured.round_trip_s / 2, MOST_S), max(1.0, min(measured.bytes_per_s, MOST_BYTES_PER_S)))


def far(links: Sequence[tuple[str, LinkCost | None]]) -> dict[str, float]:
    """Return by host what a step that takes turns waits for the link between the broker and each machine that is not
    next to it: the smallest measured latency, since any other traffic makes a message slower."""
    found: dict[str, float] = {}
    for host, measured in links:
        if measured is not None:
            found[host] = min(link(measured).latency_s, found.get(host, MOST_S))
    return {host: way for host, way in found.items() if way > NEAR_S}


def by_machine(workers: Sequence[Worker], hosts: Sequence[str], load: Load) -> list[list[int]]:
    """Group workers by the machine whose cores they use, the quickest first; a single list of all if there is only one
    machine. ``hosts``: the machine of each worker."""
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
    """Guess the time of a layer at a worker that has not measured it."""
    known = [s.layer_s(load) for w in workers if (s := Speeds.of(w.hello.costs, alone=alone))]
    return median(known) if known else UNKNOWN_S


def alone_s(worker: Worker, load: Load) -> float:
    """Return the time of a layer with all cores of the host."""
    speeds = Speeds.of(worker.hello.costs, alone=True)
    return UNKNOWN_S if speeds is None else speeds.layer_s(load)


def rest_s(costs: Sequence[LayerCost], load: Load) -> float:
    """Return how much longer a step takes in a stage that was idle before. Only measurements made alone show it."""
    among, alone = Speeds.of(costs, alone=False), Speeds.of(costs, alone=True)
    return 0.0 if among is None or alone is None else max(0.0, alone.stage_s(load) - among.stage_s(load))


def use(costs: Sequence[LayerCost], load: Load) -> float:
    """Return the fraction of its machine's cores that a stage takes while it computes together with others, derived
    from its speedup with all cores. A stage without a speedup has nothing to gain alone, and takes nothing from others;
    the memory bandwidth that all share has not been measured."""
    among, alone = Speeds.of(costs, alone=False), Speeds.of(costs, alone=True)
    if among is None or alone is None:
        return 0.0
    part = alone.layer_s(load) / among.layer_s(load)
    return part if part < AS_QUICK else 0.0


def alike(devices: Sequence[Device]) -> list[Device]:
    """Give processes that use the same cores in turn equal figures: any difference between them is measurement noise.
    The best figure of each kind is the least disturbed one."""
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
