"""The knocking halves get in at the listening ones, and nowhere else; what one seals, the other one opens."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError, WireError
from swarm.wire.door.curve import Curve
from swarm.wire.door.keys import Lock, new_pair
from swarm.wire.door.knocking import Knocker, Locked, OpenDoor, TurnedAway, Word, knocks
from swarm.wire.door.mechanisms import PULL, Mechanism, Null, Plain, named
from swarm.wire.door.zmtp import HANDSHAKE_BYTES, Inlet, as_command, greeting, written

LIMIT = 1 << 20
DOOR = new_pair()
ME = new_pair()


def locked(*, opens: bool = True, says_no: bool = True) -> Curve:
    return Curve(PULL, Lock(DOOR, lambda key: opens and key == ME.public, says_no))


def met(knocker: Knocker, listener: Mechanism) -> Inlet:
    """Let the two talk until the handshake is through at both ends. Returns what the listening end reads with."""
    knocking, listening = Inlet(HANDSHAKE_BYTES, knocker), Inlet(LIMIT, listener)
    listening.feed(greeting(knocker.name, listens=False) + as_command(knocker.first))
    said = greeting(listener.name)
    for _ in range(4):
        try:
            listening.shake()
        finally:
            said, listening.answer = said + listening.answer, b""
            if said:
                knocking.feed(said)
                knocking.shake()
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
        (OpenDoor(), Null(PULL)),
        (Word(b"word"), Plain(PULL, b"word")),
        (Locked(DOOR.public, ME), locked()),
    ],
    ids=["NULL", "PLAIN", "CURVE"],
)
def test_who_may_speak_gets_in(knocker: Knocker, listener: Mechanism) -> None:
    inlet = met(knocker, listener)
    assert inlet.key == ("" if knocker.session is None else ME.public)
    frames = [b"header", bytes(100_000)]
    inlet.feed(b"".join(written(frames, knocker.session)))
    assert [bytes(frame) for frame in inlet.next() or []] == frames


def test_a_wrong_word_is_turned_away() -> None:
    with pytest.raises(TurnedAway):
        met(Word(b"wrong"), Plain(PULL, b"word"))


def test_a_key_that_opens_nothing_is_turned_away() -> None:
    with pytest.raises(TurnedAway):
        met(Locked(DOOR.public, ME), locked(opens=False))


def test_another_door_than_the_one_that_is_meant_hears_nothing() -> None:
    """Whoever took its place does not have its secret, and can't read even the first word."""
    with pytest.raises(WireError, match="be decrypted"):
        met(Locked(new_pair().public, ME), locked())


def test_who_has_no_key_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="requires a key, and this machine has none for it: join with --join"):
        knocks("tcp://192.0.2.1:5700", DOOR.public.encode(), None)
    with pytest.raises(ConfigError, match="is invalid"):
        knocks("tcp://192.0.2.1:5700", b"x" * 65, None)


@given(st.binary(max_size=300), st.booleans())
def test_whatever_the_other_end_says_is_an_answer_or_a_wire_error(said: bytes, is_named: bool) -> None:
    """Bytes of any kind, also under the names that the handshake has: nothing else is raised, and no session begins."""
    for knocker in (Word(b"word"), Locked(DOOR.public, ME)):
        for name in (b"WELCOME", b"READY", b"ERROR") if is_named else (b"",):
            with contextlib.suppress(WireError):
                knocker.take(named(name, said) if name else said)
        assert knocker.told is None
        assert knocker.session is None


@pytest.mark.parametrize("size", [0, 1, 4095, 70_000, 300_000])
def test_what_is_sealed_arrives_at_a_round_address(size: int) -> None:
    """Whole, and where numbers of any kind may be read in place, however much of it came at once."""
    knocker = Locked(DOOR.public, ME)
    inlet = met(knocker, locked())
    frame = np.random.default_rng(size).bytes(size)
    travels = b"".join(written([b"header", frame], knocker.session))
    for at in range(0, len(travels), 50_000):
        inlet.feed(travels[at : at + 50_000])
        message = inlet.next()
        inlet.keep()
    assert message is not None
    assert [bytes(each) for each in message] == [b"header", frame]
    if size:
        assert np.frombuffer(message[1], np.uint8).ctypes.data % 16 == 0


def test_what_is_sealed_leaves_the_frame_as_it_was() -> None:
    """It may be sent to somebody else, too."""
    knocker = Locked(DOOR.public, ME)
    met(knocker, locked())
    frame = bytearray(b"numbers" * 20_000)
    assert knocker.session is not None
    sealed = bytes(knocker.session.sealed(frame, more=False))
    assert frame == b"numbers" * 20_000
    assert b"numbers" not in sealed
