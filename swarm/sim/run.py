"""Playing a schedule: the invariants are checked at every event; after the faults, everything must end well."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from swarm.broker.members.adapters import GIVE_UP_S
from swarm.broker.state.adapters import MAX_RETRY_S
from swarm.client.events import CancelForeignRequest, LeaveRequest
from swarm.errors import IllegalMove
from swarm.sim.actors.adapter_operator import AdapterOperator
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.cluster import Cluster
from swarm.sim.actors.lookup_client import LookupClient
from swarm.sim.actors.reader import AttachedReader
from swarm.sim.actors.spill_shell import SimSpillDisk
from swarm.sim.checks.audit import Violation
from swarm.sim.schedules.faults import apply_fault
from swarm.sim.schedules.schedule import Schedule, ScheduledRequest
from swarm.sim.schedules.variations import (
    add_adapters,
    add_answers,
    add_disks,
    add_drafts,
    add_images,
    add_states,
    make_full_schedule,
)
from swarm.sim.world import World
from swarm.wire.messages import Submit

# after the last fault: without progress for this long, there will be none. Clients may be waited for that long
STALLED_S = 80.0
RECOVERED_S = 12.0  # after the last fault: every worker is a member again, and a plan serves
# the same for workers that sent numbers which are not finite, or failed: the broker readmits them after a pause
PAUSED_S = 40.0
# the same for workers that can't load a dropped adapter, until its requests are given up
KEPT_OUT_S = GIVE_UP_S + MAX_RETRY_S
PAUSED: frozenset[str] = frozenset({"poison", "compute_fails", "device_breaks", "request_fails", "adapters_fail"})
CHECK_S = 0.1  # between two checks whether everything has ended
SETTLE_S = 2.0
UNSETTLED_S = 10.0  # limit of the wait for a plan that is being changed: released sequences are still stored meanwhile
MAX_EVENTS = 700_000
ADAPTER_WAIT_S = 0.05  # between two looks whether a request's adapter is loaded


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one seed."""

    seed: int
    num_events: int
    virtual_s: float
    num_tokens: int
    num_plans: int
    num_lost_workers: int
    num_too_large: int
    num_preemptions: int
    num_too_late: int
    num_replayed: int  # layers × positions
    num_brokers: int  # broker processes, one after the other
    num_kept: int  # positions that a broker adopted from stages that had survived its predecessor
    num_copied: int  # parts of keys and values that workers stored for others
    num_adopted: int  # layers × positions that stages took over from copies
    num_differences: int  # reports of workers whose sequences or memory differ from the plan
    num_restored: int  # positions that were read from disk instead of computed
    num_vectors: int
    num_drafted: int  # tokens of the draft model that were proposed
    num_loaded: int  # adapters that a broker reported as loaded
    num_adapted: int  # requests that a broker accepted with an adapter
    num_seen: int  # positions of images in steps and replays
    num_seen_again: int  # of these, those in replays
    num_scored: int  # tokens of prompts whose log probabilities a broker stored
    faults: dict[str, int]  # number of faults of each kind that struck
    failure: str | None
    story: tuple[str, ...]  # the last lines before a failure


def run(
    seed: int,
    *,
    faults: bool = True,
    spills: bool = False,
    answers: bool = False,
    drafts: bool = False,
    states: bool = False,
    adapters: bool = False,
    images: bool = False,
) -> Outcome:
    """Play the schedule of this seed. ``spills``: workers write keys and values to disk. ``answers``: callers ask for
    vectors and log probabilities of prompts, too. ``drafts``: the broker has a draft model. ``states``: the model is
    recurrent. ``adapters``: an operator loads and drops adapters, and callers name them. ``images``: the model reads
    images, and most prompts have some."""
    collects = gc.isenabled()
    gc.disable()  # a schedule makes few reference cycles, and searching for them costs a tenth of the time
    try:
        extras: list[tuple[bool, Callable[[int, Schedule], Schedule]]] = [
            (spills, partial(add_disks, faults=faults)),
            (answers, add_answers),
            (drafts, add_drafts),
            (states, add_states),
            (adapters, partial(add_adapters, faults=faults)),
            (images, partial(add_images, faults=faults)),
        ]
        schedule = make_full_schedule(seed, faults=faults)
        for is_wanted, add in extras:
            schedule = add(seed, schedule) if is_wanted else schedule
        return _run(seed, schedule, spills=spills)
    finally:
        if collects:
            gc.enable()


