"""The knocking halves get in at the listening ones, and nowhere else; what one seals, the other one opens."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError, WireError
from swarm.wire.transport.client_handshake import (
    AuthRejected,
    ClientMechanism,
    CurveClient,
    NullClient,
    PlainClient,
    client_mechanism,
)
from swarm.wire.transport.curve import CurveServer
from swarm.wire.transport.keys import AuthPolicy, new_pair
from swarm.wire.transport.server_handshake import PULL, Mechanism, NullServer, PlainServer, encode_command
from swarm.wire.transport.zmtp import HANDSHAKE_BYTES, ZmtpDecoder, command_frame, encode_greeting, encode_message

LIMIT = 1 << 20
DOOR = new_pair()
ME = new_pair()


def locked(*, opens: bool = True, says_no: bool = True) -> CurveServer:
    return CurveServer(PULL, AuthPolicy(DOOR, lambda key: opens and key == ME.public, says_no))


def met(knocker: ClientMechanism, listener: Mechanism) -> ZmtpDecoder:
    """Let the two talk until the handshake is through at both ends. Returns what the listening end reads with."""
    knocking, listening = ZmtpDecoder(HANDSHAKE_BYTES, knocker), ZmtpDecoder(LIMIT, listener)
    listening.feed(encode_greeting(knocker.name, is_server=False) + command_frame(knocker.first))
    said = encode_greeting(listener.name)
    for _ in range(4):
        try:
            listening.advance_handshake()
        finally:
            said, listening.answer = said + listening.answer, b""
            if said:
                knocking.feed(said)
                knocking.advance_handshake()
                said = b""
        if knocking.answer:
            listening.feed(knocking.answer)
            knocking.answer = b""
    assert knocking.identity is not None
    assert listening.identity is not None
    return listening


@pytest.mark.parametrize(
    ("knocker", "listener"),
    [
        (NullClient(), NullServer(PULL)),
        (PlainClient(b"word"), PlainServer(PULL, b"word")),
        (CurveClient(DOOR.public, ME), locked()),
    ],
    ids=["NULL", "PLAIN", "CURVE"],
)
def test_who_may_speak_gets_in(knocker: ClientMechanism, listener: Mechanism) -> None:
    inlet = met(knocker, listener)
    assert inlet.key == ("" if knocker.session is None else ME.public)
    frames = [b"header", bytes(100_000)]
    inlet.feed(b"".join(encode_message(frames, knocker.session)))
    assert [bytes(frame) for frame in inlet.next() or []] == frames


def test_a_wrong_word_is_turned_away() -> None:
    with pytest.raises(AuthRejected):
        met(PlainClient(b"wrong"), PlainServer(PULL, b"word"))


def test_a_key_that_opens_nothing_is_turned_away() -> None:
    with pytest.raises(AuthRejected):
        met(CurveClient(DOOR.public, ME), locked(opens=False))


def test_another_door_than_the_one_that_is_meant_hears_nothing() -> None:
    """Whoever took its place does not have its secret, and can't read even the first word."""
    with pytest.raises(WireError, match="be decrypted"):
        met(CurveClient(new_pair().public, ME), locked())


def test_who_has_no_key_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="requires a key, and this machine has none for it: join with --join"):
        client_mechanism("tcp://192.0.2.1:5700", DOOR.public.encode(), None)
    with pytest.raises(ConfigError, match="is invalid"):
        client_mechanism("tcp://192.0.2.1:5700", b"x" * 65, None)


@given(st.binary(max_size=300), st.booleans())
def test_whatever_the_other_end_says_is_an_answer_or_a_wire_error(said: bytes, is_named: bool) -> None:
    """Bytes of any kind, also under the names that the handshake has: nothing else is raised, and no session begins."""
    for knocker in (PlainClient(b"word"), CurveClient(DOOR.public, ME)):
        for name in (b"WELCOME", b"READY", b"ERROR") if is_named else (b"",):
            with contextlib.suppress(WireError):
                knocker.handle(encode_command(name, said) if name else said)
        assert knocker.metadata is None
        assert knocker.session is None


@pytest.mark.parametrize("size", [0, 1, 4095, 70_000, 300_000])
def test_what_is_sealed_arrives_at_a_round_address(size: int) -> None:
    """Whole, and where numbers of any kind may be read in place, however much of it came at once."""
    knocker = CurveClient(DOOR.public, ME)
    inlet = met(knocker, locked())
    frame = np.random.default_rng(size).bytes(size)
    travels = b"".join(encode_message([b"header", frame], knocker.session))
    for at in range(0, len(travels), 50_000):
        inlet.feed(travels[at : at + 50_000])
        message = inlet.next()
        inlet.copy_unread()
    assert message is not None
    assert [bytes(each) for each in message] == [b"header", frame]
    if size:
        assert np.frombuffer(message[1], np.uint8).ctypes.data % 16 == 0


def test_what_is_sealed_leaves_the_frame_as_it_was() -> None:
    """It may be sent to somebody else, too."""
    knocker = CurveClient(DOOR.public, ME)
    met(knocker, locked())
    frame = bytearray(b"numbers" * 20_000)
    assert knocker.session is not None
    sealed = bytes(knocker.session.encrypt(frame, more=False))
    assert frame == b"numbers" * 20_000
    assert b"numbers" not in sealed
