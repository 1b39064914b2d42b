"""Who may have a name: one process at a time; and whoever has it keeps it for as long as it lives.

A process that is started anew in its dead former self's place, and one that somebody has started beside a living one by
mistake, say the same Hello. Within a moment it shows which of the two it is:

==================================================  ====================================================
who has the name                                    what becomes of the newcomer
==================================================  ====================================================
nobody; one that is out, or has left                it is let in at once
one that is out for its closed connection, and      it waits: that one is about to come back over the next
beats on                                            connection
one that has said that it leaves                    it is let in at once
one from elsewhere, and the newcomer is on the      it is let in at once: whoever joins from elsewhere
broker's own machine                                chose its name itself
one that came first to a broker that has just       it is let in at once: it had the name before the
started, and brings less: no layers, or it has      broker's death, and came back second
known no broker before
one that counts as alive (of two that come back     it waits at the door, and is let in as soon as that
with as much, that is who came first)               one is out
one that beats ``PROOF_S`` after the newcomer came  it is refused
==================================================  ====================================================

Nobody waits for long: the connection of a process that has died closes within milliseconds, and who can't be heard, or
is frozen, is out within the beats' timeout. So a supervisor that replaces a dead worker is never refused.
"""

from __future__ import annotations

from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import NOBODYS, Hello

# After the newcomer's Hello. What was on its way when its sender died comes within less, and so does the news of its
# death.
PROOF_S = 1.0
BEATS_ON_S = 0.15  # after its connection closed: a dead process's last beat comes within less
FRESH_S = 1.0  # who has not beaten for longer does so no more


def holder(hello: Hello, state: State) -> Worker | None:
    """Find the process that has the name of this one, and counts as alive."""
    others = (w for w in state.workers.values() if w.name == hello.name and w.incarnation != hello.incarnation)
    return next((worker for worker in others if not worker.is_gone or _beats_on(worker, state.now)), None)


def _beats_on(worker: Worker, now: float) -> bool:
    """Whether it is out for its closed connection alone."""
    judged, beat_at = worker.judged, worker.pulse.beat_at
    if worker.state is not WorkerState.OUT or worker.is_revoked or judged is None or beat_at is None:
        return False
    return judged.verdict is Verdict.DEAD and beat_at >= judged.since + BEATS_ON_S and now - beat_at <= FRESH_S


def gives_way(former: Worker, hello: Hello, owner: str, state: State) -> bool:
    """Whether the newcomer has the better right to the name, though the former counts as alive."""
    if former.wants_to_leave or (former.belongs_to and not owner):
        return True
    return state.now - state.started_at <= REJOIN_S and _brings(hello) > _brings(former.hello)


def _brings(hello: Hello) -> tuple[bool, bool]:
    """Tell what it has from before: layers of a plan; or that some broker, at least, has let it in."""
    return hello.held_layers is not None, hello.lineage != NOBODYS


def is_proven(former: Worker, since: float) -> bool:
    """Whether it has shown that it lives, to somebody who waits for its name since then."""
    return former.pulse.beat_at is not None and former.pulse.beat_at >= since + PROOF_S


def why_taken(former: Worker) -> str:
    """Say why the name is not to be had, and what to do."""
    known = former.hello
    return (
        f"the name {known.name} is taken: it is that of a worker that lives (process {known.pid} on {known.host}); "
        f"give this one a name of its own (--name), or end that one first (swarmctl stop {known.name})"
    )
