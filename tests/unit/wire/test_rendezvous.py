"""Who meets whom at a relay, and the line with which an end begins."""

from __future__ import annotations

import pytest

from swarm.errors import WireError
from swarm.wire.door.relay.rendezvous import (
    MOST_JOINED,
    MOST_RECEIVERS,
    MOST_SENDERS,
    PREAMBLE_BYTES,
    WAIT_S,
    Asked,
    Rendezvous,
    Side,
    preamble,
    read_preamble,
)

TICKET, ANOTHER = "ab" * 16, "cd" * 16
TO, FROM = Asked(Side.SENDS, TICKET), Asked(Side.WAITS, TICKET)


@pytest.fixture
def meets() -> Rendezvous[str]:
    made: Rendezvous[str] = Rendezvous()
    made.admit(frozenset([TICKET]))
    return made


@pytest.mark.parametrize("side", Side)
def test_a_line_is_read_when_it_is_whole(side: Side) -> None:
    said = preamble(side, TICKET)
    assert len(said) == PREAMBLE_BYTES <= 64
    assert [read_preamble(said[:length]) for length in range(PREAMBLE_BYTES)] == [None] * PREAMBLE_BYTES
    assert read_preamble(said) == Asked(side, TICKET)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" + bytes(9),
        b"GET",
        b"SWRL2",
        b"SWRL1 X" + TICKET.encode() + b"\n",
        b"SWRL1 T" + TICKET.upper().encode() + b"\n",
        b"SWRL1 T" + TICKET.encode() + b"\r",
        b"SWRL1 T" + b"\n" * 33,
        preamble(Side.SENDS, TICKET) + b"\xff",
    ],
)
def test_anything_else_is_none(said: bytes) -> None:
    with pytest.raises(WireError):
        read_preamble(said)


def test_nobody_is_joined_under_a_ticket_that_is_not_admitted(meets: Rendezvous[str]) -> None:
    for side in Side:
        assert meets.comes(side.name, Asked(side, ANOTHER), 0.0) == [side.name]
    assert meets.joins(ANOTHER) is None
    assert meets.num_waiting == 0


def test_the_longest_waiting_sender_meets_the_newest_receiver(meets: Rendezvous[str]) -> None:
    """An older one may be a connection that a router has forgotten."""
    for name, asked in (("r1", FROM), ("r2", FROM), ("s1", TO), ("s2", TO)):
        assert meets.comes(name, asked, 0.0) == []
    assert meets.joins(TICKET) == ("s1", "r2")
    assert meets.joins(TICKET) == ("s2", "r1")
    assert meets.joins(TICKET) is None
    assert (meets.num_joined, meets.num_waiting) == (2, 0)


def test_tickets_are_kept_apart(meets: Rendezvous[str]) -> None:
    meets.admit(frozenset([TICKET, ANOTHER]))
    meets.comes("s", TO, 0.0)
    meets.comes("r", Asked(Side.WAITS, ANOTHER), 0.0)
    assert meets.joins(TICKET) is None
    assert meets.joins(ANOTHER) is None


def test_who_is_admitted_no_more_is_hung_up_on(meets: Rendezvous[str]) -> None:
    meets.admit(frozenset([TICKET, ANOTHER]))
    for name, asked in (("r1", FROM), ("s1", TO), ("r2", FROM), ("other", Asked(Side.WAITS, ANOTHER))):
        meets.comes(name, asked, 0.0)
        meets.joins(TICKET)
    assert sorted(meets.admit(frozenset([ANOTHER]))) == ["r1", "r2", "s1"]
    assert (meets.num_joined, meets.num_waiting) == (0, 1)
    assert meets.leaves("s1") is None


def test_of_those_that_wait_the_oldest_give_way(meets: Rendezvous[str]) -> None:
    for asked, most in ((FROM, MOST_RECEIVERS), (TO, MOST_SENDERS)):
        meets = Rendezvous()
        meets.admit(frozenset([TICKET]))
        cut = [each for number in range(2 * most) for each in meets.comes(f"{number}", asked, 0.0)]
        assert cut == [f"{number}" for number in range(most)]


def test_so_many_are_joined_and_the_next_when_one_has_left(meets: Rendezvous[str]) -> None:
    for number in range(MOST_JOINED + 1):
        meets.comes(f"r{number}", FROM, 0.0)
        meets.comes(f"s{number}", TO, 0.0)
        assert (meets.joins(TICKET) is None) is (number == MOST_JOINED)
    assert meets.leaves("r0") == "s0"
    assert meets.joins(TICKET) == (f"s{MOST_JOINED}", f"r{MOST_JOINED}")


def test_a_sender_waits_for_so_long_and_a_receiver_for_ever(meets: Rendezvous[str]) -> None:
    meets.comes("s", TO, 10.0)
    assert meets.overdue(10.0 + WAIT_S) == []
    assert meets.overdue(10.1 + WAIT_S) == ["s"]
    assert meets.leaves("s") is None
    meets.comes("r", FROM, 10.0)
    assert meets.overdue(1e9) == []


def test_nothing_is_kept_of_who_has_left(meets: Rendezvous[str]) -> None:
    for name, asked in (("r", FROM), ("s", TO)):
        meets.comes(name, asked, 0.0)
    meets.joins(TICKET)
    meets.leaves("s")
    assert meets.leaves("r") is None
    assert not meets._meetings
    assert not meets._ticket
