"""Operator commands: cordon, drain, plans by hand, and replanning.

A command that would leave the swarm without a plan is refused: a plan preview is computed first, outside of the event
loop (``plan_preview``). Only then does the operator's constraint take effect. The plan itself is made by the one
reconfiguration procedure that makes all plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from swarm.broker.actions import Outbox, SendToClient
from swarm.broker.admin import departed, plan_report
from swarm.broker.admin.plan_preview import ConstrainedPlan, PlanPreviews
from swarm.broker.planner.problem import Shortage
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.plan_query import PlanAnswer
from swarm.broker.planning.rules import exclusion_reason, find_override
from swarm.broker.recovery.reconfiguration import Reconfiguration
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.constraints import PlanConstraints
from swarm.wire.messages import Json, PlanCommand, PlanOverrides, Report

LASTS = (
    "until this broker restarts; to make it permanent, set plan.exclude, plan.pins, plan.caps or plan.objective in its "
    "settings"
)
ALWAYS_BETTER = -1.0  # a margin that accepts any other plan


@dataclass(slots=True)
class OperatorCommands:
    """Executes ``PlanCommand`` messages. Answers are appended to ``out``."""

    state: State
    out: Outbox
    previews: PlanPreviews
    procedure: Reconfiguration

    def execute(self, client: bytes, message: PlanCommand) -> None:
        """Execute a command, or first compute whether it is possible; the client gets an answer in either case."""
        if message.verb in ("rebalance", "plan"):
            self._replan(client, message)
            return
        worker = departed.find_member(self.state, message.worker)
        if worker is None and not (message.verb == "uncordon" and message.worker in self.state.constraints.cordoned):
            self._send(client, {"error": departed.absence_reason(self.state, message.worker)})
            return
        if worker is not None and message.verb == "drain":
            self._drain(client, worker)
            return
        if worker is not None and message.verb == "cordon":
            self._cordon(worker)
        else:
            self._apply(self.state.constraints.uncordon(message.worker))
        self._send(client, self._worker_state(message.worker))

    def _cordon(self, worker: Worker) -> None:
        current, constraints = self.state.plans.current, self.state.constraints
        stage = None if current is None else current.stage_of(worker.incarnation)
        if worker.name not in constraints.drained:  # a drained worker must not keep the layers that it still has
            self._apply(constraints.cordon(worker.name, None if stage is None else stage.layers))

    def _drain(self, client: bytes, worker: Worker) -> None:
        def on_answer(answer: PlanAnswer, problem: str) -> None:
            if isinstance(answer, Proposal):
                self._apply(self.state.constraints.drain(worker.name))
                self._send(client, self._worker_state(worker.name))
                return
            why = problem or "there is no model yet"
            reason = f"it could not be determined whether the swarm can do without {worker.name}: {why}"
            if isinstance(answer, Shortage):
                reason = f"the swarm can't do without {worker.name}, it would wait for {answer.text}"
            self._send(client, {"error": reason})

        self.previews.ask_constrained(
            ConstrainedPlan(self.state.constraints.drain(worker.name), on_answer, drained=worker.incarnation)
        )

    def _replan(self, client: bytes, message: PlanCommand) -> None:
        wrong = self._unknown_worker_error(message) or find_override(
            self.state, self.previews.wanted.rules, message.by_hand
        )
        if wrong:
            self._send(client, {"error": wrong})
            return

        def on_answer(answer: PlanAnswer, problem: str) -> None:
            if not isinstance(answer, Proposal):
                text = answer.text if isinstance(answer, Shortage) else problem
                self._send(client, {"error": f"nothing was changed: the swarm would wait for {text}"})
                return
            # computed again, because the constraints may have changed since the question
            constraints = self._constraints_of(message)
            body = plan_report.report_preview(self.state, answer, constraints)
            if message.dry_run:
                self._send(client, body)
                return
            stays = body["state"] == "would stay as it is"
            self._apply(constraints)
            lasts: Json = {"lasts": LASTS} if message.by_hand != PlanOverrides() else {}
            self._send(client, {**body, "state": "stays as it is" if stays else "is made now", **lasts})

        self.previews.ask_constrained(ConstrainedPlan(self._constraints_of(message), on_answer))

    def _constraints_of(self, message: PlanCommand) -> PlanConstraints:
        current, hand = self.state.constraints, message.by_hand
        if message.verb == "rebalance":
            return replace(current, margin=ALWAYS_BETTER if message.force else 0.0)  # 0: any gain is enough
        return replace(
            current,
            pins={pin.worker: pin.layers for pin in hand.pins},
            caps={cap.worker: cap.most for cap in hand.caps},
            exclude=frozenset(hand.exclude),
            objective=hand.objective,
            margin=ALWAYS_BETTER,
        )

    def _apply(self, steering: PlanConstraints) -> None:
        """Make these constraints active; the plan may have to change."""
        self.state.set_constraints(steering)
        self.procedure.on_members_changed(self.state.now)

    def _unknown_worker_error(self, message: PlanCommand) -> str:
        """Return an error if a named worker is not a member. Former members may be excluded again, because they may
        return."""
        hand, constraints = message.by_hand, self.state.constraints
        were = {worker.name for worker in self.state.workers.values()} | constraints.exclude | set(constraints.cordoned)
        named = [*(pin.worker for pin in hand.pins), *(cap.worker for cap in hand.caps)]
        named += [name for name in hand.exclude if name not in were]
        missing = (name for name in named if departed.find_member(self.state, name) is None)
        return next((departed.absence_reason(self.state, name) for name in missing), "")

    def _worker_state(self, name: str) -> Json:
        """Return the state of a worker after the command. ``note``: side effects."""
        constraints, rules = self.state.constraints, self.previews.wanted.rules
        if restriction := constraints.restriction(name):
            notes = "; ".join(self._side_effects(name))
            extra: Json = {"note": notes} if notes else {}
            return {"worker": name, "state": restriction, "lasts": LASTS, **extra}
        if name in constraints.exclude | rules.exclude:
            note = f"it is not cordoned any more, but {exclusion_reason(constraints, name)}"
            return {"worker": name, "state": "excluded", "note": note}
        return {"worker": name, "state": "free"}

    def _side_effects(self, name: str) -> Iterator[str]:
        """Yield side effects of holding this worker back: a suspended pin, or no worker left to take over layers."""
        constraints, rules = self.state.constraints, self.previews.wanted.rules
        pin = constraints.pins.get(name, rules.pins.get(name))
        if pin is not None and pin != constraints.cordoned[name]:
            yield f"its pin to {pin.label} is suspended until swarmctl uncordon {name}"
        out = constraints.exclude | rules.exclude | constraints.cordoned.keys()
        if all(
            worker.is_gone or worker.state is WorkerState.LEAVING or worker.name in out
            for worker in self.state.workers.values()
        ):
            yield (
                "no worker is left that may get layers: if one dies, requests wait for swarmctl uncordon "
                "or a new worker"
            )

    def _send(self, client: bytes, body: Json) -> None:
        self.out.append(SendToClient(client, Report(what="steer", ok="error" not in body, body=body)))
