"""Rendezvous at a relay: decides which connections are joined, and limits how many wait and are joined.

It only decides and touches no connection: ``relay`` carries out the results.

A connection begins with a preamble of fixed length, which can't be mistaken for a ZMTP greeting: its side and a ticket.
The first waiting sender and receiver with the same ticket are joined, and both are notified by one byte. A ticket is
not a secret that grants access: everything after it is encrypted between the two ends.
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
WAIT_S: Final = 3.0  # How long a sender waits for a receiver; it reconnects by itself.
MAX_RECEIVERS: Final = 2  # Waiting under one ticket; the older one may be a mapping that a NAT router has forgotten.
MAX_SENDERS: Final = 4
MAX_JOINED: Final = 8  # Under one ticket: connections of the current and the previous epoch, and rechecks.
_HEAD: Final = b"SWRL1 "
PREAMBLE_BYTES: Final = len(_HEAD) + 1 + TICKET_DIGITS + 1
_PREAMBLE: Final = re.compile(_HEAD + rb"([TW])([0-9a-f]{%d})\n" % TICKET_DIGITS)
_TICKET: Final = re.compile(rf"[0-9a-f]{{{TICKET_DIGITS}}}")

C = TypeVar("C", bound=Hashable)


class Side(Enum):
    """Role of a connection, by its letter in the preamble."""

    SENDER = b"T"
    RECEIVER = b"W"


class Preamble(NamedTuple):
    """Decoded preamble."""

    side: Side
    ticket: str


def encode_preamble(side: Side, ticket: str) -> bytes:
    """Encode the preamble of a connection."""
    return _HEAD + side.value + ticket.encode() + b"\n"


def decode_preamble(data: bytes) -> Preamble | None:
    """Decode a preamble; None if it is incomplete. Raises WireError at the first byte that makes it invalid."""
    if not data.startswith(_HEAD[: len(data)]) or len(data) > PREAMBLE_BYTES:
        raise WireError("a connection to a relay must begin with a ticket")
    if len(data) < PREAMBLE_BYTES:
        return None
    if (match := _PREAMBLE.fullmatch(data)) is None:
        raise WireError("the ticket is invalid")
    return Preamble(Side(match[1]), match[2].decode())


def is_ticket(text: str) -> bool:
    return _TICKET.fullmatch(text) is not None


@dataclass
class _Meeting(Generic[C]):
    """Connections with one ticket; the oldest first."""

    receivers: dict[C, None] = field(default_factory=dict)
    senders: dict[C, float] = field(default_factory=dict)  # Arrival time of each.
    joined: dict[C, C] = field(default_factory=dict)  # In both directions.

    def connections(self) -> Iterator[C]:
        yield from self.receivers
        yield from self.senders
        yield from self.joined


class Rendezvous(Generic[C]):
    """Matching of senders and receivers by ticket. Methods that return connections to close have removed them
    already."""

    def __init__(self) -> None:
        self._admitted: frozenset[str] = frozenset()
        self._meetings: dict[str, _Meeting[C]] = {}
        self._ticket: dict[C, str] = {}

    @property
    def num_joined(self) -> int:
        """Return the number of joined pairs."""
        return sum(len(meeting.joined) for meeting in self._meetings.values()) // 2

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting receivers."""
        return sum(len(meeting.receivers) for meeting in self._meetings.values())

    def admit(self, tickets: frozenset[str]) -> list[C]:
        """Allow these tickets and no others from now on. Return the connections to close."""
        self._admitted = tickets
        cut: list[C] = []
        for ticket in [ticket for ticket in self._meetings if ticket not in tickets]:
            for end in self._meetings.pop(ticket).connections():
                del self._ticket[end]
                cut.append(end)
        return cut

    def is_admitted(self, ticket: str) -> bool:
        return ticket in self._admitted

    def add(self, end: C, preamble: Preamble, now: float) -> list[C]:
        """Add a connection that waits to be joined. Return the connections to close, possibly this one."""
        if preamble.ticket not in self._admitted:
            return [end]
        meeting = self._meetings.setdefault(preamble.ticket, _Meeting())
        self._ticket[end] = preamble.ticket
        if preamble.side is Side.RECEIVER:
            meeting.receivers[end] = None
            return self._drop_oldest(meeting.receivers, MAX_RECEIVERS)
        meeting.senders[end] = now
        return self._drop_oldest(meeting.senders, MAX_SENDERS)

    def _drop_oldest(self, waiting: dict[C, None] | dict[C, float], most: int) -> list[C]:
        gives_way = list(waiting)[: max(0, len(waiting) - most)]
        for end in gives_way:
            del waiting[end], self._ticket[end]
        return gives_way

    def next_pair(self, ticket: str) -> tuple[C, C] | None:
        """Return the next pair to join, sender first: the sender that has waited longest, and the receiver that arrived
        last."""
        meeting = self._meetings.get(ticket)
        if meeting is None or not (meeting.senders and meeting.receivers) or len(meeting.joined) >= 2 * MAX_JOINED:
            return None
        sender, receiver = next(iter(meeting.senders)), next(reversed(meeting.receivers))
        del meeting.senders[sender], meeting.receivers[receiver]
        meeting.joined[sender], meeting.joined[receiver] = receiver, sender
        return sender, receiver

    def ticket_of(self, end: C) -> str:
        """Return the ticket of a connection; empty if it is not registered."""
        return self._ticket.get(end, "")

    def remove(self, end: C) -> C | None:
        """Remove a connection. Return the one joined with it, which must be closed, too."""
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
        """Return senders that have waited too long."""
        return [
            end for meeting in self._meetings.values() for end, since in meeting.senders.items() if now - since > WAIT_S
        ]
