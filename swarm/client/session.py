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

from swarm.client.contact import Contact
from swarm.client.events import (
    Actions,
    Answered,
    Ask,
    Connected,
    Consumed,
    Disconnected,
    Estranged,
    Event,
    Failed,
    Leave,
    NotUnderstood,
    Reached,
    Received,
    Reply,
    Revoke,
    Send,
    Start,
    StopFound,
    Tick,
    Unanswered,
    Unheard,
    Withdraw,
)
from swarm.client.ongoing import Continuation, Conversation, Ongoing
from swarm.client.questions import Questions
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
    Recalled,
    Rejected,
    Report,
    Snapshot,
    Tokens,
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
    _questions: Questions = field(default_factory=Questions)
    _contact: Contact = field(init=False)
    _talk: Conversation = field(init=False)
    _requests: dict[str, Ongoing] = field(init=False)  # the tracker's dictionary
    _ticked_at: float = 0.0  # time of the last tick, or when there began to be live work

    def __post_init__(self) -> None:
        self._contact = Contact(self.url, self.connect_timeout_s, self.reconnect_timeout_s)
        self._talk = Conversation(self._contact)
        self._requests = self._talk.requests

    @property
    def num_ignored(self) -> int:
        """Messages about no live request: late ones, repeated ones, other clients' ones."""
        return self._talk.num_ignored

    @property
    def idle(self) -> bool:
        """Whether nothing is live, so that the session needs no ticks."""
        return not self._requests and not self._questions

    @property
    def is_connected(self) -> bool:
        return self._contact.connected

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the live requests."""
        return tuple(self._requests)

    def handle(self, event: Event, now: float) -> Actions:
        actions: Actions = []
        match event:
            case Received():
                self._contact.heard(now)
                actions = self._received(event, now)
            case Consumed():
                actions = self._consumed(event, now)
            case Start():
                actions = self._start(event, now)
            case StopFound():
                actions = self._stop_found(event)
            case Revoke():
                actions = self._revoke(event, now)
            case Leave(request_id, cancel):
                actions = self._talk.leave(request_id, now, cancel=cancel)
            case Ask():
                actions = self._ask(event, now)
            case Withdraw(key):
                self._questions.withdraw(key, now)
                actions = self._ask_on()
            case NotUnderstood():
                self._contact.heard(now)
                actions = self._not_understood(event, now)
            case Tick():
                actions = self._tick(now)
            case _:
                actions = self._connection(event, now)
        return actions

    # --- the caller's wishes

    def _start(self, event: Start, now: float) -> Actions:
        submit = event.submit
        self._contact.refuse_strangers()
        news = self._supersede(submit.request_id, event.attached)
        self._wake(now)
        deadline = None if event.timeout_s is None else now + event.timeout_s
        continuations = [Continuation() for _ in range(submit.params.n)]
        request = Ongoing(submit, now, deadline, continuations, event.attached, accepted=event.attached)
        self._requests[submit.request_id] = request
        return news + (self._talk.tell_again(request, now) if self._contact.connected else [])

    def _supersede(self, request_id: str, attached: bool) -> Actions:
        """Take a request from its reader in this client for a later reader, as the broker does between clients."""
        former = self._requests.get(request_id)
        if former is None:
            return []
        if not attached:
            raise InvalidRequest(f"request_id {request_id!r} is in use by this client", code="request_id")
        if former.left:
            raise RequestCancelled("the request was cancelled")
        del self._requests[request_id]
        return [] if former.ended else [Failed(request_id, ReadElsewhere("another reader has taken over this answer"))]

    def _ask(self, event: Ask, now: float) -> Actions:
        self._contact.refuse_strangers()
        self._wake(now)
        self._questions.take(event, now)
        return self._ask_on()

    def _ask_on(self) -> Actions:
        return self._talk.say(self._questions.due())

    def _wake(self, now: float) -> None:
        """Start the clock if nothing was live, and measure silence from now if no answer was awaited."""
        if self.idle:
            self._ticked_at = now
        if not self._talk.live() and not self._questions:
            self._contact.wake(now)

    def _consumed(self, event: Consumed, now: float) -> Actions:
        request = self._requests.get(event.request_id)
        if request is None or request.left:
            return []
        continuation = request.continuations[event.index]
        continuation.consumed = max(continuation.consumed, event.next_index)
        actions = self._talk.say(request.ack(event.index)) if self._contact.connected else []
        if continuation.starved and continuation.consumed >= continuation.expected:
            actions += self._talk.attach(request, now)
        self._talk.forget_settled(request)
        return actions

    def _stop_found(self, event: StopFound) -> Actions:
        request = self._requests.get(event.request_id)
        if request is None or request.continuations[event.index].ended:
            return []
        request.continuations[event.index].stop_at = event.at_index
        return self._talk.say(request.stops())

    def _revoke(self, event: Revoke, now: float) -> Actions:
        """Cancel a request as if it had been read here: repeat ``Cancel`` until the broker confirms it or
        ``CONFIRM_CANCEL_S`` have passed. Never attach to it: its reader would get ReadElsewhere instead of the
        cancellation."""
        submit = event.submit
        self._contact.refuse_strangers()
        known = self._requests.get(submit.request_id)
        if known is not None and known.left:  # its cancellation is already in progress
            return []
        if known is not None:
            raise InvalidRequest(f"request_id {submit.request_id!r} is in use by this client", code="request_id")
        self._wake(now)
        continuations = [Continuation() for _ in range(submit.params.n)]
        request = Ongoing(submit, now, None, continuations, attached=True, sent=True, accepted=True, left_at=now)
        request.revoked = True
        self._requests[submit.request_id] = request
        return self._talk.say([request.cancel()])

    # --- the connection

    def _connection(self, event: Event, now: float) -> Actions:
        match event:
            case Reached():
                self._contact.reach()
            case Unheard():
                self._contact.hang_up()
            case Connected():
                return self._connected(now)
            case Estranged(reason):
                return self._estranged(reason, now)
            case Disconnected():
                self._contact.disconnect(now)
        return []

    def _connected(self, now: float) -> Actions:
        self._contact.connect(now)
        actions: Actions = []
        for request in self._requests.values():
            actions += self._talk.tell_again(request, now)
        return actions + self._talk.say(self._questions.connect()) + self._ask_on()

    def _estranged(self, reason: str, now: float) -> Actions:
        error = self._contact.estrange(reason)
        return self._talk.give_up(self._talk.live(), error, now) + self._questions.fail_all(error)

    # --- the broker's messages

    def _received(self, event: Received, now: float) -> Actions:
        message = event.message
        match message:
            case Tokens() | Finished() | Accepted() | Rejected():
                request = self._requests.get(message.request_id)
                if request is None:
                    self._talk.num_ignored += 1
                    return []
                return self._talk.about(request, message, now)
            case Description() | AssetPart() | Recalled() | Snapshot() | Report():
                return self._answer(message, event.payload)
            case Malformed(reason=reason):
                return self._misunderstood(reason)
            case _:
                self._talk.num_ignored += 1
                return []

    def _answer(self, message: Reply, payload: bytes) -> Actions:
        keys = self._questions.answered_by(message)
        if not keys:
            self._talk.num_ignored += 1  # the answer to a probe, or to a question that its caller has abandoned
        return [*(Answered(key, message, payload) for key in keys), *self._ask_on()]

    def _misunderstood(self, reason: str) -> Actions:
        """Fail whatever the broker could not decode. Its answer does not name the message: fail all unanswered requests
        and questions, or, if there are none, everything that is live."""
        error = InvalidRequest(
            f"the broker at {self.url} can't decode this client's messages: {reason}", code="malformed"
        )
        requests = [request for request in self._requests.values() if not request.accepted]
        if not requests and not self._questions:
            requests = list(self._requests.values())
        for request in requests:
            del self._requests[request.id]
        failed: Actions = [Failed(request.id, error) for request in requests if not request.left]
        return failed + self._questions.fail_all(error)

    def _not_understood(self, event: NotUnderstood, now: float) -> Actions:
        """Fail the recipient of an undecodable message, which would only come again: the request that it names, or else
        every open question."""
        self._talk.num_ignored += 1
        error = Unavailable(
            f"the broker at {self.url} and this client are incompatible ({event.reason}): "
            "install the same version on both"
        )
        if event.request_id:
            named = [request for request in self._talk.live() if request.id == event.request_id]
            return self._talk.give_up(named, error, now)
        return self._questions.fail_all(error)

    # --- time

    def _tick(self, now: float) -> Actions:
        pause_s, self._ticked_at = now - self._ticked_at, now
        if pause_s > PAUSE_S:
            self._forgive(pause_s - USUAL_GAP_S, now)
        actions = self._time_limits(now)
        if self._contact.connected:
            return actions + self._nudges(now) + self._silence(now)
        return actions + self._absence(now)

    def _forgive(self, pause_s: float, now: float) -> None:
        """Shift all limits by a pause of this process. A wait that began during the pause shifts to now at most."""
        self._contact.forgive(pause_s, now)
        self._questions.forgive(pause_s, now)
        for request in self._requests.values():
            request.forgive(pause_s, now)

    def _time_limits(self, now: float) -> Actions:
        actions: Actions = []
        for request in list(self._requests.values()):
            if request.left_at is not None and now >= request.left_at + CONFIRM_CANCEL_S:
                del self._requests[request.id]
            elif request.deadline is not None and now >= request.deadline and not request.ended:
                limit_s = round(request.deadline - request.started, 3)
                text = f"the request did not finish within its time limit of {limit_s:g} s"
                text += f": {request.held_up}" if request.held_up else ""
                actions += self._talk.give_up([request], RequestTimeout(text), now)
        for key, limit_s in self._questions.late(now):
            text = f"the broker at {self.url} did not answer within {limit_s:g} s"
            actions.append(Unanswered(key, RequestTimeout(text)))
        return actions + self._ask_on()

    def _nudges(self, now: float) -> Actions:
        """Send waiting requests again if their answers may have been lost. Skip a request whose caller has yet to take
        what came."""
        actions: Actions = []
        for request in () if self._contact.is_silent(now) else self._requests.values():
            if now >= request.nudge_at and request.is_waiting:
                actions += self._talk.tell_again(request, now)
        return actions

    def _silence(self, now: float) -> Actions:
        live = self._talk.live()
        if not live and not self._questions:
            return []
        actions: Actions = []
        if (error := self._contact.silent_too_long(now, is_answered=False)) is not None:
            actions += self._talk.give_up([r for r in live if not r.is_reader], error, now)
            actions += self._questions.fail_all(error)
        if (error := self._contact.silent_too_long(now, is_answered=True)) is not None:
            actions += self._talk.give_up([r for r in live if r.is_reader], error, now)
        return [*actions, Send(Describe())] if self._contact.probes(now) else actions

    def _absence(self, now: float) -> Actions:
        enough = self._contact.waited_enough
        requests = [r for r in self._talk.live() if enough(r.started, now, is_answered=r.is_reader)]
        keys = self._questions.keys_where(lambda started: enough(started, now, is_answered=False))
        if not requests and not keys:
            return []
        error = self._contact.absence
        return self._talk.give_up(requests, error, now) + self._questions.fail(keys, error)

    def invariants(self) -> Iterator[str]:
        """Yield a description of every violated invariant. For tests."""
        for request in self._requests.values():
            yield from request.invariants()
