"""Ownership of worker names: one process at a time has a name, and keeps it for as long as it lives.

A second process with the same name either replaces its dead predecessor, or was started by mistake while the first one
is alive. Both send the same Hello. The broker distinguishes the cases by the state of the name's present holder:

    ==================================================  ====================================================
    present holder of the name                          what happens to the new process
    ==================================================  ====================================================
    none; a worker that is out, or has left             it is admitted immediately
    a worker that is out because its connection         it waits: the holder is about to reconnect
    closed, but still sends heartbeats
    a worker that has announced that it leaves          it is admitted immediately
    a remote worker, and the new process is on the      it is admitted immediately: a worker that joins from
    broker's own machine                                elsewhere chose its name itself
    a worker that came first to a broker that has       it is admitted immediately: it had the name before
    just started, and brings less: no layers, or it     the broker's death, and reconnected second
    has never joined a broker
    a worker that counts as alive (of two that          it waits, and is admitted as soon as the holder is
    reconnect with as much, the first one)              out
    a worker that sends a heartbeat ``PROOF_S`` after   it is refused
    the new process came
    ==================================================  ====================================================

The wait is short: the connection of a process that has died closes within milliseconds, and a worker that is cut off or
frozen is out within the heartbeat timeout. So a supervisor that replaces a dead worker is never refused.
"""

from __future__ import annotations

from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import NO_LINEAGE, Hello

# Seconds after the new process's Hello. Messages in flight at the holder's death, and the news of its death, arrive
# sooner.
PROOF_S = 1.0
LAST_HEARTBEAT_S = 0.15  # seconds after its connection closed: a dead process's last heartbeat arrives sooner
FRESH_S = 1.0  # seconds: with an older last heartbeat the worker has stopped sending them


def find_holder(hello: Hello, state: State) -> Worker | None:
    """Return the other process that has the name of this one, and counts as alive."""
    others = (w for w in state.workers.values() if w.name == hello.name and w.incarnation != hello.incarnation)
    return next((worker for worker in others if not worker.is_gone or _sends_heartbeats(worker, state.now)), None)


def _sends_heartbeats(worker: Worker, now: float) -> bool:
    """Whether the worker is out only because its connection closed, and still sends heartbeats."""
    judged, beat_at = worker.judgement, worker.heartbeats.last_arrived_at
    if worker.state is not WorkerState.OUT or worker.is_revoked or judged is None or beat_at is None:
        return False
    return judged.verdict is Verdict.DEAD and beat_at >= judged.since + LAST_HEARTBEAT_S and now - beat_at <= FRESH_S


def should_yield(former: Worker, hello: Hello, owner: str, state: State) -> bool:
    """Whether the new process has the better right to the name, although the former holder counts as alive."""
    if former.wants_to_leave or (former.key_owner and not owner):
        return True
    return state.now - state.started_at <= REJOIN_S and _claim_rank(hello) > _claim_rank(former.hello)


def _claim_rank(hello: Hello) -> tuple[bool, bool]:
    """Return the rank of a worker's claim to a name; the greater rank wins. A worker that holds layers of a plan ranks
    first, then a worker that a broker has admitted before."""
    return hello.held_layers is not None, hello.lineage != NO_LINEAGE


def is_proven_alive(former: Worker, since: float) -> bool:
    """Whether the holder of the name has sent a heartbeat more than ``PROOF_S`` after another process claimed the name
    (``since``)."""
    return former.heartbeats.last_arrived_at is not None and former.heartbeats.last_arrived_at >= since + PROOF_S


def name_taken_reason(former: Worker) -> str:
    """Return why the name can't be had, and the remedy."""
    hello = former.hello
    return (
        f"the name {hello.name} is taken by a running worker (process {hello.pid} on {hello.host}); "
        f"give this one a name of its own (--name), or stop that one first (swarmctl stop {hello.name})"
    )
