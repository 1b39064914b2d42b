"""Everything that arrives at a listener was sent by the plan's sender (I10).

The check uses the plans as the broker made them, not the listeners' allow-lists: a stage may receive from the upstream
stage of the plan in force, or of the plan in preparation. The broker receives finished steps from the last stage of its
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import Lineage

if TYPE_CHECKING:
    from swarm.sim.views import WorkerView

BROKER = "broker"


@dataclass(slots=True)
class SenderCheck:
    """Allowed sender of each receiver."""

    # by the broker's lineage, the epoch and the receiver
    _senders: dict[tuple[Lineage, int, str], str] = field(default_factory=dict)

    def on_plan(self, state: State) -> None:
        """Record the senders of a plan that the broker has prepared."""
        plan = state.plans.upcoming
        senders = [BROKER, *(stage.incarnation for stage in plan.stages)] if plan is not None else []
        for sender, stage in zip(senders, plan.stages if plan is not None else (), strict=False):
            assert plan is not None
            self._senders[state.lineage, plan.epoch, stage.incarnation] = sender

    def check_step(self, sender: str, node: WorkerView) -> None:
        """Raise Violation if a step that arrived at a stage came from a sender that the stage may not accept."""
        core, wanted = node.core, node.core.pending_plan.wanted
        allowed = set()
        if core.active is not None:
            allowed.add(self._senders.get((core.lineage, core.active, node.incarnation)))
        if wanted is not None:
            allowed.add(self._senders.get((wanted.lineage, wanted.epoch, node.incarnation)))
        if sender not in allowed:
            raise Violation(f"I10: {node.incarnation} received from {sender}, its plans allow {allowed or 'none'}")

    @staticmethod
    def check_step_done(sender: str, state: State) -> None:
        """Raise Violation if a finished step that arrived at the broker was not sent by the last stage of its plan."""
        plan = state.plans.current
        last = None if plan is None else plan.stages[-1].incarnation
        if sender != last:
            raise Violation(f"I10: the broker received from {sender}, its plan allows {last or 'none'}")
