"""Steps that raise are blamed on the worker or request that makes them raise (I15).

A worker whose steps fail one after the other is out after ``GUILTY_AFTER`` failures, and only a request that makes
steps fail is ended for it (``Audit.check_quarantined``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarm.broker.members.blame import GUILTY_AFTER
from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import DataPathError, LayerRange, StepDone, WorkerMessage


class BlameCheck:
    """Requests that make steps fail, and failures in a row that were reported to the broker."""

    def __init__(self) -> None:
        self.poisonous: dict[str, int] = {}  # request -> the layer whose code it makes raise
        self._in_row: Counter[tuple[str, float]] = Counter()  # by incarnation and the time of joining
        self._reported_by = ""  # incarnation of the worker whose failure is being reported

    def can_fail(self, sequences: Iterable[int], layers: LayerRange, state: State) -> bool:
        """Whether one of the sequences belongs to a request that no worker can compute through these layers."""
        if not self.poisonous:
            return False
        requests = {state.sequences[sequence].request.id for sequence in sequences if sequence in state.sequences}
        return any(layers.first <= self.poisonous.get(sequence, -1) < layers.stop for sequence in requests)

    def on_broker_restarted(self) -> None:
        """Reset: another broker has seen none of the failures."""
        self._in_row.clear()

    def on_step_done(self, done: StepDone, state: State) -> None:
        """Record a finished step: none of its workers has failed."""
        if state.plans.current is not None and done.epoch == state.plans.current.epoch:
            self._in_row.clear()

    def on_request_convicted(self) -> None:
        """Record that a request was ended for its steps: it caused the failures until now."""
        self._in_row.clear()
        self._reported_by = ""

    def before_message(self, message: WorkerMessage, state: State) -> None:
        """Note a failure report before the broker handles it."""
        plan = state.plans.current
        if isinstance(message, DataPathError) and message.failed is not None and plan is not None:
            self._reported_by = message.incarnation if message.epoch == plan.epoch else ""

    def check(self, state: State) -> None:
        """Check after the broker's event that a worker with too many failures in a row is out."""
        worker, self._reported_by = state.workers.get(self._reported_by), ""
        if worker is None or worker.is_gone:
            return
        key = worker.incarnation, worker.joined_at
        self._in_row[key] += 1
        if self._in_row[key] >= GUILTY_AFTER:
            raise Violation(f"I15: {self._in_row[key]} steps in a row failed at {worker.incarnation}, which stays")
