"""Deciding core of the client library: the conversation of one client with one broker.

``handle(event, now)`` takes an event (a message, a connection, the passing of time, a call) and returns actions.
Nothing here waits, reads a clock or touches a socket.

The rules:

* **Requests outlive connections.** Nothing is sent while there is no connection. After every connect, each live request
  is sent again: ``Submit`` if its acceptance never arrived (the id makes it the same request), ``Attach`` otherwise,
  and ``Stop`` or ``Cancel`` where one had been decided.
* **Tokens are delivered in order.** Tokens before the next expected index are duplicates and are cut off. Tokens that
  start after it leave a gap: they are dropped, and requested with ``Attach``. So a token is delivered exactly once,
  however often it arrives. A request without messages for ``NUDGE_S`` is sent again, since an answer may have been
  lost.
* **Acknowledgements follow the consumer.** Only tokens that the caller has taken are acknowledged, so the broker's
  window closes on a slow caller. Tokens beyond ``MAX_UNCONSUMED`` are dropped and fetched again when the caller has
  caught up.
* **Every request ends once**: with all its continuations finished, or with one failure. A request that the caller has
  left is kept until the broker confirms its end, so that a lost ``Cancel`` is repeated; then it is forgotten. A request
  that is detached, or was made elsewhere, is not cancelled but detached from (``Detach``), and forgotten immediately.
* **Every wait ends.** Without a connection, or without a message from the broker (it is probed, see ``QUIET_S``), live
  work fails with :class:`Unavailable`: a request that the broker has answered after ``reconnect_timeout_s``, anything
  else after at most ``UNANSWERED_S``. A broker that paused continues with what it had, so nothing is sent again while
  it is silent.
* **Protocol errors fail with a reason.** An incompatible broker is recognised by its greeting, before anything else is
  sent to it. A message that cannot be decoded fails the request it concerns immediately.
* **Pauses of this process do not count as delay.** If this process was paused (stopped, a closed lid, a blocked loop),
  every limit is shifted by the pause. The connection delivers all received messages before it passes a tick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.client.active_requests import ActiveRequest, Continuation, RequestTracker
from swarm.client.connection_state import ConnectionState
from swarm.client.events import (
    AbandonQuestion,
    AskQuestion,
    CancelForeignRequest,
    Connected,
    Consumed,
    Disconnected,
    FailRequest,
    HandshakeFailed,
    IncompatibleBroker,
    LeaveRequest,
    Received,
    Reply,
    ReturnAnswer,
    ReturnError,
    Send,
    SessionActions,
    SessionEvent,
    SessionTick,
    StartRequest,
    StopFound,
    TcpConnected,
    UndecodableMessage,
)
from swarm.client.questions import PendingQuestions
from swarm.errors import (
    InvalidRequest,
    ReadElsewhere,
    RequestCancelled,
    RequestTimeout,
    Unavailable,
)
from swarm.wire.messages import (
    Accepted,
    AssetPart,
    Describe,
    Description,
    Finished,
    Malformed,
    Rejected,
    Report,
    RequestDetails,
    Tokens,
    TokensSnapshot,
)

PAUSE_S = 1.0  # the connection ticks ten times a second: a longer gap is a pause of this process
# Part of a pause that is not forgiven; otherwise the limits of a caller whose loop is always late would never pass.
USUAL_GAP_S = 0.5
CONFIRM_CANCEL_S = 30.0  # how long a left request is kept for a broker that does not confirm its end


@dataclass(slots=True)
class Session:
    """Requests and questions of one client on one connection. ``url`` is used only in error messages."""

    url: str
    connect_timeout_s: float = 5.0
    reconnect_timeout_s: float = 600.0
    _questions: PendingQuestions = field(default_factory=PendingQuestions)
    _connection_state: ConnectionState = field(init=False)
    _tracker: RequestTracker = field(init=False)
    _requests: dict[str, ActiveRequest] = field(init=False)  # the tracker's dictionary
    _last_tick_at: float = 0.0  # time of the last tick, or when there began to be live work

    def __post_init__(self) -> None:
        self._connection_state = ConnectionState(self.url, self.connect_timeout_s, self.reconnect_timeout_s)
        self._tracker = RequestTracker(self._connection_state)
        self._requests = self._tracker.requests

    @property
    def num_ignored(self) -> int:
        """Messages about no live request: late ones, repeated ones, other clients' ones."""
        return self._tracker.num_ignored

    @property
    def is_idle(self) -> bool:
        """Whether nothing is live, so that the session needs no ticks."""
        return not self._requests and not self._questions

    @property
    def is_connected(self) -> bool:
        return self._connection_state.is_connected

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the live requests."""
        return tuple(self._requests)

    def handle(self, event: SessionEvent, now: float) -> SessionActions:
        actions: SessionActions = []
        match event:
            case Received():
                self._connection_state.on_message(now)
                actions = self._on_received(event, now)
            case Consumed():
                actions = self._on_consumed(event, now)
            case StartRequest():
                actions = self._start_request(event, now)
            case StopFound():
                actions = self._on_stop_found(event)
            case CancelForeignRequest():
                actions = self._cancel_foreign(event, now)
            case LeaveRequest(request_id, cancel):
                actions = self._tracker.leave(request_id, now, cancel=cancel)
            case AskQuestion():
                actions = self._ask_question(event, now)
            case AbandonQuestion(key):
                self._questions.abandon(key, now)
                actions = self._send_due_questions()
            case UndecodableMessage():
                self._connection_state.on_message(now)
                actions = self._on_undecodable(event, now)
            case SessionTick():
                actions = self._on_tick(now)
            case _:
                actions = self._on_connection_event(event, now)
        return actions

    # --- the caller's wishes

    def _start_request(self, event: StartRequest, now: float) -> SessionActions:
        submit = event.submit
        self._connection_state.check_compatible()
        updates = self._supersede(submit.request_id, event.attached)
        self._start_clock(now)
        deadline = None if event.timeout_s is None else now + event.timeout_s
        continuations = [Continuation() for _ in range(submit.params.n)]
        request = ActiveRequest(submit, now, deadline, continuations, event.attached, is_accepted=event.attached)
        self._requests[submit.request_id] = request
        return updates + (self._tracker.resend(request, now) if self._connection_state.is_connected else [])

    def _supersede(self, request_id: str, attached: bool) -> SessionActions:
        """Take a request from its reader in this client for a later reader, as the broker does between clients."""
        former = self._requests.get(request_id)
        if former is None:
            return []
        if not attached:
            raise InvalidRequest(f"request_id {request_id!r} is in use by this client", code="request_id")
        if former.has_left:
            raise RequestCancelled("the request was cancelled")
        del self._requests[request_id]
        return (
            []
            if former.has_ended
            else [FailRequest(request_id, ReadElsewhere("another reader has taken over this answer"))]
        )

    def _ask_question(self, event: AskQuestion, now: float) -> SessionActions:
        self._connection_state.check_compatible()
        self._start_clock(now)
        self._questions.add(event, now)
        return self._send_due_questions()

    def _send_due_questions(self) -> SessionActions:
        return self._tracker.send(self._questions.take_due())

    def _start_clock(self, now: float) -> None:
        """Start the clock if nothing was live, and measure silence from now if no answer was awaited."""
        if self.is_idle:
            self._last_tick_at = now
        if not self._tracker.live_requests() and not self._questions:
            self._connection_state.start_waiting(now)

    def _on_consumed(self, event: Consumed, now: float) -> SessionActions:
        request = self._requests.get(event.request_id)
        if request is None or request.has_left:
            return []
        continuation = request.continuations[event.index]
        continuation.consumed = max(continuation.consumed, event.next_index)
        actions = self._tracker.send(request.take_due_acks(event.index)) if self._connection_state.is_connected else []
        if continuation.has_dropped and continuation.consumed >= continuation.expected:
            actions += self._tracker.attach(request, now)
        self._tracker.forget_settled(request)
        return actions

    def _on_stop_found(self, event: StopFound) -> SessionActions:
        request = self._requests.get(event.request_id)
        if request is None or request.continuations[event.index].has_ended:
            return []
        request.continuations[event.index].stop_at = event.at_index
        return self._tracker.send(request.make_stops())

    def _cancel_foreign(self, event: CancelForeignRequest, now: float) -> SessionActions:
        """Cancel a request as if it had been read here: repeat ``Cancel`` until the broker confirms it or
        ``CONFIRM_CANCEL_S`` have passed. Never attach to it: its reader would get ReadElsewhere instead of the
        cancellation."""
        submit = event.submit
        self._connection_state.check_compatible()
        existing = self._requests.get(submit.request_id)
        if existing is not None and existing.has_left:  # its cancellation is already in progress
            return []
        if existing is not None:
            raise InvalidRequest(f"request_id {submit.request_id!r} is in use by this client", code="request_id")
        self._start_clock(now)
        continuations = [Continuation() for _ in range(submit.params.n)]
        request = ActiveRequest(
            submit, now, None, continuations, is_attached=True, is_sent=True, is_accepted=True, left_at=now
        )
        request.is_foreign_cancel = True
        self._requests[submit.request_id] = request
        return self._tracker.send([request.make_cancel()])

    # --- the connection

    def _on_connection_event(self, event: SessionEvent, now: float) -> SessionActions:
        match event:
            case TcpConnected():
                self._connection_state.on_tcp_connected()
            case HandshakeFailed():
                self._connection_state.on_handshake_failed()
            case Connected():
                return self._on_connected(now)
            case IncompatibleBroker(reason):
                return self._on_incompatible(reason, now)
            case Disconnected():
                self._connection_state.on_disconnected(now)
        return []

    def _on_connected(self, now: float) -> SessionActions:
        self._connection_state.on_connected(now)
        actions: SessionActions = []
        for request in self._requests.values():
            actions += self._tracker.resend(request, now)
        return actions + self._tracker.send(self._questions.on_connected()) + self._send_due_questions()

    def _on_incompatible(self, reason: str, now: float) -> SessionActions:
        error = self._connection_state.mark_incompatible(reason)
        return self._tracker.fail(self._tracker.live_requests(), error, now) + self._questions.fail_all(error)

    # --- the broker's messages

    def _on_received(self, event: Received, now: float) -> SessionActions:
        message = event.message
        match message:
            case Tokens() | Finished() | Accepted() | Rejected():
                request = self._requests.get(message.request_id)
                if request is None:
                    self._tracker.num_ignored += 1
                    return []
                return self._tracker.handle_message(request, message, now)
            case Description() | AssetPart() | RequestDetails() | TokensSnapshot() | Report():
                return self._on_answer(message, event.payload)
            case Malformed(reason=reason):
                return self._on_malformed(reason)
            case _:
                self._tracker.num_ignored += 1
                return []

    def _on_answer(self, message: Reply, payload: bytes) -> SessionActions:
        keys = self._questions.pop_answered(message)
        if not keys:
            self._tracker.num_ignored += 1  # the answer to a probe, or to a question that its caller has abandoned
        return [*(ReturnAnswer(key, message, payload) for key in keys), *self._send_due_questions()]

    def _on_malformed(self, reason: str) -> SessionActions:
        """Fail whatever the broker could not decode. Its answer does not name the message: fail all unanswered requests
        and questions, or, if there are none, everything that is live."""
        error = InvalidRequest(
            f"the broker at {self.url} can't decode this client's messages: {reason}", code="malformed"
        )
        requests = [request for request in self._requests.values() if not request.is_accepted]
        if not requests and not self._questions:
            requests = list(self._requests.values())
        for request in requests:
            del self._requests[request.id]
        failed: SessionActions = [FailRequest(request.id, error) for request in requests if not request.has_left]
        return failed + self._questions.fail_all(error)

    def _on_undecodable(self, event: UndecodableMessage, now: float) -> SessionActions:
        """Fail the recipient of an undecodable message, since the broker would only send the same message again. The
        recipient is the request that it names, or else every open question."""
        self._tracker.num_ignored += 1
        error = Unavailable(
            f"the broker at {self.url} and this client are incompatible ({event.reason}): "
            "install the same version on both"
        )
        if event.request_id:
            named = [request for request in self._tracker.live_requests() if request.id == event.request_id]
            return self._tracker.fail(named, error, now)
        return self._questions.fail_all(error)

    # --- time

    def _on_tick(self, now: float) -> SessionActions:
        pause_s, self._last_tick_at = now - self._last_tick_at, now
        if pause_s > PAUSE_S:
            self._shift_deadlines(pause_s - USUAL_GAP_S, now)
        actions = self._enforce_time_limits(now)
        if self._connection_state.is_connected:
            return actions + self._resend_waiting(now) + self._check_silence(now)
        return actions + self._check_absence(now)

    def _shift_deadlines(self, pause_s: float, now: float) -> None:
        """Postpone all deadlines by a pause of this process. The start of a wait moves at most to the present."""
        self._connection_state.shift_deadlines(pause_s, now)
        self._questions.shift_deadlines(pause_s, now)
        for request in self._requests.values():
            request.shift_deadlines(pause_s, now)

    def _enforce_time_limits(self, now: float) -> SessionActions:
        actions: SessionActions = []
        for request in list(self._requests.values()):
            if request.left_at is not None and now >= request.left_at + CONFIRM_CANCEL_S:
                del self._requests[request.id]
            elif request.deadline is not None and now >= request.deadline and not request.has_ended:
                limit_s = round(request.deadline - request.started, 3)
                text = f"the request did not finish within its time limit of {limit_s:g} s"
                text += f": {request.unreadable_reason}" if request.unreadable_reason else ""
                actions += self._tracker.fail([request], RequestTimeout(text), now)
        for key, limit_s in self._questions.expire(now):
            text = f"the broker at {self.url} did not answer within {limit_s:g} s"
            actions.append(ReturnError(key, RequestTimeout(text)))
        return actions + self._send_due_questions()

    def _resend_waiting(self, now: float) -> SessionActions:
        """Send waiting requests again if their answers may have been lost. Skip requests whose caller has not taken all
        delivered tokens."""
        actions: SessionActions = []
        for request in () if self._connection_state.is_silent(now) else self._requests.values():
            if now >= request.nudge_at and request.is_waiting:
                actions += self._tracker.resend(request, now)
        return actions

    def _check_silence(self, now: float) -> SessionActions:
        live = self._tracker.live_requests()
        if not live and not self._questions:
            return []
        actions: SessionActions = []
        if (error := self._connection_state.silence_error(now, is_answered=False)) is not None:
            actions += self._tracker.fail([r for r in live if not r.is_reader], error, now)
            actions += self._questions.fail_all(error)
        if (error := self._connection_state.silence_error(now, is_answered=True)) is not None:
            actions += self._tracker.fail([r for r in live if r.is_reader], error, now)
        return [*actions, Send(Describe())] if self._connection_state.probe_if_due(now) else actions

    def _check_absence(self, now: float) -> SessionActions:
        enough = self._connection_state.has_waited_enough
        requests = [r for r in self._tracker.live_requests() if enough(r.started, now, is_answered=r.is_reader)]
        keys = self._questions.keys_where(lambda started: enough(started, now, is_answered=False))
        if not requests and not keys:
            return []
        error = self._connection_state.absence_error
        return self._tracker.fail(requests, error, now) + self._questions.fail(keys, error)

    def invariants(self) -> Iterator[str]:
        """Yield a description of every violated invariant. For tests."""
        for request in self._requests.values():
            yield from request.invariants()
