"""Notices steps that are lost though nobody died: one is under way, and yet no stage has computed for a while."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import Outbox
from swarm.broker.members.roster import Members
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.state import Plan, State
from swarm.wire.messages import LayerRange

LOST_STEP_S = 1.0
WIRE_FACTOR = 3.0  # how many times longer than measured a link may take before what it carries counts as lost
MOST_DOUBLINGS = 2  # of that patience, one for each loss in a row: TCP doubles its own
BLAME_AFTER_LOSSES = 2  # steps lost without a single one that came through between


@dataclass(slots=True)
class LostSteps:
    state: State
    members: Members
    procedure: Procedure
    out: Outbox

    def tick(self, now: float) -> None:
        plan, rebuilding = self.state.book.current, self.state.rebuilding
        under_way = [flight.sent_at for flight in self.state.flights.values()]
        under_way += [rebuilding.ordered_at] if rebuilding.under_way else []
        if plan is None or not under_way or not self.state.book.serving:
            return
        idle_s = min(self.members.vigil.idle_s(incarnation) for incarnation in plan.members)
        if min(now - min(under_way), idle_s) > self._lost_after_s(plan):
            self.out.note("steps_lost", "error", steps=sorted(self.state.flights))
            self.state.count("steps_lost", len(self.state.flights))
            self.state.setbacks.lost += 1
            # Once or twice is the network's doing. If nothing else comes through, it is what these steps carry; or two
            # stages can't reach each other at all.
            again = self.state.setbacks.lost > BLAME_AFTER_LOSSES
            apart = again and self._set_apart(plan, now)
            self.procedure.trouble(now, blame=again and not apart)

    def _lost_after_s(self, plan: Plan) -> float:
        """A step that nobody computes may be on its way: a large one over a slow link takes long; and where packets are
        lost, what was sent again is waited for the longer the more often that was in vain."""
        positions = max((flight.num_tokens for flight in self.state.flights.values()), default=0)
        positions = max(positions, self.state.rebuilding.chunk if self.state.rebuilding.under_way else 0)
        usual_s = max(LOST_STEP_S, WIRE_FACTOR * self.members.vigil.on_the_wire_s(plan.members, positions))
        return usual_s * 2.0 ** min(self.state.setbacks.lost, MOST_DOUBLINGS)

    def _set_apart(self, plan: Plan, now: float) -> bool:
        """Edges were made anew again and again, and still a stage can't hand on what it has to the next one, which has
        nothing to do and is well: these two can't reach each other. The plan does without the second for a while."""
        for stage in plan.stages:
            holder = self.state.workers.get(self.members.vigil.blocked_on(stage.incarnation))
            if holder is not None and not holder.is_gone and holder.incarnation in plan.members:
                holder.refuse(LayerRange(0, 1), f"{stage.name} can't reach it, though both live", now)
                self.out.note("worker_unreachable", "error", worker=holder.name, by=stage.name)
                self.state.count("workers_unreachable")
                return True
        return False