def _run(seed: int, schedule: Schedule, *, spills: bool) -> Outcome:
    world = World(seed, schedule.pace)
    cluster: Cluster | None = None
    failure = None
    try:
        cluster = _build_cluster(world, schedule, SimSpillDisk(seed) if spills else None)
        _play(world, cluster, schedule)
    except (Violation, IllegalMove) as error:
        failure = f"{type(error).__name__}: {error}"
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError, StopIteration) as error:
        failure = f"a core broke: {error!r}"
    counters = cluster.counters if cluster is not None else {}
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
        num_replayed=int(counters.get("replayed_layer_positions", 0)),
        num_brokers=cluster.broker.life if cluster is not None else 0,
        num_kept=cluster.promise_check.num_adopted if cluster is not None else 0,
        num_copied=cluster.kv_check.num_parts if cluster is not None else 0,
        num_adopted=cluster.kv_check.num_adopted if cluster is not None else 0,
        num_differences=int(counters.get("differences", 0)),
        num_restored=int(counters.get("restored_positions", 0)),
        num_vectors=int(counters.get("vectors", 0)),
        num_drafted=cluster.speculation_check.num_drafted if cluster is not None else 0,
        num_loaded=cluster.adapter_check.num_loaded if cluster is not None else 0,
        num_adapted=cluster.adapter_check.num_accepted if cluster is not None else 0,
        num_seen=cluster.image_check.num_seen if cluster is not None else 0,
        num_seen_again=cluster.image_check.num_seen_again if cluster is not None else 0,
        num_scored=int(counters.get("prompt_logprobs", 0)),
        faults=dict(sorted(cluster.fault_counts.items())) if cluster is not None else {},
        failure=failure,
        story=world.last_lines() if failure else (),
    )


def run_many(first_seed: int, count: int, *, faults: bool = True, **extras: bool) -> Iterator[Outcome]:
    for seed in range(first_seed, first_seed + count):
        yield run(seed, faults=faults, **extras)


def _build_cluster(world: World, schedule: Schedule, spill_disk: SimSpillDisk | None) -> Cluster:
    cluster = Cluster(world, schedule, spill_disk)
    for spec in schedule.workers:
        world.schedule(spec.joins_at, lambda s=spec: cluster.join(s))  # type: ignore[misc]
    clients = [ClientNode(cluster, f"c{i}", consume_s) for i, consume_s in enumerate(schedule.clients)]
    for request in schedule.requests:
        _schedule_request(world, cluster, clients[request.client], request)
    if schedule.looks:
        onlooker = LookupClient(cluster, "onlooker")
        for look in schedule.looks:
            world.schedule(look.at, lambda plan=look: onlooker.look_up(plan))  # type: ignore[misc]
    if schedule.adapters:
        operator = AdapterOperator(cluster, "operator")
        for order in schedule.adapters:
            world.schedule(order.at, lambda o=order: operator.give(o))  # type: ignore[misc]
    for fault in schedule.faults:
        world.schedule(fault.at, lambda f=fault: apply_fault(cluster, clients, f))  # type: ignore[misc]
    world.schedule(schedule.quiet_from, cluster.heal)
    return cluster


