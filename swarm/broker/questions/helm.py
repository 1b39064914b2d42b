"""Operator commands: cordon, drain, plans by hand, and replanning.

A command that would leave the swarm without a plan is refused: a plan preview is computed first, outside of the event
loop (``plan_preview``). Only then does the operator's constraint take effect. The plan itself is made by the one
reconfiguration procedure that makes all plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from swarm.broker.actions import Outbox, SayClient
from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.questions import Found
from swarm.broker.drafts.rules import overruled, why_excluded
from swarm.broker.planner.problem import Shortage
from swarm.broker.questions import absent, plan_report
from swarm.broker.questions.what_if import Order, Suppositions
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.plans import Steering
from swarm.wire.messages import ByHand, Json, Report, Steer

LASTS = (
    "until this broker restarts; to make it permanent, set plan.exclude, plan.pins, plan.caps or plan.objective in its "
    "settings"
)
ANYWAY = -1.0  # a margin that accepts any other plan


@dataclass(slots=True)
class Helm:
    """Executes ``PlanCommand`` messages. Answers are appended to ``out``."""

    state: State
    out: Outbox
    suppositions: Suppositions
    procedure: Procedure

    def steer(self, client: bytes, message: Steer) -> None:
        """Execute a command, or first compute whether it is possible; the client gets an answer in either case."""
        if message.verb in ("rebalance", "plan"):
            self._plan_anew(client, message)
            return
        worker = absent.member(self.state, message.worker)
        if worker is None and not (message.verb == "uncordon" and message.worker in self.state.steering.cordoned):
            self._say(client, {"error": absent.why_none(self.state, message.worker)})
            return
        if worker is not None and message.verb == "drain":
            self._drain(client, worker)
            return
        if worker is not None and message.verb == "cordon":
            self._cordon(worker)
        else:
            self._count(self.state.steering.uncordon(message.worker))
        self._say(client, self._stands(message.worker))

    def _cordon(self, worker: Worker) -> None:
        current, known = self.state.book.current, self.state.steering
        stage = None if current is None else current.stage_of(worker.incarnation)
        if worker.name not in known.drained:  # a drained worker must not keep the layers that it still has
            self._count(known.cordon(worker.name, None if stage is None else stage.layers))

    def _drain(self, client: bytes, worker: Worker) -> None:
        def told(found: Found, problem: str) -> None:
            if isinstance(found, Proposal):
                self._count(self.state.steering.drain(worker.name))
                self._say(client, self._stands(worker.name))
                return
            why = problem or "there is no model yet"
            reason = f"it could not be determined whether the swarm can do without {worker.name}: {why}"
            if isinstance(found, Shortage):
                reason = f"the swarm can't do without {worker.name}, it would wait for {found.text}"
            self._say(client, {"error": reason})

        self.suppositions.order(Order(self.state.steering.drain(worker.name), told, drained=worker.incarnation))

    def _plan_anew(self, client: bytes, message: Steer) -> None:
        wrong = self._unknown(message) or overruled(self.state, self.suppositions.wanted.rules, message.by_hand)
        if wrong:
            self._say(client, {"error": wrong})
            return

        def told(found: Found, problem: str) -> None:
            if not isinstance(found, Proposal):
                text = found.text if isinstance(found, Shortage) else problem
                self._say(client, {"error": f"nothing was changed: the swarm would wait for {text}"})
                return
            said = self._as_said(message)  # computed again, because the constraints may have changed since the question
            body = plan_report.supposed(self.state, found, said)
            if message.dry_run:
                self._say(client, body)
                return
            stays = body["state"] == "would stay as it is"
            self._count(said)
            lasts: Json = {"lasts": LASTS} if message.by_hand != ByHand() else {}
            self._say(client, {**body, "state": "stays as it is" if stays else "is made now", **lasts})

        self.suppositions.order(Order(self._as_said(message), told))

    def _as_said(self, message: Steer) -> Steering:
        known, hand = self.state.steering, message.by_hand
        if message.verb == "rebalance":
            return replace(known, margin=ANYWAY if message.force else 0.0)  # 0: any gain is enough
        return replace(
            known,
            pins={pin.worker: pin.layers for pin in hand.pins},
            caps={cap.worker: cap.most for cap in hand.caps},
            exclude=frozenset(hand.exclude),
            objective=hand.objective,
            margin=ANYWAY,
        )

    def _count(self, steering: Steering) -> None:
        """Make these constraints active; the plan may have to change."""
        self.state.steer(steering)
        self.procedure.changed(self.state.now)

    def _unknown(self, message: Steer) -> str:
        """Return an error if a named worker is not a member. Former members may be excluded again, because they may
        come back."""
        hand, known = message.by_hand, self.state.steering
        were = {worker.name for worker in self.state.workers.values()} | known.exclude | set(known.cordoned)
        named = [*(pin.worker for pin in hand.pins), *(cap.worker for cap in hand.caps)]
        named += [name for name in hand.exclude if name not in were]
        missing = (name for name in named if absent.member(self.state, name) is None)
        return next((absent.why_none(self.state, name) for name in missing), "")

    def _stands(self, name: str) -> Json:
        """Return the state of a worker after the command. ``note``: side effects."""
        known, rules = self.state.steering, self.suppositions.wanted.rules
        if held_as := known.held_as(name):
            notes = "; ".join(self._notes(name))
            said: Json = {"note": notes} if notes else {}
            return {"worker": name, "state": held_as, "lasts": LASTS, **said}
        if name in known.exclude | rules.exclude:
            note = f"it is not cordoned any more, but {why_excluded(known, name)}"
            return {"worker": name, "state": "excluded", "note": note}
        return {"worker": name, "state": "free"}

    def _notes(self, name: str) -> Iterator[str]:
        """Yield side effects of holding this worker back: a suspended pin, or no worker left to take over layers."""
        known, rules = self.state.steering, self.suppositions.wanted.rules
        pin = known.pins.get(name, rules.pins.get(name))
        if pin is not None and pin != known.cordoned[name]:
            yield f"its pin to {pin.in_words} is suspended until swarmctl uncordon {name}"
        out = known.exclude | rules.exclude | known.cordoned.keys()
        if all(
            worker.is_gone or worker.state is WorkerState.LEAVING or worker.name in out
            for worker in self.state.workers.values()
        ):
            yield (
                "no worker is left that may get layers: if one dies, requests wait for swarmctl uncordon "
                "or a new worker"
            )

    def _say(self, client: bytes, body: Json) -> None:
        self.out.append(SayClient(client, Report(what="steer", ok="error" not in body, body=body)))
