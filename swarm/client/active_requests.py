"""Active requests of a session: the position of each continuation, and the messages to and from the broker about them.

Plain state without I/O: broker messages and caller events come in, actions go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm.client.connection_state import ConnectionState
from swarm.client.events import ConfirmStored, Deliver, EndContinuation, FailRequest, Send, SessionActions
from swarm.errors import (
    ClientError,
    DeadlinePassed,
    InvalidRequest,
    JournalDown,
    Overloaded,
    ReadElsewhere,
    RequestCancelled,
    RequestFailed,
    Unavailable,
)
from swarm.wire.messages import (
    TOO_LATE,
    TOO_SHORT,
    Accepted,
    Ack,
    Attach,
    Cancel,
    ClientMessage,
    Detach,
    Finished,
    Rejected,
    Report,
    Stop,
    Submit,
    Tokens,
)

NUDGE_S = 5.0  # A request without a message for this long is sent again: the broker drops answers rather than wait.
FINAL_CODES = frozenset({"invalid", "too_large", "unsupported_task"})  # of rejections after which nobody tries again
ACK_EVERY = 32  # tokens; a small part of the broker's window, so that the window never closes on a caller that keeps up
MAX_UNCONSUMED = 4096  # tokens of one continuation that may wait for their consumer


@dataclass(slots=True)
class Continuation:
    """Positions in one continuation: ``acked`` ≤ ``consumed`` ≤ ``expected``."""

    expected: int = 0  # index of the next token to deliver
    consumed: int = 0  # the caller has taken the tokens before this index
    acked: int = 0  # tokens before this index are acknowledged to the broker
    has_dropped: bool = False  # tokens were dropped; request them again once the caller has caught up
    stop_at: int | None = None  # a stop string ends the continuation before this index
    finished: Finished | None = None  # the broker's end message, perhaps before all tokens
    has_ended: bool = False  # the end has been delivered to the caller
    end_acked: bool = False  # the broker has been informed that the caller has everything

    @property
    def is_settled(self) -> bool:
        return self.has_ended and self.consumed >= self.expected

    @property
    def is_waiting(self) -> bool:
        """Whether the caller has taken every delivered token and more are due."""
        return not self.has_ended and self.consumed >= self.expected

    @property
    def is_complete(self) -> bool:
        """Whether the end message and all tokens before it have come."""
        return self.finished is not None and self.expected >= self.finished.num_tokens


@dataclass(slots=True)
class ActiveRequest:
    """A request between its start and its end."""

    submit: Submit
    started: float  # time of the start; shifted by pauses
    deadline: float | None
    continuations: list[Continuation]
    is_attached: bool = False  # read only: another process may have made it
    is_sent: bool = False  # sent at least once
    num_submits: int = 0  # how often the broker was sent the submission
    is_accepted: bool = False  # the broker has confirmed it
    is_reader: bool = False  # the broker has answered this client as the request's reader
    is_attach_in_flight: bool = False  # an Attach is in flight; do not request its tokens again
    nudge_at: float = 0.0  # time at which to send it again if no message about it has arrived
    unreadable_reason: str = ""  # why the broker cannot let it be read at the moment
    is_foreign_cancel: bool = False  # cancelled even if another client reads it
    left_at: float | None = None  # time at which the caller left; it waits for the broker's confirmation

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def outlives_caller(self) -> bool:
        """Whether the request continues after its caller leaves."""
        return self.submit.detached or self.is_attached or self.submit.keep_s > 0

    @property
    def has_left(self) -> bool:
        return self.left_at is not None

    @property
    def has_ended(self) -> bool:
        return all(c.has_ended for c in self.continuations)

    @property
    def is_settled(self) -> bool:
        return all(c.is_settled for c in self.continuations)

    @property
    def is_waiting(self) -> bool:
        return any(c.is_waiting for c in self.continuations)

    @property
    def has_dropped(self) -> bool:
        return any(c.has_dropped for c in self.continuations)

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Shift the time limits by a pause of the client. The time of the next repeat stays: a message may have been
        lost."""
        lost_s = min(pause_s, now - self.started)
        self.started += lost_s
        if self.deadline is not None:
            self.deadline += lost_s
        if self.left_at is not None:
            self.left_at = min(now, self.left_at + pause_s)

    def accept_tokens(self, message: Tokens) -> Deliver | None:
        """Accept the new tokens of a message that begins at or before the next expected one, as far as capacity
        allows."""
        continuation = self.continuations[message.index]
        self.is_attach_in_flight = False
        start = continuation.expected
        room = MAX_UNCONSUMED - (start - continuation.consumed)
        first, last = start - message.start, start - message.start + room
        continuation.has_dropped = continuation.has_dropped or last < len(message.ids)
        accepted = message.ids[first:last]
        if not accepted:
            return None
        continuation.expected += len(accepted)
        return Deliver(self.id, message.index, start, accepted, message.logprobs[first:last], message.hops[first:last])

    def take_due_acks(self, index: int) -> list[Ack]:
        """Acknowledge every ``ACK_EVERY`` tokens, and the whole of an ended continuation, which the broker can then
        forget. The newest token is acknowledged with the end only: its message may be lost."""
        continuation = self.continuations[index]
        last = continuation.is_settled and not continuation.end_acked
        stop = continuation.consumed if continuation.is_settled else continuation.consumed - 1
        if not last and stop - continuation.acked < ACK_EVERY:
            return []
        continuation.acked, continuation.end_acked = stop, continuation.is_settled
        return [self.make_ack(index, stop)]

    def final_acks(self) -> list[Ack]:
        """Acknowledge all of an ended request whose remaining tokens will not be read."""
        return [self.make_ack(i, c.expected) for i, c in enumerate(self.continuations) if not c.end_acked]

    def make_ack(self, index: int, next_index: int) -> Ack:
        return Ack(request_id=self.id, index=index, next_index=next_index)

    def make_attach(self) -> Attach:
        """Ask for everything from the next expected tokens on."""
        self.is_attach_in_flight = True
        for continuation in self.continuations:
            continuation.has_dropped = False
        next_index = tuple(c.expected for c in self.continuations)
        return Attach(request_id=self.id, next_index=next_index, again=self.is_reader)

    def make_cancel(self) -> Cancel:
        """Return the message that cancels the request. If another client has become its reader meanwhile, the request
        continues for that client."""
        return Cancel(request_id=self.id, if_reader=not self.is_foreign_cancel)

    def make_stops(self) -> list[Stop]:
        return [
            Stop(request_id=self.id, index=index, at_index=continuation.stop_at)
            for index, continuation in enumerate(self.continuations)
            if continuation.stop_at is not None and not continuation.has_ended
        ]

    def invariants(self) -> Iterator[str]:
        """Yield a description of every violated invariant."""
        for index, c in enumerate(self.continuations):
            where = f"{self.id}[{index}]"
            if not 0 <= c.acked <= c.consumed <= c.expected:
                yield f"{where}: acked {c.acked} ≤ consumed {c.consumed} ≤ expected {c.expected} does not hold"
            if c.expected - c.consumed > MAX_UNCONSUMED:
                yield f"{where}: {c.expected - c.consumed} tokens wait for their consumer"
        if not self.has_left and self.is_settled:
            yield f"{self.id}: settled, but kept"


