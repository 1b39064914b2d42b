"""Invitations: one line that says all, and whatever else is there instead is one clear error."""

from __future__ import annotations

import base64
import hashlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.auth.invitation import PREFIX, Invitation, decode, encode, is_address
from swarm.errors import ConfigError
from swarm.wire.transport.keys import new_pair, public_of

HEX = "0123456789abcdef"
A = Invitation(("tcp://192.0.2.1:5700", "tcp://[2001:db8::1]:5700"), "ab" * 32, "cd" * 32, "worker")
LINE = encode(A)

invitations = st.builds(
    Invitation,
    st.lists(st.sampled_from(["tcp://h:1", "tcp://swarm.example:65535", *A.addresses]), min_size=1, max_size=16).map(
        tuple
    ),
    st.text(HEX, min_size=64, max_size=64),
    st.text(HEX, min_size=64, max_size=64),
    st.sampled_from(["client", "gateway", "worker", "admin"]),
)


def refused(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(line)
    return str(caught.value)


@given(invitations)
def test_what_is_written_is_read(invitation: Invitation) -> None:
    """In one line, also with blanks around it, as they are copied."""
    line = encode(invitation)
    assert "\n" not in line
    assert decode(f" {line}\n") == invitation


@given(st.integers(0, len(LINE) - 1))
def test_whatever_is_cut_off_is_noticed(length: int) -> None:
    """And the error says what to do."""
    assert "swarmctl invite" in refused(LINE[:length])


@given(st.integers(0, len(LINE) - 1), st.characters())
@example(len(LINE) - 1, "=")
@example(len(PREFIX) - 2, "2")
def test_a_changed_character_is_noticed(at: int, character: str) -> None:
    changed = LINE[:at] + character + LINE[at + 1 :]
    if changed.strip() != LINE:
        assert "swarmctl invite" in refused(changed)


@given(st.text() | st.text().map(PREFIX.__add__) | st.binary().map(lambda b: PREFIX + base64.b64encode(b).decode()))
@example(PREFIX)
@example(PREFIX + "A" * 1_000_000)
def test_foreign_text_is_one_error(line: str) -> None:
    assert "swarmctl invite" in refused(line)


def summed(content: object) -> str:
    packed = msgspec.msgpack.encode(content)
    checksum = hashlib.blake2b(PREFIX.encode() + packed, digest_size=4).digest()
    return PREFIX + base64.urlsafe_b64encode(packed + checksum).decode().rstrip("=")


@given(st.recursive(st.none() | st.integers(-9, 9) | st.text() | st.binary(), st.lists, max_leaves=8))
def test_what_is_whole_and_says_something_else_is_of_another_build(content: object) -> None:
    """Its checksum is right, so nobody has damaged it."""
    assert "another build" in refused(summed(content))


@pytest.mark.parametrize(
    "address",
    ["", "h:1", "tcp://h", "tcp://h:0", "tcp://h:65536", "tcp://a b:1", "tcp://k@h:1", "ipc://x", "tcp://h:1\n"],
)
def test_an_address_must_be_one(address: str) -> None:
    """Neither written nor read."""
    assert not is_address(address)
    with pytest.raises(ConfigError, match="no address"):
        encode(A._replace(addresses=(address,)))
    assert "no address" in refused(summed([[address], b"a" * 32, b"b" * 32, "worker"]))


def test_an_invitation_names_some_addresses_and_not_too_many() -> None:
    for addresses in ((), A.addresses * 9):
        with pytest.raises(ConfigError, match="1 to 16 addresses"):
            encode(A._replace(addresses=addresses))


def test_a_drawn_pair_belongs_together() -> None:
    """And no two are the same."""
    one, two = new_pair(), new_pair()
    assert one != two
    assert public_of(one.secret) == one.public
    assert len(bytes.fromhex(one.public)) == len(bytes.fromhex(one.secret)) == 32
