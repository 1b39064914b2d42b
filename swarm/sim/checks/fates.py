"""A look-up never changes a request (I12), and a request kept without a reader is kept for as long as its submitter
asked, whichever broker process is running (I13)."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker import events as broker_event
from swarm.broker.core import PAUSE_S
from swarm.broker.state import Request, SequenceState, State
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import Detach, GetRequest, LookUp

MAX_DELAY_S = 1.0  # delay until the broker's timer fires

Fate = tuple[object, ...]  # values that decide over a request


def snapshot_fates(event: broker_event.Event, state: State, now: float) -> dict[str, Fate] | None:
    """Return the values that decide over each request, if this event is a look-up; None: it may change requests."""
    match event:
        case broker_event.ClientMessageReceived(_, message) if isinstance(message, LookUp | GetRequest):
            pass
        case broker_event.RequestRead(request_id) if state.journal_lookups.has_only_questions(request_id):
            pass
        case _:
            return None
    if now - state.now > PAUSE_S:
        return None  # the broker stood still, which shifts deadlines
    return {request.id: _fate(request) for request in state.requests.values() if not request.has_ended}


def check_fates(fates: dict[str, Fate] | None, state: State) -> None:
    """Check that a look-up changed no request. (A sequence may end in the same event because its deadline can't be
    met.)"""
    for request_id, fate in (fates or {}).items():
        request = state.requests.get(request_id)
        if request is None:
            raise Violation(f"I12: a look-up removed {request_id}")
        if any(sequence.state is SequenceState.ENDED and sequence.reason == "failed" for sequence in request.sequences):
            continue
        if _fate(request) != fate:
            raise Violation(f"I12: a look-up changed {request_id} from {fate} to {_fate(request)}")


def _fate(request: Request) -> Fate:
    sequences = [
        (s.sent, s.delivered, s.reader_position_unknown, s.end_sent, s.stop_at, s.reason, s.num_generated)
        for s in request.sequences
    ]
    reader = (request.client, request.owner, request.is_blocked, request.detached_at, request.grace_s)
    return (*reader, request.deadline_at, *sequences)


@dataclass(slots=True)
class RetentionCheck:
    """Last time at which each kept request had a reader, on the world's clock, not the broker's."""

    grace_s: float
    _last_read_at: dict[str, float] = field(default_factory=dict)
    _being_read: set[str] = field(default_factory=set)
    _detached: set[str] = field(default_factory=set)

    def update(self, event: broker_event.Event, state: State, now: float) -> None:
        """Update the times after an event of the broker."""
        for request in state.requests.values():
            if not request.submit.keep_s:
                continue
            if request.client is not None:
                self._being_read.add(request.id)
                self._detached.discard(request.id)
            elif request.id in self._being_read:
                self._being_read.remove(request.id)
                if isinstance(event, broker_event.ClientMessageReceived) and isinstance(event.message, Detach):
                    self._detached.add(request.id)
            elif request.id in self._last_read_at:
                continue
            self._last_read_at[request.id] = now

    def on_broker_restarted(self, state: State, now: float) -> None:
        """Restart the times with a new broker."""
        self._being_read.clear()
        self._detached.clear()
        for request in state.requests.values():
            if request.submit.keep_s:
                self._last_read_at[request.id] = now

    def check_given_up(self, request: Request, now: float, continued_at: float) -> None:
        """Check the time at which the broker cancels an unread request; later is allowed if it stood still until
        ``continued_at``."""
        keep_s = request.submit.keep_s
        left_at = self._last_read_at.get(request.id)
        if not keep_s or left_at is None:
            return
        if now - left_at < keep_s - 1e-6:
            raise Violation(f"I13: {request.id} is given up after {now - left_at:.3f} s, {keep_s} were asked for")
        limit_s = keep_s if request.id in self._detached else max(keep_s, self.grace_s)
        if now - left_at > limit_s + MAX_DELAY_S and continued_at < left_at:
            raise Violation(f"I13: {request.id} is given up after {now - left_at:.3f} s, {keep_s} were asked for")