@dataclass(slots=True)
class RequestTracker:
    """The session's active requests: decides what is sent to the broker about them and handles its messages."""

    connection_state: ConnectionState
    requests: dict[str, ActiveRequest] = field(default_factory=dict)
    num_ignored: int = 0  # messages about no live request: late ones, repeated ones, other clients' ones

    # --- to the broker

    def send(self, messages: Sequence[ClientMessage]) -> SessionActions:
        return [Send(message) for message in messages] if self.connection_state.is_connected else []

    def leave(self, request_id: str, now: float, *, cancel: bool = False) -> SessionActions:
        request = self.requests.get(request_id)
        if request is None or request.has_left:
            return []
        if not request.is_sent:
            del self.requests[request_id]
            return []
        if request.outlives_caller and not cancel:  # unread tokens are not acknowledged
            del self.requests[request_id]
            return self.send([Detach(request_id=request_id)])
        if request.has_ended:  # nothing to cancel; the caller will not read the rest
            del self.requests[request_id]
            return self.send(request.final_acks())
        request.left_at, request.deadline = now, None
        return self.send([request.make_cancel()])

    def resend(self, request: ActiveRequest, now: float) -> SessionActions:
        request.is_sent, request.nudge_at = True, now + NUDGE_S
        if request.has_left:
            return [Send(request.make_cancel())]
        if request.has_ended:
            return []  # the broker has nothing to send for it, and may have forgotten it
        if not request.is_accepted:
            request.num_submits += 1
            return [Send(request.submit)]
        return self.attach(request, now) + self.send(request.make_stops())

    def attach(self, request: ActiveRequest, now: float) -> SessionActions:
        if not self.connection_state.is_connected:
            return []
        request.nudge_at = now + NUDGE_S
        return self.send([request.make_attach()])

    # --- from the broker

    def handle_message(
        self, request: ActiveRequest, message: Tokens | Finished | Accepted | Rejected, now: float
    ) -> SessionActions:
        if isinstance(message, Rejected):
            return self._on_rejected(request, message, now)
        updates: SessionActions = (
            [ConfirmStored(request.id)] if request.submit.detached and not request.is_accepted else []
        )
        return updates + self._on_accepted(request, message, now)

    def _on_accepted(self, request: ActiveRequest, message: Tokens | Finished | Accepted, now: float) -> SessionActions:
        """Handle a message that shows that the broker has the request: acceptance, tokens or end."""
        request.is_accepted, request.is_reader, request.nudge_at = True, True, now + NUDGE_S
        request.unreadable_reason = ""
        if isinstance(message, Accepted):
            return []
        if message.index >= len(request.continuations):
            self.num_ignored += 1
            return []
        if isinstance(message, Tokens):
            return self._on_tokens(request, message, now)
        return self._on_finished(request, message, now)

    def _on_tokens(self, request: ActiveRequest, message: Tokens, now: float) -> SessionActions:
        continuation = request.continuations[message.index]
        stop = message.start + len(message.ids)
        if request.has_left:  # the broker sends the end only after all tokens are acknowledged
            return self.send([request.make_ack(message.index, stop)])
        if continuation.has_ended or stop <= continuation.expected:
            self.num_ignored += 1
            return []
        if message.start > continuation.expected:
            return self._on_gap(request, now)
        deliver = request.accept_tokens(message)
        return [deliver, *self._end_if_complete(request, message.index)] if deliver is not None else []

    def _on_gap(self, request: ActiveRequest, now: float) -> SessionActions:
        self.num_ignored += 1
        if request.is_attach_in_flight or request.has_dropped:
            return []  # already requested, or to be requested when the caller has caught up
        return self.attach(request, now)

    def _on_finished(self, request: ActiveRequest, message: Finished, now: float) -> SessionActions:
        if request.has_left:
            return self._confirm_end(request, message)
        continuation = request.continuations[message.index]
        if continuation.has_ended:
            self.num_ignored += 1
            return []
        if message.reason in ("failed", "cancelled"):
            return [FailRequest(request.id, finish_error(message)), *self._end_all(request, message, now)]
        continuation.finished = message
        if continuation.is_complete:
            return self._end_if_complete(request, message.index)
        if continuation.is_waiting and not request.is_attach_in_flight:  # tokens are missing
            return self.attach(request, now)
        continuation.has_dropped = True
        return []

    def _end_all(self, request: ActiveRequest, message: Finished, now: float) -> SessionActions:
        """End a request after one of its continuations has failed: the others are not needed."""
        acks = self._confirm_end(request, message)
        if not request.has_ended:
            return acks + self.leave(request.id, now)
        return acks if request.outlives_caller else acks + self.send(request.final_acks())

    def _confirm_end(self, request: ActiveRequest, message: Finished) -> SessionActions:
        continuation = request.continuations[message.index]
        continuation.has_ended = continuation.end_acked = True
        if request.has_ended:
            del self.requests[request.id]
        return self.send([request.make_ack(message.index, message.num_tokens)])

    def _end_if_complete(self, request: ActiveRequest, index: int) -> SessionActions:
        continuation = request.continuations[index]
        finished = continuation.finished
        if finished is None or continuation.has_ended or not continuation.is_complete:
            return []
        continuation.has_ended, continuation.has_dropped = True, False
        actions: SessionActions = [EndContinuation(request.id, index, finished)]
        if self.connection_state.is_connected:
            actions += self.send(request.take_due_acks(index))
        self.forget_settled(request)
        return actions

    def forget_settled(self, request: ActiveRequest) -> None:
        if request.is_settled:
            self.requests.pop(request.id, None)

    def _on_rejected(self, request: ActiveRequest, message: Rejected, now: float) -> SessionActions:
        if request.has_left:  # the broker does not have it, which is as good as cancelled
            del self.requests[request.id]
            return []
        if request.has_ended:
            return []
        # reading is not possible at the moment; retry later
        if request.is_accepted and message.retry_after_s is not None:
            request.is_attach_in_flight, request.nudge_at = False, now + message.retry_after_s
            request.unreadable_reason = message.reason
            return []
        del self.requests[request.id]
        is_taken = message.code == "superseded" and request.submit.detached and not request.is_accepted
        updates: SessionActions = [ConfirmStored(request.id)] if is_taken else []
        actions = [*updates, FailRequest(request.id, rejection_error(message, request.is_accepted))]
        if request.num_submits > 1 and message.code in FINAL_CODES:
            actions += self.send([request.make_cancel()])  # the reason may be gone when a later submission arrives
        return actions

    # --- live requests

    def live_requests(self) -> list[ActiveRequest]:
        """List the requests that still expect messages from the broker."""
        return [request for request in self.requests.values() if not request.has_left and not request.has_ended]

    def fail(self, requests: list[ActiveRequest], error: ClientError, now: float) -> SessionActions:
        """Fail requests with this error, and cancel them at the broker, now or after the next connect."""
        actions: SessionActions = []
        for request in requests:
            actions += [FailRequest(request.id, error), *self.leave(request.id, now)]
        return actions


