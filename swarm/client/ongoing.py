"""One request of a session: its continuations, how far each has come, and what is to be said about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.client.events import Deliver
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
from swarm.wire.messages import TOO_LATE, TOO_SHORT, Ack, Attach, Finished, Rejected, Stop, Submit, Tokens

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
    left_at: float | None = None  # since when only the broker's confirmation is awaited

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def outlives_caller(self) -> bool:
        """Does the request go on when its caller leaves?"""
        return self.submit.detached or self.attached

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
