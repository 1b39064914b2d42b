"""Who meets whom at a relay, and the line with which an end begins."""

from __future__ import annotations

import pytest

from swarm.errors import WireError
from swarm.wire.transport.relay.rendezvous import (
    MAX_JOINED,
    MAX_RECEIVERS,
    MAX_SENDERS,
    PREAMBLE_BYTES,
    WAIT_S,
    Preamble,
    Rendezvous,
    Side,
    decode_preamble,
    encode_preamble,
)

TICKET, ANOTHER = "ab" * 16, "cd" * 16
TO, FROM = Preamble(Side.SENDER, TICKET), Preamble(Side.RECEIVER, TICKET)


@pytest.fixture
def meets() -> Rendezvous[str]:
    made: Rendezvous[str] = Rendezvous()
    made.admit(frozenset([TICKET]))
    return made


@pytest.mark.parametrize("side", Side)
def test_a_line_is_read_when_it_is_whole(side: Side) -> None:
    said = encode_preamble(side, TICKET)
    assert len(said) == PREAMBLE_BYTES <= 64
    assert [decode_preamble(said[:length]) for length in range(PREAMBLE_BYTES)] == [None] * PREAMBLE_BYTES
    assert decode_preamble(said) == Preamble(side, TICKET)


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
        encode_preamble(Side.SENDER, TICKET) + b"\xff",
    ],
)
def test_anything_else_is_none(said: bytes) -> None:
    with pytest.raises(WireError):
        decode_preamble(said)


def test_nobody_is_joined_under_a_ticket_that_is_not_admitted(meets: Rendezvous[str]) -> None:
    for side in Side:
        assert meets.add(side.name, Preamble(side, ANOTHER), 0.0) == [side.name]
    assert meets.next_pair(ANOTHER) is None
    assert meets.num_waiting == 0


def test_the_longest_waiting_sender_meets_the_newest_receiver(meets: Rendezvous[str]) -> None:
    """An older one may be a connection that a router has forgotten."""
    for name, asked in (("r1", FROM), ("r2", FROM), ("s1", TO), ("s2", TO)):
        assert meets.add(name, asked, 0.0) == []
    assert meets.next_pair(TICKET) == ("s1", "r2")
    assert meets.next_pair(TICKET) == ("s2", "r1")
    assert meets.next_pair(TICKET) is None
    assert (meets.num_joined, meets.num_waiting) == (2, 0)


def test_tickets_are_kept_apart(meets: Rendezvous[str]) -> None:
    meets.admit(frozenset([TICKET, ANOTHER]))
    meets.add("s", TO, 0.0)
    meets.add("r", Preamble(Side.RECEIVER, ANOTHER), 0.0)
    assert meets.next_pair(TICKET) is None
    assert meets.next_pair(ANOTHER) is None


def test_who_is_admitted_no_more_is_hung_up_on(meets: Rendezvous[str]) -> None:
    meets.admit(frozenset([TICKET, ANOTHER]))
    for name, asked in (("r1", FROM), ("s1", TO), ("r2", FROM), ("other", Preamble(Side.RECEIVER, ANOTHER))):
        meets.add(name, asked, 0.0)
        meets.next_pair(TICKET)
    assert sorted(meets.admit(frozenset([ANOTHER]))) == ["r1", "r2", "s1"]
    assert (meets.num_joined, meets.num_waiting) == (0, 1)
    assert meets.remove("s1") is None


def test_of_those_that_wait_the_oldest_give_way(meets: Rendezvous[str]) -> None:
    for asked, most in ((FROM, MAX_RECEIVERS), (TO, MAX_SENDERS)):
        meets = Rendezvous()
        meets.admit(frozenset([TICKET]))
        cut = [each for number in range(2 * most) for each in meets.add(f"{number}", asked, 0.0)]
        assert cut == [f"{number}" for number in range(most)]


def test_so_many_are_joined_and_the_next_when_one_has_left(meets: Rendezvous[str]) -> None:
    for number in range(MAX_JOINED + 1):
        meets.add(f"r{number}", FROM, 0.0)
        meets.add(f"s{number}", TO, 0.0)
        assert (meets.next_pair(TICKET) is None) is (number == MAX_JOINED)
    assert meets.remove("r0") == "s0"
    assert meets.next_pair(TICKET) == (f"s{MAX_JOINED}", f"r{MAX_JOINED}")


def test_a_sender_waits_for_so_long_and_a_receiver_for_ever(meets: Rendezvous[str]) -> None:
    meets.add("s", TO, 10.0)
    assert meets.overdue(10.0 + WAIT_S) == []
    assert meets.overdue(10.1 + WAIT_S) == ["s"]
    assert meets.remove("s") is None
    meets.add("r", FROM, 10.0)
    assert meets.overdue(1e9) == []


def test_nothing_is_kept_of_who_has_left(meets: Rendezvous[str]) -> None:
    for name, asked in (("r", FROM), ("s", TO)):
        meets.add(name, asked, 0.0)
    meets.next_pair(TICKET)
    meets.remove("s")
    assert meets.remove("r") is None
    assert not meets._meetings
    assert not meets._ticket
