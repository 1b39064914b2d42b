"""State: all that the broker knows, as plain values with their questions and verbs.

Nothing in here sends, writes or decides what happens next. A sequence's positions stand in ``sequences``, and what it
may become in ``standing``; who waits in ``queue``, with when to look at a request again; who runs in ``running``, whose
keys and values others may share in ``prefix``; plans, epochs and what is to be brought level in ``plans``; workers,
their pulses and verdicts, and whose doors can't be reached from where, in ``workers``; steps that raised, and what has
come through since, in ``evidence``; who waits for another's name, and who was sent away, in ``newcomers``; what has
ended or is nowhere, and what is asked of the journal about it, in ``archive``; what steps cost in ``costs``; what the
journal tells of earlier brokers in ``past``. ``State.check`` has the rules of all, ``State.forgive`` the one answer to
a pause of the broker's own.
"""

from __future__ import annotations

from swarm.broker.state.plans import Plan, PlanBook, PlanPhase, StagePlan
from swarm.broker.state.sequences import Request, Sequence
from swarm.broker.state.standing import Rebuild, SequenceState
from swarm.broker.state.state import Decided, DoorBook, Flight, HostBook, KeyBook, State, Upload
from swarm.broker.state.workers import Worker, WorkerState
