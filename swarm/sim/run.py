"""Play a schedule: safety at every event, then quiet, then everything must have ended well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.client.events import Leave, Start
from swarm.errors import IllegalMove
from swarm.sim.audit import Violation
from swarm.sim.cluster import Cluster
from swarm.sim.nodes import ClientNode
from swarm.sim.schedule import Fault, RequestSpec, Schedule, make_schedule
from swarm.sim.world import World
from swarm.testing import fake_manifest
from swarm.wire.messages import StopWorker

HEAL_S = 120.0  # virtual seconds after the last fault in which everything must end
RETAINED_S = 70.0  # until the broker has forgotten what it keeps for clients that come back
MAX_EVENTS = 400_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed. ``story``: the last lines before the failure."""

    seed: int
    num_events: int
    virtual_s: float
    num_tokens: int
    num_plans: int
    num_lost_workers: int
    num_too_large: int
    num_preemptions: int
    num_too_late: int
    failure: str | None
    story: tuple[str, ...]


def run(seed: int, *, faults: bool = True) -> Outcome:
    """Play the schedule of this seed."""
    schedule = make_schedule(seed, faults=faults)
    world = World(seed, schedule.pace)
    cluster: Cluster | None = None
    failure = None
    try:
        cluster = _set_up(world, schedule)
        _play(world, cluster, schedule)
    except (Violation, IllegalMove) as error:
        failure = f"{type(error).__name__}: {error}"
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
        failure = f"a core broke: {error!r}"
    counters = cluster.broker.core.state.counters if cluster is not None else {}
    return Outcome(
        seed=seed,
        num_events=world.num_events,
        virtual_s=world.now,
        num_tokens=int(counters.get("tokens", 0)),
        num_plans=int(counters.get("plans", 0)),
        num_lost_workers=int(counters.get("workers_lost", 0)),
        num_too_large=int(counters.get("sequences_too_large", 0)),
        num_preemptions=int(counters.get("preemptions", 0)),
        num_too_late=int(counters.get("sequences_too_late", 0)),
        failure=failure,
        story=world.retell() if failure else (),
    )


def run_many(first_seed: int, count: int, *, faults: bool = True) -> Iterator[Outcome]:
    for seed in range(first_seed, first_seed + count):
        yield run(seed, faults=faults)


def _set_up(world: World, schedule: Schedule) -> Cluster:
    cluster = Cluster(world, fake_manifest(schedule.num_layers), schedule.settings, schedule.machines)
    for spec in schedule.workers:
        world.at(spec.joins_at, lambda s=spec: cluster.start_worker(s.name, s.memory_bytes, s.capacity))  # type: ignore[misc]
    clients = [ClientNode(cluster, f"c{i}", consume_s) for i, consume_s in enumerate(schedule.clients)]
    for request in schedule.requests:
        _plan_request(world, cluster, clients[request.client], request)
    for fault in schedule.faults:
        world.at(fault.at, lambda f=fault: _strike(world, cluster, clients, f))  # type: ignore[misc]
    return cluster


def _plan_request(world: World, cluster: Cluster, client: ClientNode, spec: RequestSpec) -> None:
    request_id = spec.submit.request_id

    def submit() -> None:
        if cluster.broker.core.state.manifest is None:
            world.at(0.5, submit)  # nobody has joined yet: the broker would send it away
            return
        cluster.audit.expect(spec.submit, spec.stops)
        for index, stop_at in spec.stops.items():
            client.stop_at[request_id, index] = stop_at
        client.feed(Start(spec.submit))
        if spec.leaves_after is not None:
            cluster.audit.left.add(request_id)
            world.at(spec.leaves_after, lambda: client.feed(Leave(request_id)))

    world.at(spec.at, submit)


def _strike(world: World, cluster: Cluster, clients: list[ClientNode], fault: Fault) -> None:
    living = sorted(cluster.workers)
    world.tell("world", f"** {fault}")
    if fault.kind == "client_drop":
        clients[fault.who % len(clients)].lose_connection(fault.for_s)
    elif fault.kind == "join":
        cluster.start_worker(f"x{fault.who}", 1 << 30, 1 << 14)
    elif living:
        _strike_worker(world, cluster, clients, fault, living[fault.who % len(living)])


def _strike_worker(world: World, cluster: Cluster, clients: list[ClientNode], fault: Fault, incarnation: str) -> None:
    node = cluster.workers[incarnation]
    match fault.kind:
        case "crash":
            cluster.crash(incarnation)
        case "terminate":
            cluster.terminate(incarnation)
        case "double":
            cluster.double(incarnation)
        case "leave":
            cluster.to_broker_from_client(clients[0], StopWorker(worker=node.name))
        case "freeze":
            node.freeze()
            world.at(fault.for_s, node.thaw)
        case _:
            raise AssertionError(f"{fault.kind} does not strike workers")


def _play(world: World, cluster: Cluster, schedule: Schedule) -> None:
    end = schedule.quiet_from + HEAL_S + RETAINED_S
    while world.now < end:
        if world.num_events > MAX_EVENTS:
            raise Violation(f"I1: {MAX_EVENTS} events and no end in sight")
        if not world.step() or (world.now > schedule.quiet_from and _all_ended(cluster)):
            break
    _settle(world)
    cluster.audit.check_end(cluster.broker.core.state, list(cluster.workers.values()))


def _all_ended(cluster: Cluster) -> bool:
    state = cluster.broker.core.state
    waited_for = (
        case.end for (request, _), case in cluster.audit.expected.items() if request not in cluster.audit.left
    )
    return not state.running and not state.waiting and state.book.serving and all(waited_for)


def _settle(world: World) -> None:
    """Let the last releases reach the stages."""
    until = world.now + 5.0
    while world.now < until and world.step():
        pass
