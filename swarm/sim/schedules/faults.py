"""Faults, one function for each kind. Each lasting fault ends by itself, or when all faults end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm.sim.actors.broker import BrokerTrap
from swarm.sim.actors.cluster import Cluster
from swarm.sim.actors.reader import AttachedReader
from swarm.sim.actors.worker import WorkerTrap
from swarm.sim.network import ANY_NODE
from swarm.sim.schedules.schedule import MIB, Fault, WorkerSpec

if TYPE_CHECKING:
    from swarm.sim.actors.client import ClientNode
    from swarm.sim.actors.worker import WorkerNode

NUM_LOOP_DEATHS = 6  # deaths in a crash loop
NUM_BROKER_DEATHS = 3  # deaths of the broker in its loop
LOOP_S = (0.2, 2.5)  # between two deaths of a loop
CRAWL_S = 4.0  # extra time of a computation
MOST_GARBLED = MOST_FAILED = 2
ORPHAN_READ_S = ((0.5, 3.0), (21.0, 24.0))  # until others read what a dead client left: soon, or after any grace time
SWAP_RETRY_S = 0.1
MAX_LOST = 3  # orders or answers, one after the other
MOST_KV_LOST = 5  # orders or reports about copies
PAIR_S = (0.0, 1.0)  # between the deaths of a worker and of a holder of its copies
KV_LAG_S = 2.0  # longest delay of a late part
POISONED_S = 60.0  # a worker whose steps failed may be excluded for this long


def apply_fault(cluster: Cluster, clients: list[ClientNode], fault: Fault) -> None:
    """Apply a fault now."""
    cluster.world.tell("world", f"** {fault}")
    cluster.fault_counts[fault.kind] += 1
    living = [cluster.workers[incarnation] for incarnation in sorted(cluster.workers)]
    if fault.kind in _ON_CLUSTER:
        _ON_CLUSTER[fault.kind](cluster, living, fault)
    elif fault.kind == "client_dies":
        _client_dies(cluster, clients, fault)
    elif fault.kind == "client_freeze":
        clients[fault.who % len(clients)].freeze(fault.for_s)
    elif fault.kind == "client_drop":
        clients[fault.who % len(clients)].lose_connection(fault.for_s)
    elif living and fault.kind == "leave":
        cluster.ask_to_leave(clients[0], _pick_worker(living, fault).incarnation)
    elif living:
        _ON_WORKER[fault.kind](cluster, _pick_worker(living, fault), fault)


def _client_dies(cluster: Cluster, clients: list[ClientNode], fault: Fault) -> None:
    """Kill a client for good. Other clients read its detached requests."""
    client = clients[fault.who % len(clients)]
    if not client.is_alive:
        return
    client.die()
    for request_id in sorted(cluster.audit.orphans - cluster.audit.shared):
        reader = AttachedReader(cluster, f"o-{request_id}", client.pace, cluster.audit.submits[request_id])
        cluster.world.schedule(cluster.world.draw(ORPHAN_READ_S[fault.whom % 4 == 0]), reader.attach)


def _pick_worker(living: list[WorkerNode], fault: Fault) -> WorkerNode:
    return living[fault.who % len(living)]


def _join(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.join(WorkerSpec(f"x{len(cluster.specs)}", 0.0, 1 << 30, 1 << 14))


def _crash_at(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.traps.append(WorkerTrap(*fault.point))


def _blackout(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    for node in living:
        cluster.crash(node.incarnation)


def _all_crash(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.crash(power=bool(fault.whom % 2))
    _blackout(cluster, [node for node in living if node.is_alive], fault)


def _freeze_broker(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.freeze()
    cluster.world.schedule(fault.for_s, cluster.broker.thaw)


def _pipe_drop(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.audit.num_faults += 1
    cluster.broker.drop_pipeline(fault.for_s / 10)


def _broker_crash(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.crash()


def _broker_power(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.crash(power=True)


def _broker_crash_at(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    power = fault.whom % 4 == 0
    if not cluster.broker.has_journal:
        return  # it would not restart with its state
    cluster.broker.traps.append(BrokerTrap(*fault.broker_point, left=fault.count, power=power))


def _broker_loop(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Kill the broker, and again while it recovers."""

    def again(left: int) -> None:
        if left and not cluster.is_healed:
            cluster.broker.crash()
            cluster.world.schedule(cluster.world.draw(LOOP_S), lambda: again(left - 1))

    again(NUM_BROKER_DEATHS)


