"""Whatever comes through a door was sent by who the plan says (I10).

Not by what doors were told, but by the plans as the broker made them: the stage before this one in the plan that is in
force here, or in the one that is prepared. What the broker hears of steps comes from the last stage of its plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import Lineage

if TYPE_CHECKING:
    from swarm.sim.roles import Worker

BROKER = "broker"


@dataclass(slots=True)
class Neighbours:
    """``_before``: who sends to whom, by the broker's life, the epoch and the receiver."""

    _before: dict[tuple[Lineage, int, str], str] = field(default_factory=dict)

    def planned(self, state: State) -> None:
        """The broker tells everybody to prepare the plan to come."""
        plan = state.book.coming
        senders = [BROKER, *(stage.incarnation for stage in plan.stages)] if plan is not None else []
        for sender, stage in zip(senders, plan.stages if plan is not None else (), strict=False):
            assert plan is not None
            self._before[state.lineage, plan.epoch, stage.incarnation] = sender

    def step_passes(self, sender: str, node: Worker) -> None:
        """A step from there came through the door of this stage."""
        core, wanted = node.core, node.core.preparation.wanted
        allowed = set()
        if core.active is not None:
            allowed.add(self._before.get((core.lineage, core.active, node.incarnation)))
        if wanted is not None:
            allowed.add(self._before.get((wanted.lineage, wanted.epoch, node.incarnation)))
        if sender not in allowed:
            raise Violation(f"I10: {node.incarnation} hears {sender}, and its plans say {allowed or 'nobody'}")

    @staticmethod
    def answer_passes(sender: str, state: State) -> None:
        """The answer to a step came through the broker's door."""
        plan = state.book.current
        last = None if plan is None else plan.stages[-1].incarnation
        if sender != last:
            raise Violation(f"I10: the broker hears {sender}, and its plan says {last or 'nobody'}")
