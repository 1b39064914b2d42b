"""The requests of a session: their continuations, how far each has come, and what is said about them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm.client.contact import Contact
from swarm.client.events import Actions, Deliver, Ended, Failed, Send, Taken
from swarm.errors import (
    ClientError,
    DeadlinePassed,
    InvalidRequest,
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

NUDGE_S = 5.0  # a request that hears nothing for this long is told again: the broker drops answers rather than wait
ACK_EVERY = 32  # tokens; a small part of the broker's window, so that it never closes on a caller who keeps up
MAX_UNCONSUMED = 4096  # tokens of one continuation that may wait for their consumer


@dataclass(slots=True)
class Continuation:
    """Positions of one continuation: ``acked`` ≤ ``consumed`` ≤ ``expected``."""

    expected: int = 0  # the next token to deliver
    consumed: int = 0  # the caller has taken the tokens before it
    acked: int = 0
    starved: bool = False  # tokens were dropped; they must be asked for when the caller has caught up
    stop_at: int | None = None
    finished: Finished | None = None
    ended: bool = False  # the caller has been told
    end_acked: bool = False  # the broker has been told that the caller has it all

    @property
    def settled(self) -> bool:
        return self.ended and self.consumed >= self.expected

    @property
    def is_waiting(self) -> bool:
        """The caller has taken all that came, and is owed more."""
        return not self.ended and self.consumed >= self.expected

    @property
    def is_complete(self) -> bool:
        """The end has come, and all tokens before it."""
        return self.finished is not None and self.expected >= self.finished.num_tokens


@dataclass(slots=True)
class Ongoing:
    """A request between its start and its end."""

    submit: Submit
    started: float
    deadline: float | None
    continuations: list[Continuation]
    attached: bool = False  # another process may have made it; here it is only read
    sent: bool = False
    accepted: bool = False
    is_reader: bool = False  # the broker has answered us as its reader
    attaching: bool = False  # an Attach is on its way; what it will bring need not be asked for again
    nudge_at: float = 0.0  # when it is told again if nothing is heard of it
    held_up: str = ""  # why the broker can't let it be read at the moment
    revoked: bool = False  # to be cancelled, whoever reads it
    left_at: float | None = None  # since when only the broker's confirmation is awaited

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def outlives_caller(self) -> bool:
        """Does the request go on when its caller leaves?"""
        return self.submit.detached or self.attached or self.submit.keep_s > 0

    @property
    def left(self) -> bool:
        return self.left_at is not None

    @property
    def ended(self) -> bool:
        return all(c.ended for c in self.continuations)

    @property
    def settled(self) -> bool:
        return all(c.settled for c in self.continuations)

    @property
    def is_waiting(self) -> bool:
        return any(c.is_waiting for c in self.continuations)

    @property
    def is_starved(self) -> bool:
        return any(c.starved for c in self.continuations)

    def forgive(self, pause_s: float, now: float) -> None:
        """Move the limits by a pause of the client. When it is told again stays: something may have been lost."""
        lost_s = min(pause_s, now - self.started)
        self.started += lost_s
        if self.deadline is not None:
            self.deadline += lost_s
        if self.left_at is not None:
            self.left_at = min(now, self.left_at + pause_s)

    def take(self, message: Tokens) -> Deliver | None:
        """The new ones among tokens that begin at or before the next expected one, as far as there is room."""
        continuation = self.continuations[message.index]
        self.attaching = False
        start = continuation.expected
        room = MAX_UNCONSUMED - (start - continuation.consumed)
        first, last = start - message.start, start - message.start + room
        continuation.starved = continuation.starved or last < len(message.ids)
        taken = message.ids[first:last]
        if not taken:
            return None
        continuation.expected += len(taken)
        return Deliver(self.id, message.index, start, taken, message.logprobs[first:last], message.hops[first:last])

    def ack(self, index: int) -> list[Ack]:
        """Acknowledge every so many tokens, and all of an ended continuation, which can be forgotten then."""
        continuation = self.continuations[index]
        last = continuation.settled and not continuation.end_acked
        if not last and continuation.consumed - continuation.acked < ACK_EVERY:
            return []
        continuation.acked, continuation.end_acked = continuation.consumed, continuation.settled
        return [self.ack_up_to(index, continuation.consumed)]

    def last_acks(self) -> list[Ack]:
        """Acknowledge all of an ended request whose remaining tokens nobody will read."""
        return [self.ack_up_to(i, c.expected) for i, c in enumerate(self.continuations) if not c.end_acked]

    def ack_up_to(self, index: int, next_index: int) -> Ack:
        return Ack(request_id=self.id, index=index, next_index=next_index)

    def attach(self) -> Attach:
        """Ask for everything from the next expected tokens on."""
        self.attaching = True
        for continuation in self.continuations:
            continuation.starved = False
        next_index = tuple(c.expected for c in self.continuations)
        return Attach(request_id=self.id, next_index=next_index, again=self.is_reader)

    def cancel(self) -> Cancel:
        """Cancel it. If another client has come to read it meanwhile, it goes on for that one."""
        return Cancel(request_id=self.id, if_reader=not self.revoked)

    def stops(self) -> list[Stop]:
        return [
            Stop(request_id=self.id, index=index, at_index=continuation.stop_at)
            for index, continuation in enumerate(self.continuations)
            if continuation.stop_at is not None and not continuation.ended
        ]

    def invariants(self) -> Iterator[str]:
        """Name every rule that the state breaks."""
        for index, c in enumerate(self.continuations):
            where = f"{self.id}[{index}]"
            if not 0 <= c.acked <= c.consumed <= c.expected:
                yield f"{where}: acked {c.acked} ≤ consumed {c.consumed} ≤ expected {c.expected} does not hold"
            if c.expected - c.consumed > MAX_UNCONSUMED:
                yield f"{where}: {c.expected - c.consumed} tokens wait for their consumer"
        if not self.left and self.settled:
            yield f"{self.id}: settled, but kept"


@dataclass(slots=True)
class Conversation:
    """The requests of a session under way: what is said about them to the broker, and what the broker says of them."""

    contact: Contact
    requests: dict[str, Ongoing] = field(default_factory=dict)
    num_ignored: int = 0  # messages that concern nothing live: late ones, repeated ones, other clients' ones

    # --- to the broker

    def say(self, messages: Sequence[ClientMessage]) -> Actions:
        return [Send(message) for message in messages] if self.contact.connected else []

    def leave(self, request_id: str, now: float, *, cancel: bool = False) -> Actions:
        request = self.requests.get(request_id)
        if request is None or request.left:
            return []
        if not request.sent:
            del self.requests[request_id]
            return []
        if request.outlives_caller and not cancel:  # nothing is acknowledged that was not read
            del self.requests[request_id]
            return self.say([Detach(request_id=request_id)])
        if request.ended:  # nothing to cancel; what the caller didn't read it will never read
            del self.requests[request_id]
            return self.say(request.last_acks())
        request.left_at, request.deadline = now, None
        return self.say([request.cancel()])

    def tell_again(self, request: Ongoing, now: float) -> Actions:
        request.sent, request.nudge_at = True, now + NUDGE_S
        if request.left:
            return [Send(request.cancel())]
        if request.ended:
            return []  # the broker owes it nothing, and may have forgotten it
        if not request.accepted:
            return [Send(request.submit)]
        return self.attach(request, now) + self.say(request.stops())

    def attach(self, request: Ongoing, now: float) -> Actions:
        if not self.contact.connected:
            return []
        request.nudge_at = now + NUDGE_S
        return self.say([request.attach()])

    # --- from the broker

    def about(self, request: Ongoing, message: Tokens | Finished | Accepted | Rejected, now: float) -> Actions:
        if isinstance(message, Rejected):
            return self._rejected(request, message, now)
        news: Actions = [Taken(request.id)] if request.submit.detached and not request.accepted else []
        return news + self._took(request, message, now)

    def _took(self, request: Ongoing, message: Tokens | Finished | Accepted, now: float) -> Actions:
        """Note that the broker has the request: each of these messages says so."""
        request.accepted, request.is_reader, request.nudge_at = True, True, now + NUDGE_S
        request.held_up = ""
        if isinstance(message, Accepted):
            return []
        if message.index >= len(request.continuations):
            self.num_ignored += 1
            return []
        if isinstance(message, Tokens):
            return self._tokens(request, message, now)
        return self._finished(request, message, now)

    def _tokens(self, request: Ongoing, message: Tokens, now: float) -> Actions:
        continuation = request.continuations[message.index]
        stop = message.start + len(message.ids)
        if request.left:  # the broker says the end only behind all tokens
            return self.say([request.ack_up_to(message.index, stop)])
        if continuation.ended or stop <= continuation.expected:
            self.num_ignored += 1
            return []
        if message.start > continuation.expected:
            return self._gap(request, now)
        deliver = request.take(message)
        return [deliver, *self._end_if_complete(request, message.index)] if deliver is not None else []

    def _gap(self, request: Ongoing, now: float) -> Actions:
        self.num_ignored += 1
        if request.attaching or request.is_starved:
            return []  # asked already, or to be asked when the caller has caught up
        return self.attach(request, now)

    def _finished(self, request: Ongoing, message: Finished, now: float) -> Actions:
        if request.left:
            return self._confirmed(request, message)
        continuation = request.continuations[message.index]
        if continuation.ended:
            self.num_ignored += 1
            return []
        if message.reason in ("failed", "cancelled"):
            return [Failed(request.id, ended_badly(message)), *self._end_all(request, message, now)]
        continuation.finished = message
        if continuation.is_complete:
            return self._end_if_complete(request, message.index)
        if continuation.is_waiting and not request.attaching:  # tokens are missing
            return self.attach(request, now)
        continuation.starved = True
        return []

    def _end_all(self, request: Ongoing, message: Finished, now: float) -> Actions:
        """End a request of which one continuation ended badly: nobody wants the others."""
        acks = self._confirmed(request, message)
        if not request.ended:
            return acks + self.leave(request.id, now)
        return acks if request.outlives_caller else acks + self.say(request.last_acks())

    def _confirmed(self, request: Ongoing, message: Finished) -> Actions:
        continuation = request.continuations[message.index]
        continuation.ended = continuation.end_acked = True
        if request.ended:
            del self.requests[request.id]
        return self.say([request.ack_up_to(message.index, message.num_tokens)])

    def _end_if_complete(self, request: Ongoing, index: int) -> Actions:
        continuation = request.continuations[index]
        finished = continuation.finished
        if finished is None or continuation.ended or not continuation.is_complete:
            return []
        continuation.ended, continuation.starved = True, False
        actions: Actions = [Ended(request.id, index, finished)]
        if self.contact.connected:
            actions += self.say(request.ack(index))
        self.forget_settled(request)
        return actions

    def forget_settled(self, request: Ongoing) -> None:
        if request.settled:
            self.requests.pop(request.id, None)

    def _rejected(self, request: Ongoing, message: Rejected, now: float) -> Actions:
        if request.left:  # the broker knows nothing of it: as good as cancelled
            del self.requests[request.id]
            return []
        if request.ended:
            return []
        if request.accepted and message.retry_after_s is not None:  # it only can't be read again at the moment
            request.attaching, request.nudge_at = False, now + message.retry_after_s
            request.held_up = message.reason
            return []
        del self.requests[request.id]
        is_taken = message.code == "superseded" and request.submit.detached and not request.accepted
        news: Actions = [Taken(request.id)] if is_taken else []
        return [*news, Failed(request.id, refusal(message, request.accepted))]

    # --- who is owed something

    def live(self) -> list[Ongoing]:
        """List the requests that the broker still owes something."""
        return [request for request in self.requests.values() if not request.left and not request.ended]

    def give_up(self, requests: list[Ongoing], error: ClientError, now: float) -> Actions:
        """The caller gets the error; the broker gets a ``Cancel``, now or when it is there again."""
        actions: Actions = []
        for request in requests:
            actions += [Failed(request.id, error), *self.leave(request.id, now)]
        return actions


def ended_badly(message: Finished) -> ClientError:
    """Make the error of a request that failed or was cancelled."""
    if message.reason == "cancelled":
        return RequestCancelled(message.detail or "the request was cancelled")
    if message.detail in (TOO_LATE, TOO_SHORT):
        return DeadlinePassed(message.detail)
    return RequestFailed(message.detail or "the swarm could not finish the request")


def refusal(message: Rejected, accepted: bool) -> ClientError:
    """Make the error of a refused request. A code that is not known here is the request's fault."""
    match message.code:
        case "overloaded" | "journal":
            return Overloaded(message.reason, retry_after_s=message.retry_after_s or 1.0)
        case "unavailable":
            return Unavailable(message.reason)
        case "superseded":
            return ReadElsewhere(message.reason)
        case "unknown" if accepted:
            return RequestFailed(message.reason)  # it was taken, and then forgotten: not the caller's fault
        case _:
            return InvalidRequest(message.reason, code=message.code)


def refused(request_id: str, report: Report) -> ClientError:
    """Make the error of a refused question. A broker of before version 3 gives the reason alone."""
    code, after_s = report.body.get("code"), report.body.get("retry_after_s")
    rejected = Rejected(
        request_id=request_id,
        code=code if isinstance(code, str) else "unknown",
        reason=str(report.body.get("error")),
        retry_after_s=after_s if isinstance(after_s, float) else None,
    )
    return refusal(rejected, accepted=False)