def _disk_full(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    disk = cluster.broker.disk
    disk.is_full = True
    cluster.world.schedule(2 * fault.for_s, lambda: setattr(disk, "is_full", False))


def _journal_lost(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.disk.lose_file(("deleted", "damaged", "garbled")[fault.who % 3])


def _sync_fails(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.broker.disk.fails_to_sync = True


def _read_fails(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    disk = cluster.broker.disk
    disk.fails_to_read = True
    cluster.world.schedule(2 * fault.for_s, lambda: setattr(disk, "fails_to_read", False))


def _door_shut(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Close a listener to new connections. Existing ones stay; half of the clients must reconnect soon."""
    cluster.broker.close_listener(("client", "worker")[fault.who % 2], 2 * fault.for_s)
    for client in list(cluster.clients.values())[:: 1 + fault.whom % 2]:
        client.lose_connection(fault.for_s / 10)


def _compute_fails(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Let computations of a worker fail: one, or several in half of the cases."""
    cluster.verdict_check.record_incident(node.name, POISONED_S)
    node.device.num_failures = 1 + fault.whom % MOST_FAILED


def _device_breaks(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Break a worker's device. No request may suffer from it. Now and then a test of the device still passes."""
    cluster.verdict_check.record_incident(node.name, POISONED_S)
    is_seen = bool(fault.whom % 4)
    cluster.audit.num_undetected_faults += not is_seen
    node.device.break_after(fault.count, is_seen_by_test=is_seen)


def _request_fails(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Make a request's steps fail. It must end, and no other one; workers may be excluded until the cause is found."""
    request_id = f"r{fault.who % 3}"
    cluster.blame_check.poisonous[request_id] = fault.whom % cluster.manifest.num_layers
    cluster.audit.may_fail.add(request_id)


def _crash(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.crash(node.incarnation)


def _crash_loop(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Kill the worker with this name several times."""
    until = cluster.world.now + fault.for_s * 3

    def again(left: int) -> None:
        if cluster.is_healed:
            return
        living = [w.incarnation for w in cluster.workers.values() if w.name == node.name]
        if living:
            cluster.crash(living[0])
        if left > 1 and cluster.world.now < until:
            cluster.world.schedule(cluster.world.draw(LOOP_S), lambda: again(left - 1))

    again(NUM_LOOP_DEATHS)


def _shrink(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    spec = cluster.specs[node.name]
    less = max(66 * MIB, spec.memory_bytes - (1 + fault.whom % 4) * MIB)
    cluster.crash(node.incarnation, restart=replace(spec, memory_bytes=less, capacity=max(1 << 7, spec.capacity // 2)))


def _freeze(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.verdict_check.on_silenced(node, fault.for_s, lambda: node.is_frozen)
    node.freeze(fault.for_s)


def _hang(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.verdict_check.record_incident(node.name, 2 * fault.for_s)
    cluster.audit.num_faults += 1
    node.hang(2 * fault.for_s)


def _crawl(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    node.device.crawls_s = CRAWL_S if fault.whom % 2 else 0.5
    cluster.world.schedule(fault.for_s, lambda: setattr(node.device, "crawls_s", 0.0))


def _terminate(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.terminate(node.incarnation)


def _key_revoked(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.revoke(node.incarnation)


def _double(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.start_duplicate(node.incarnation)


def _control_drop(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.audit.num_faults += 1
    cluster.drop_control_link(node)


def _order_lost(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Lose the next orders to load or activate a plan, without any error."""
    node.num_lost_orders = 1 + fault.whom % MAX_LOST


def _answer_lost(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Lose a worker's next Hello, or its answers about a plan."""
    cluster.verdict_check.record_incident(node.name)
    node.num_lost_answers = 1 + fault.whom % MAX_LOST


def _edge_drop(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.audit.num_faults += 1
    node.drop_next_link(fault.for_s / 10)


def _cut_off(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    _block(cluster, node, fault, [(node.name, "broker"), ("broker", node.name)])


def _cut_to_broker(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    _block(cluster, node, fault, [(node.name, "broker")])


def _cut_from_broker(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    _block(cluster, node, fault, [("broker", node.name)])


def _isolate(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    _block(cluster, node, fault, [(node.name, ANY_NODE), (ANY_NODE, node.name)])


def _cut_between(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    names = sorted({w.name for w in cluster.workers.values()} - {node.name})
    if names:
        other = names[fault.whom % len(names)]
        routes = [(node.name, other), (other, node.name)]
        _block(cluster, node, fault, routes if fault.whom % 2 else routes[:1])


def _block(cluster: Cluster, node: WorkerNode, fault: Fault, routes: list[tuple[str, str]]) -> None:
    """Block routes for a while. In half of the cases the connection to the broker breaks, too."""
    if any(target in ("broker", ANY_NODE) for _, target in routes):
        cluster.verdict_check.on_silenced(node, fault.for_s, lambda: cluster.network.is_blocked(node.name, "broker"))
    if any("broker" in way or ANY_NODE in way for way in routes):
        cluster.verdict_check.record_incident(node.name, fault.for_s)
    cluster.audit.num_faults += 1
    for way in routes:
        cluster.network.block(*way)

    def unblock() -> None:
        for way in routes:
            cluster.network.unblock(*way)
        if fault.who % 2 and node.is_alive and not cluster.is_healed and any("broker" in way for way in routes):
            cluster.drop_control_link(node)

    cluster.world.schedule(fault.for_s, unblock)


def _garble(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    cluster.audit.num_faults += 1
    node.num_garbled = 1 + fault.whom % MOST_GARBLED


def _poison(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Make a stage send numbers that are not finite: the next stage refuses them, and the broker excludes the worker
    for a while."""
    cluster.verdict_check.record_incident(node.name, POISONED_S)
    cluster.audit.num_faults += 1
    node.device.num_not_finite = 1


def _kv_lag(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    node.kv.lag_s = KV_LAG_S
    cluster.world.schedule(fault.for_s, lambda: setattr(node.kv, "lag_s", 0.0))


def _kv_cut(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    node.kv.drop_links(fault.for_s / 10)


def _kv_garble(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    node.kv.num_garbled = fault.count


def _kv_short(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Make memory short at a worker, so that its core drops copies at the next tick. In half of the cases another
    worker dies at that moment: a copy disappears between the choice of its holder and its use."""
    node.kv.is_short = True
    cluster.world.schedule(fault.for_s, lambda: setattr(node.kv, "is_short", False))
    others = [other for other in sorted(cluster.workers) if other != node.incarnation]
    if fault.whom % 2 and others:
        cluster.crash(others[fault.whom % len(others)])


def _kv_store_fails(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    node.kv.num_failing = fault.count


def _kv_unshared(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Let a worker's system refuse to map pages, in a few cases for a while only and without a lesson from it."""
    executor = node.executor
    executor.refuses_to_share = True
    if fault.whom % 4 == 0:
        executor.is_stubborn = True
        cluster.verdict_check.record_incident(node.name, POISONED_S)
        cluster.world.schedule(fault.for_s, lambda: setattr(executor, "refuses_to_share", False))


def _kv_lost(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    if fault.whom % 2:
        node.kv.num_lost_orders = 1 + fault.whom % MOST_KV_LOST
    else:
        node.kv.num_lost_reports = 1 + fault.whom % MOST_KV_LOST


def _kv_pair(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    """Kill a worker that holds copies, and before or after it a worker from which they come."""
    sources = sorted(cluster.kv_check.sources_of(node.incarnation) & cluster.workers.keys())
    others = sources or [other for other in sorted(cluster.workers) if other != node.incarnation]
    if not others:
        return
    victims = [node.incarnation, others[fault.whom % len(others)]]
    first, second = victims if fault.who % 2 else victims[::-1]
    cluster.crash(first)
    after_s = cluster.world.kv_random.uniform(*PAIR_S)

    def strike() -> None:
        if second in cluster.workers and not cluster.is_healed:
            cluster.crash(second)

    cluster.world.schedule(after_s, strike)


def _adapters_fail(cluster: Cluster, node: WorkerNode, fault: Fault) -> None:
    executor = node.executor
    executor.fail_adapters = "no such folder"
    cluster.world.schedule(fault.for_s, lambda: setattr(executor, "fail_adapters", ""))


def _kv_owner(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    cluster.owner_traps.append(fault.count)


def _kv_stale(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Let parts be under way while the broker restarts from an older state of its journal, so that sequences' numbers
    are assigned again."""
    for node in living:
        _kv_lag(cluster, node, replace(fault, for_s=1.0))
    cluster.world.schedule(0.5, lambda: cluster.broker.restore_backup(fault.whom / 8))


def _journal_backup(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Replace the journal with an older state.

    In half of the cases the workers are away meanwhile, and return to the broker after the next one: they hold
    sequences whose numbers were assigned again.
    """
    cluster.broker.restore_backup(fault.whom / 8)
    if fault.who % 2:
        for node in living:
            _freeze(cluster, node, replace(fault, for_s=fault.ends_at - fault.at))
        cluster.world.schedule(fault.ends_at - fault.at, cluster.broker.crash)


def _journal_other(cluster: Cluster, living: list[WorkerNode], fault: Fault) -> None:
    """Run the broker on another state directory for a while, then on this one again; workers serve both."""
    if cluster.broker.swap_journals():
        _swap_back(cluster, fault)


def _swap_back(cluster: Cluster, fault: Fault) -> None:
    """Swap the journals back after the fault's time, as soon as the broker lives."""

    def swap() -> None:
        if not cluster.is_healed and not cluster.broker.swap_journals():
            cluster.world.schedule(SWAP_RETRY_S, swap)

    cluster.world.schedule(fault.ends_at - fault.at, swap)


_ON_WORKER: dict[str, Callable[[Cluster, WorkerNode, Fault], None]] = {
    "crash": _crash,
    "crash_loop": _crash_loop,
    "shrink": _shrink,
    "freeze": _freeze,
    "hang": _hang,
    "crawl": _crawl,
    "terminate": _terminate,
    "double": _double,
    "key_revoked": _key_revoked,
    "control_drop": _control_drop,
    "order_lost": _order_lost,
    "answer_lost": _answer_lost,
    "edge_drop": _edge_drop,
    "cut_off": _cut_off,
    "cut_to_broker": _cut_to_broker,
    "cut_from_broker": _cut_from_broker,
    "cut_between": _cut_between,
    "isolate": _isolate,
    "garble": _garble,
    "poison": _poison,
    "compute_fails": _compute_fails,
    "device_breaks": _device_breaks,
    "kv_lag": _kv_lag,
    "kv_cut": _kv_cut,
    "kv_garble": _kv_garble,
    "adapters_fail": _adapters_fail,
    "kv_short": _kv_short,
    "kv_lost": _kv_lost,
    "kv_pair": _kv_pair,
    "kv_store_fails": _kv_store_fails,
    "kv_unshared": _kv_unshared,
}
_ON_CLUSTER: dict[str, Callable[[Cluster, list[WorkerNode], Fault], None]] = {
    "join": _join,
    "crash_at": _crash_at,
    "blackout": _blackout,
    "all_crash": _all_crash,
    "freeze_broker": _freeze_broker,
    "broker_sleeps": _freeze_broker,
    "pipe_drop": _pipe_drop,
    "broker_crash": _broker_crash,
    "broker_power": _broker_power,
    "broker_crash_at": _broker_crash_at,
    "broker_loop": _broker_loop,
    "disk_full": _disk_full,
    "journal_lost": _journal_lost,
    "sync_fails": _sync_fails,
    "journal_backup": _journal_backup,
    "journal_other": _journal_other,
    "read_fails": _read_fails,
    "door_shut": _door_shut,
    "request_fails": _request_fails,
    "kv_crash_at": _crash_at,
    "kv_owner": _kv_owner,
    "kv_stale": _kv_stale,
}