def _schedule_request(world: World, cluster: Cluster, client: ClientNode, spec: ScheduledRequest) -> None:
    request_id = spec.submit.request_id

    def leave() -> None:
        cluster.audit.leaving.discard(request_id)
        client.feed(LeaveRequest(request_id))

    def submit() -> None:
        if cluster.broker.core.state.manifest is None:
            world.schedule(0.5, submit)  # no worker has joined yet: the broker would reject the request
            return
        if spec.waits_for_adapter and not cluster.is_healed and not _has_adapter(cluster, spec.submit):
            world.schedule(ADAPTER_WAIT_S, submit)
            return
        cluster.audit.expect(spec.submit, spec.stops)
        for index, stop_at in spec.stops.items():
            client.stop_at[request_id, index] = stop_at
        client.submit(spec.submit)
        if spec.read_after is not None:
            reader = AttachedReader(cluster, f"r-{request_id}", client.pace, spec.submit)
            world.schedule(spec.read_after, reader.attach)
        if spec.revoked_after is not None:
            world.schedule(spec.revoked_after, lambda: _revoke(cluster, spec.submit))
        if spec.leaves_after is not None:
            cluster.audit.abandoned.add(request_id)
            cluster.audit.leaving.add(request_id)
            world.schedule(spec.leaves_after, leave)

    world.schedule(spec.at, submit)


def _has_adapter(cluster: Cluster, submit: Submit) -> bool:
    manifest = cluster.broker.core.state.manifest
    return manifest is not None and manifest.adapter_error(submit.params.adapter) is None


def _revoke(cluster: Cluster, submit: Submit) -> None:
    """Cancel a request from another client. Its submitter is notified, or finds that the request is gone."""
    cluster.fault_counts["revoked"] += 1
    cluster.audit.may_fail.add(submit.request_id)
    ClientNode(cluster, f"k-{submit.request_id}", (0.0, 0.0)).feed(CancelForeignRequest(submit))


def _play(world: World, cluster: Cluster, schedule: Schedule) -> None:
    quiet_from = schedule.quiet_from
    may_pause = any(fault.kind in PAUSED for fault in schedule.faults)
    recovered, were_kept_out, progress, progressed_at = False, False, 0.0, quiet_from
    look_at = quiet_from + CHECK_S
    while world.play_until(look_at, MAX_EVENTS):
        look_at += CHECK_S
        recovered |= cluster.has_recovered
        # Disks are wrong after the last fault, too: a worker may be put out for its differences at any time.
        may_pause |= any(worker.num_removals for worker in cluster.broker.core.state.workers.values())
        limit_s = PAUSED_S if may_pause else RECOVERED_S
        were_kept_out |= cluster.adapter_check.keeps_workers_out(cluster.broker.core.state)
        limit_s = KEPT_OUT_S if were_kept_out else limit_s
        if not recovered and world.now > quiet_from + limit_s:
            cluster.check_members()  # raises, and names what is missing
        if cluster.has_recovered and _all_ended(cluster, schedule):
            break
        if progress != (progress := cluster.progress):
            progressed_at = world.now
        if world.now - progressed_at > STALLED_S or world.num_events >= MAX_EVENTS:
            break  # the final check names what has not ended
    until, latest = world.now + SETTLE_S, world.now + UNSETTLED_S
    while world.now < until and world.step():
        if not cluster.is_settled:
            until = min(world.now + SETTLE_S, latest)
    cluster.check_end()


def _all_ended(cluster: Cluster, schedule: Schedule) -> bool:
    submitted = {request for request, _ in cluster.audit.expected}
    if any(spec.submit.request_id not in submitted for spec in schedule.requests):
        return False  # its client waits for the first worker
    state = cluster.broker.core.state
    waited_for = (
        case.end
        for (request, _), case in cluster.audit.expected.items()
        if request not in cluster.audit.abandoned | cluster.audit.orphans
    )
    under_way = cluster.audit.leaving or state.running or state.waiting or state.in_flight
    comes = state.journal_lookups.num_waiting or not all(request.accepted for request in state.requests.values())
    goes = state.to_release or state.to_retire
    served = cluster.broker.is_alive and not (under_way or comes or goes) and state.plans.is_serving
    return served and all(waited_for) and all(reader.is_done for reader in cluster.readers)
