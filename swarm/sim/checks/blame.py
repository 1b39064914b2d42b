"""Steps that raise are blamed on who makes them raise (I15).

A worker whose steps fail one after the other is out after ``GUILTY_AFTER`` of them, and only a request that makes steps
fail is ended for it (``Audit.quarantined``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarm.broker.members.blame import GUILTY_AFTER
from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import LayerRange, StepDone, Trouble, WorkerMessage


class Blame:
    """Knows which requests make steps fail, and counts the failures in a row that the broker is told of.

    ``poisonous``: such requests, and the layer whose code they make raise."""

    def __init__(self) -> None:
        self.poisonous: dict[str, int] = {}
        self._in_row: Counter[tuple[str, float]] = Counter()  # by incarnation, and since when it is a member
        self._news = ""  # incarnation of the worker that is about to tell of a failure

    def makes_fail(self, sequences: Iterable[int], layers: LayerRange, state: State) -> bool:
        """Whether one of them is of a request that nobody can compute through these layers."""
        if not self.poisonous:
            return False
        requests = {state.sequences[each].request.id for each in sequences if each in state.sequences}
        return any(layers.first <= self.poisonous.get(each, -1) < layers.stop for each in requests)

    def restarted(self) -> None:
        """Begin anew: another broker has seen nothing of it."""
        self._in_row.clear()

    def step_comes(self, done: StepDone, state: State) -> None:
        """A step comes through: none of its workers has failed."""
        if state.book.current is not None and done.epoch == state.book.current.epoch:
            self._in_row.clear()

    def convicted(self) -> None:
        """A request is ended for its steps: the failures until now were its doing."""
        self._in_row.clear()
        self._news = ""

    def told(self, message: WorkerMessage, state: State) -> None:
        """The broker is about to be told this."""
        plan = state.book.current
        if isinstance(message, Trouble) and message.failed is not None and plan is not None:
            self._news = message.incarnation if message.epoch == plan.epoch else ""

    def look(self, state: State) -> None:
        """The broker has acted."""
        worker, self._news = state.workers.get(self._news), ""
        if worker is None or worker.is_gone:
            return
        key = worker.incarnation, worker.joined_at
        self._in_row[key] += 1
        if self._in_row[key] >= GUILTY_AFTER:
            raise Violation(f"I15: {self._in_row[key]} steps in a row failed at {worker.incarnation}, which stays")