def finish_error(message: Finished) -> ClientError:
    """Return the error of a request that failed or was cancelled."""
    if message.reason == "cancelled":
        return RequestCancelled(message.detail or "the request was cancelled")
    if message.detail in (TOO_LATE, TOO_SHORT):
        return DeadlinePassed(message.detail)
    return RequestFailed(message.detail or "the swarm could not finish the request")


def rejection_error(message: Rejected, accepted: bool) -> ClientError:
    """Return the error of a rejected request. An unrecognised code counts as a fault of the request."""
    match message.code:
        case "overloaded":
            return Overloaded(message.reason, retry_after_s=message.retry_after_s or 1.0)
        case "journal":
            return JournalDown(message.reason, retry_after_s=message.retry_after_s or 1.0)
        case "unavailable":
            return Unavailable(message.reason)
        case "superseded":
            return ReadElsewhere(message.reason)
        case "unknown" if accepted:
            return RequestFailed(message.reason)  # the broker accepted it and then lost it: not the caller's fault
        case _:
            return InvalidRequest(message.reason, code=message.code)


def question_error(request_id: str, report: Report) -> ClientError:
    """Return the error of a refused question. A broker older than protocol version 3 sends only the reason."""
    code, after_s = report.body.get("code"), report.body.get("retry_after_s")
    rejected = Rejected(
        request_id=request_id,
        code=code if isinstance(code, str) else "unknown",
        reason=str(report.body.get("error")),
        retry_after_s=after_s if isinstance(after_s, float) else None,
    )
    return rejection_error(rejected, accepted=False)
