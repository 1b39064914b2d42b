"""Workers' measurements of themselves and of their links, as figures for the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from swarm.broker.planner.load import MAX_S, PlanGauge, PlannedLoad, Speeds
from swarm.broker.planner.lost_positions import LostSequence
from swarm.broker.planner.problem import Device, NetworkLink
from swarm.broker.state import State, Worker
from swarm.broker.state.shared_prefixes import estimate_links
from swarm.broker.state.workers import BROKER, RouteState
from swarm.wire.messages import Hello, LayerCost, LinkCost

UNKNOWN_S = 0.001  # time of a layer if no worker measured one: then all workers are equal
MAX_BYTES_PER_S = 1e15  # upper limit, whatever a worker reports of its link
NEAR_S = 5e-4  # a shorter latency is mostly that of sockets and loops, which all first and last stages share
SAME_SPEED = 0.95  # two measurements of the same differ by less
LOAD_BYTES_PER_S = 5e8  # assumed rate of reading and warming weights, until one is measured


def route_targets(state: State, workers: Sequence[Worker], kind: RouteState) -> dict[str, frozenset[str]]:
    """Return for each source (the broker and each worker) the names of the workers to which its route has the state
    ``kind``.

    A worker that is only assumed by a what-if query has no such routes.
    """
    if not state.routes.blocked and not state.routes.relay_only:
        return {BROKER: frozenset()}
    names = {worker.incarnation: worker.name for worker in workers}
    return {
        source: frozenset(
            names[target] for target in state.routes.routes_from(source, kind, state.now) if target in names
        )
        for source in (BROKER, *names)
    }


def bound_link(measured: LinkCost | None) -> NetworkLink:
    """Return the measured link, with values bounded for arithmetic."""
    if measured is None:
        return NetworkLink()
    return NetworkLink(min(measured.round_trip_s / 2, MAX_S), max(1.0, min(measured.bytes_per_s, MAX_BYTES_PER_S)))


def find_broker_latencies(links: Sequence[tuple[str, LinkCost | None]]) -> dict[str, float]:
    """Return by host the latency between the broker and each machine that is not close to it, which a step adds if
    stages take turns. It is the smallest measured latency, because other traffic only makes a message slower."""
    latencies: dict[str, float] = {}
    for host, measured in links:
        if measured is not None:
            latencies[host] = min(bound_link(measured).latency_s, latencies.get(host, MAX_S))
    return {host: way for host, way in latencies.items() if way > NEAR_S}


def group_by_machine(workers: Sequence[Worker], hosts: Sequence[str], load: PlannedLoad) -> list[list[int]]:
    """Group workers by the machine whose cores they use, or the GPU that they share, the quickest first; a single list
    of all if there is only one such place. ``hosts``: the machine of each worker."""
    places = [(host, worker.hello.device) for host, worker in zip(hosts, workers, strict=True)]
    shared = {place for place, count in Counter(places).items() if place[1] == "cpu" or count > 1}
    groups: dict[tuple[str, str], list[int]] = {} if shared.issuperset(places) else {("", ""): []}
    for index, place in enumerate(places):
        if place in shared:
            groups.setdefault(place, []).append(index)
    speed = {
        place: min((layer_alone_s(workers[i], load) for i in group), default=0.0) for place, group in groups.items()
    }
    quickest = sorted(groups, key=lambda place: speed[place])
    return [groups[place] for place in quickest if groups[place] or len(groups) > 1]


def guess_layer_s(workers: Sequence[Worker], load: PlannedLoad, *, alone: bool) -> float:
    """Guess the time of a layer at a worker that has not measured it."""
    times = [s.layer_s(load) for w in workers if (s := Speeds.from_costs(w.hello.costs, alone=alone))]
    return median(times) if times else UNKNOWN_S


def layer_alone_s(worker: Worker, load: PlannedLoad) -> float:
    """Return the time of a layer with all cores of the host."""
    speeds = Speeds.from_costs(worker.hello.costs, alone=True)
    return UNKNOWN_S if speeds is None else speeds.layer_s(load)


def load_rate(worker: Worker, workers: Sequence[Worker]) -> float:
    """Return the rate at which a worker loads weights. Where it has loaded nothing yet, the best rate of its machine
    counts: the others may have loaded at the same time, from a cold disk."""
    if worker.load_bytes_per_s is not None:
        return worker.load_bytes_per_s
    rates = [w.load_bytes_per_s for w in _list_neighbors(worker, workers) if w.load_bytes_per_s is not None]
    return max(rates, default=LOAD_BYTES_PER_S)


def replay_pace(worker: Worker, workers: Sequence[Worker], gauge: PlanGauge) -> float:
    """Return the duration of a worker's replays, relative to its benchmark at join.

    Prompts and earlier replays show it, since both are computed in chunks. A worker without either is like the others
    on its machine, or as quick as in its steps.
    """
    if worker.chunk_ratio.value is not None:
        return worker.chunk_ratio.value
    others = [value for w in _list_neighbors(worker, workers) if (value := w.chunk_ratio.value) is not None]
    stage = gauge.stages.get(worker.name)
    return (median(others) if others else None) or (None if stage is None else stage.recent_pace) or worker.pace


def _list_neighbors(worker: Worker, workers: Sequence[Worker]) -> list[Worker]:
    """Return the other workers that compute on the same kind of device of the same machine."""
    own = worker.hello
    return [
        w for w in workers if w is not worker and own.host and (w.hello.host, w.hello.device) == (own.host, own.device)
    ]


def idle_penalty_s(costs: Sequence[LayerCost], load: PlannedLoad) -> float:
    """Return how much longer a step takes in a stage that was idle before. Only measurements made alone show it."""
    among, alone = Speeds.from_costs(costs, alone=False), Speeds.from_costs(costs, alone=True)
    return 0.0 if among is None or alone is None else max(0.0, alone.stage_s(load) - among.stage_s(load))


def device_fraction(hello: Hello, load: PlannedLoad) -> float:
    """Return the fraction of its machine's cores, or of its GPU, that a stage takes while it computes. A GPU computes
    one process's kernels after the other's, so a stage takes all of it."""
    return core_fraction(hello.costs, load) if hello.device == "cpu" else 1.0


def core_fraction(costs: Sequence[LayerCost], load: PlannedLoad) -> float:
    """Return the fraction of its machine's cores that a stage takes while it computes together with others, derived
    from its speedup with all cores. A stage without a speedup has nothing to gain alone, and takes nothing from others;
    the memory bandwidth that all share has not been measured."""
    among, alone = Speeds.from_costs(costs, alone=False), Speeds.from_costs(costs, alone=True)
    if among is None or alone is None:
        return 0.0
    part = alone.layer_s(load) / among.layer_s(load)
    return part if part < SAME_SPEED else 0.0


def equalize(devices: Sequence[Device]) -> list[Device]:
    """Give processes that use the same cores, or the same GPU, in turn equal figures: any difference between them is
    measurement noise.
    The best figure of each kind is the least disturbed one."""
    groups: dict[tuple[str, str, int], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.host, device.kind, device.cores), []).append(device)
    equalized = []
    for device in devices:
        group = groups[device.host, device.kind, device.cores] if device.host else [device]
        equalized.append(
            replace(
                device,
                layer_s=min(d.layer_s for d in group),
                stage_s=min(d.stage_s for d in group),
                embed_s=min(d.embed_s for d in group),
                head_s=min(d.head_s for d in group),
                replay_s=median(d.replay_s for d in group),  # measured while the swarm runs, so none is the best
            )
        )
    return equalized


def list_lost_sequences(state: State) -> Iterator[LostSequence]:
    """Yield the running sequences, with the copies that workers hold of them, as far as they count."""
    num_layers = 0 if state.manifest is None else state.manifest.num_layers
    holders = {
        i: worker.name for i, worker in state.workers.items() if i in state.kv_copies.held and not worker.is_gone
    }
    account = state.shared if state.shared.num_mappings else state.prefixes.before
    linked = estimate_links(account, sorted(state.running, key=lambda s: s.rank, reverse=True))
    for sequence in state.running:
        copies = {
            name: positions
            for holder, name in holders.items()
            if any(positions := state.kv_copies.held[holder].positions(sequence.id, num_layers))
        }
        yield LostSequence(sequence.kv, copies, linked.get(sequence.id, 0))
