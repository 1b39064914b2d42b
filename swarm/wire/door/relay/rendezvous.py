"""Who meets whom at a relay: what an end asks for when it comes there, and the bounds of who waits and who is joined.

It decides, and touches no connection: ``relay`` does what is said here.

An end begins with one line of a fixed length, which no beginning of ZMTP can be taken for: on which side it is, and a
ticket. The first that waits on each side under the same ticket are joined, and each is told so by one byte. A ticket is
no secret that opens anything: what is said from then on is sealed between the ends.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from swarm.errors import WireError

JOINED: Final = b"+"
TICKET_DIGITS: Final = 32
WAIT_S: Final = 3.0  # of who sends, for who receives; it knocks again by itself
MOST_RECEIVERS: Final = 2  # that wait under one ticket; the older one may be a mapping that a router has forgotten
MOST_SENDERS: Final = 4
MOST_JOINED: Final = 8  # under one ticket: an epoch's connection beside the last one's, and rechecks
_HEAD: Final = b"SWRL1 "
PREAMBLE_BYTES: Final = len(_HEAD) + 1 + TICKET_DIGITS + 1
_PREAMBLE: Final = re.compile(_HEAD + rb"([TW])([0-9a-f]{%d})\n" % TICKET_DIGITS)
_TICKET: Final = re.compile(rf"[0-9a-f]{{{TICKET_DIGITS}}}")

C = TypeVar("C", bound=Hashable)


class Side(Enum):
    """Who knocks, by its letter."""

    SENDS = b"T"
    WAITS = b"W"


class Asked(NamedTuple):
    """What an end has asked for."""

    side: Side
    ticket: str


def preamble(side: Side, ticket: str) -> bytes:
    """The line with which an end begins."""
    return _HEAD + side.value + ticket.encode() + b"\n"


def read_preamble(said: bytes) -> Asked | None:
    """Read it; None: more must come. Raises WireError as soon as it can't be one any more."""
    if not said.startswith(_HEAD[: len(said)]) or len(said) > PREAMBLE_BYTES:
        raise WireError("who comes to a relay begins with a ticket")
    if len(said) < PREAMBLE_BYTES:
        return None
    if (found := _PREAMBLE.fullmatch(said)) is None:
        raise WireError("that is no ticket")
    return Asked(Side(found[1]), found[2].decode())


def is_ticket(text: str) -> bool:
    return _TICKET.fullmatch(text) is not None


@dataclass
class _Meeting(Generic[C]):
    """Who is there under one ticket; the oldest first."""

    receivers: dict[C, None] = field(default_factory=dict)
    senders: dict[C, float] = field(default_factory=dict)  # since when each waits
    joined: dict[C, C] = field(default_factory=dict)  # both ways

    def everybody(self) -> Iterator[C]:
        yield from self.receivers
        yield from self.senders
        yield from self.joined


class Rendezvous(Generic[C]):
    """See the module's text. Who is named in a list of those to hang up on is here no more."""

    def __init__(self) -> None:
        self._admitted: frozenset[str] = frozenset()
        self._meetings: dict[str, _Meeting[C]] = {}
        self._ticket: dict[C, str] = {}

    @property
    def num_joined(self) -> int:
        """Counts pairs."""
        return sum(len(meeting.joined) for meeting in self._meetings.values()) // 2

    @property
    def num_waiting(self) -> int:
        """Counts receivers."""
        return sum(len(meeting.receivers) for meeting in self._meetings.values())

    def admit(self, tickets: frozenset[str]) -> list[C]:
        """Under these, ends are joined from now on, and under no others. Whom to hang up on."""
        self._admitted = tickets
        cut: list[C] = []
        for ticket in [ticket for ticket in self._meetings if ticket not in tickets]:
            for end in self._meetings.pop(ticket).everybody():
                del self._ticket[end]
                cut.append(end)
        return cut

    def is_admitted(self, ticket: str) -> bool:
        return ticket in self._admitted

    def comes(self, end: C, asked: Asked, now: float) -> list[C]:
        """Have it wait from now on. Returns whom to hang up on, which may be itself."""
        if asked.ticket not in self._admitted:
            return [end]
        meeting = self._meetings.setdefault(asked.ticket, _Meeting())
        self._ticket[end] = asked.ticket
        if asked.side is Side.WAITS:
            meeting.receivers[end] = None
            return self._beyond(meeting.receivers, MOST_RECEIVERS)
        meeting.senders[end] = now
        return self._beyond(meeting.senders, MOST_SENDERS)

    def _beyond(self, waiting: dict[C, None] | dict[C, float], most: int) -> list[C]:
        gives_way = list(waiting)[: max(0, len(waiting) - most)]
        for end in gives_way:
            del waiting[end], self._ticket[end]
        return gives_way

    def joins(self, ticket: str) -> tuple[C, C] | None:
        """The next two that are joined from now on, the sender first: the one that has waited for longest, with the
        receiver that has come last."""
        meeting = self._meetings.get(ticket)
        if meeting is None or not (meeting.senders and meeting.receivers) or len(meeting.joined) >= 2 * MOST_JOINED:
            return None
        sender, receiver = next(iter(meeting.senders)), next(reversed(meeting.receivers))
        del meeting.senders[sender], meeting.receivers[receiver]
        meeting.joined[sender], meeting.joined[receiver] = receiver, sender
        return sender, receiver

    def ticket_of(self, end: C) -> str:
        """Under which it is here; empty: it is not."""
        return self._ticket.get(end, "")

    def leaves(self, end: C) -> C | None:
        """Forget it. Returns who was joined with it, and goes too."""
        ticket = self._ticket.pop(end, None)
        if ticket is None:
            return None
        meeting = self._meetings[ticket]
        meeting.receivers.pop(end, None)
        meeting.senders.pop(end, None)
        other = meeting.joined.pop(end, None)
        if other is not None:
            del meeting.joined[other], self._ticket[other]
        if not (meeting.receivers or meeting.senders or meeting.joined):
            del self._meetings[ticket]
        return other

    def overdue(self, now: float) -> list[C]:
        """Senders that have waited for long enough."""
        return [
            end for meeting in self._meetings.values() for end, since in meeting.senders.items() if now - since > WAIT_S
        ]
