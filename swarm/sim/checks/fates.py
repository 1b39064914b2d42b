"""A look-up never changes an answer's fate (I12), and what is kept without a reader is kept for as long as was asked
for, whichever process is watching (I13)."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker import events as broker_event
from swarm.broker.core import PAUSE_S
from swarm.broker.state import Request, SequenceState, State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import Detach, LookUp, Recall

LATE_S = 1.0  # until the broker's timer strikes

Fate = tuple[object, ...]


def before(event: broker_event.Event, state: State, now: float) -> dict[str, Fate] | None:
    """Take down what decides over requests, if this event only reads; None: it may do more."""
    match event:
        case broker_event.ClientSaid(_, message) if isinstance(message, LookUp | Recall):
            pass
        case broker_event.RequestRead(request_id) if state.archive.only_questions(request_id):
            pass
        case _:
            return None
    if now - state.now > PAUSE_S:
        return None  # the broker stood still, and forgives that
    return {request.id: _fate(request) for request in state.requests.values() if not request.ended}


def after(was: dict[str, Fate] | None, state: State) -> None:
    """Compare. A sequence may end in the same event, since its deadline can't be kept."""
    for request_id, fate in (was or {}).items():
        request = state.requests.get(request_id)
        if request is None:
            raise Violation(f"I12: a look-up removed {request_id}")
        if any(sequence.state is SequenceState.ENDED and sequence.reason == "failed" for sequence in request.sequences):
            continue
        if _fate(request) != fate:
            raise Violation(f"I12: a look-up changed {request_id} from {fate} to {_fate(request)}")


def _fate(request: Request) -> Fate:
    sequences = [
        (s.sent, s.delivered, s.unsure, s.finish_sent, s.stop_at, s.reason, s.num_generated) for s in request.sequences
    ]
    reader = (request.client, request.owner, request.stuck, request.detached_at, request.left_for_s)
    return (*reader, request.deadline_at, *sequences)


@dataclass(slots=True)
class Keeping:
    """When each request that is to be kept had a reader for the last time. Times of the world, not of the broker."""

    grace_s: float
    _read_at: dict[str, float] = field(default_factory=dict)
    _is_read: set[str] = field(default_factory=set)
    _left_on_purpose: set[str] = field(default_factory=set)

    def look(self, event: broker_event.Event, state: State, now: float) -> None:
        """Called after every event of the broker."""
        for request in state.requests.values():
            if not request.submit.keep_s:
                continue
            if request.client is not None:
                self._is_read.add(request.id)
                self._left_on_purpose.discard(request.id)
            elif request.id in self._is_read:
                self._is_read.remove(request.id)
                if isinstance(event, broker_event.ClientSaid) and isinstance(event.message, Detach):
                    self._left_on_purpose.add(request.id)
            elif request.id in self._read_at:
                continue
            self._read_at[request.id] = now

    def restarted(self, state: State, now: float) -> None:
        """The time begins anew with a broker."""
        self._is_read.clear()
        self._left_on_purpose.clear()
        for request in state.requests.values():
            if request.submit.keep_s:
                self._read_at[request.id] = now

    def given_up(self, request: Request, now: float, went_on_at: float) -> None:
        """The broker cancels what nobody reads; later, if it stood still (until ``went_on_at``)."""
        keep_s = request.submit.keep_s
        left_at = self._read_at.get(request.id)
        if not keep_s or left_at is None:
            return
        if now - left_at < keep_s - 1e-6:
            raise Violation(f"I13: {request.id} is given up after {now - left_at:.3f} s, {keep_s} were asked for")
        limit_s = keep_s if request.id in self._left_on_purpose else max(keep_s, self.grace_s)
        if now - left_at > limit_s + LATE_S and went_on_at < left_at:
            raise Violation(f"I13: {request.id} is given up after {now - left_at:.3f} s, {keep_s} were asked for")
