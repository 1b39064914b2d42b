"""State of the broker: plain values with queries and with the operations that change them.

This package sends nothing, writes nothing and makes no decisions.

- ``sequences``: positions of each sequence and what happens to it; ``lifecycle``: its states and which operation is
  allowed in which state
- ``queue``: sequences that wait for capacity, and the times at which requests must be checked again
- ``running``: sequences that run; ``prefix``: whose keys and values other sequences may share
- ``plans``: plans and epochs; ``constraints``: what an operator demands of plans; ``rechecks``: comparisons of results
- ``rebuilding``: layers that are still to be rebuilt; ``restores``: sequences that wait for what is read from disk
- ``images``: images that the first stage computes for coming steps
- ``kv_copies``: copies of keys and values that workers hold for each other
- ``migration``: copies for a change of plan; ``moves``: what such changes gained and took
- ``workers``: workers, their heartbeats and verdicts, and the routes between workers that are blocked
- ``evidence``: steps that raised, and what has been computed successfully since
- ``newcomers``: processes that wait for the name of another one, and workers that were refused
- ``ended_requests``: requests that have ended or are unknown, and the messages about them that wait for the journal
- ``costs``: measured step times; ``recoveries``: durations of recoveries
- ``journal_snapshot``: what the journal holds of earlier brokers

``State.check`` verifies the invariants of all of them. ``State.shift_deadlines`` is the only reaction to a pause of the
broker itself.
"""

from __future__ import annotations

from swarm.broker.state.lifecycle import Rebuild, SequenceState
from swarm.broker.state.plans import Plan, PlanPhase, PlanState, StagePlan
from swarm.broker.state.sequences import Request, Sequence
from swarm.broker.state.state import (
    AcceptState,
    HostRegistry,
    InFlightProposal,
    InFlightStep,
    KeyState,
    ModelUpload,
    SchedulerDecision,
    State,
)
from swarm.broker.state.workers import Worker, WorkerState
