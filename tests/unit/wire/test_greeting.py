"""Greetings: read by every build, whatever else has changed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import __version__
from swarm.wire.codec import CLIENT
from swarm.wire.greeting import Greeting, greeting, read_greeting, why_strangers
from swarm.wire.messages import Ack
from swarm.wire.schema import client_schema, schema


def test_two_of_one_build_understand_each_other() -> None:
    """What one says, the other reads, and finds nothing strange."""
    theirs = read_greeting(greeting("abcd"))
    assert theirs == Greeting(schema="abcd")
    assert theirs.build == __version__
    assert why_strangers(theirs, "abcd") is None


@pytest.mark.parametrize(
    "later",
    [
        {"v": 7, "versions": [6, 7], "schema": "ef", "build": "9.9"},
        {"v": 1, "versions": [1], "schema": "ef", "build": "9.9", "keys": {"any": [1, 2]}},
    ],
)
def test_a_later_build_is_read_and_named(later: dict[str, object]) -> None:
    """Whatever its version and whatever fields it has beside ours."""
    theirs = read_greeting([msgspec.msgpack.encode({"kind": "greet"} | later)])
    assert theirs is not None
    reason = why_strangers(theirs, "abcd")
    assert reason is not None
    versions = ", ".join(map(str, theirs.versions))
    assert reason.startswith(f"it is swarm 9.9 (protocol {versions}, messages ef), and here is swarm {__version__}")
    assert reason.endswith("install the same version on both")


def test_other_messages_are_no_greetings() -> None:
    """Nor one that only has the word in it."""
    assert read_greeting(CLIENT.encode(Ack(request_id="greet", index=0, next_index=1))) is None
    assert read_greeting([]) is None
    assert read_greeting([*greeting("a"), b""]) is None
    assert read_greeting([b"greet" * 1000]) is None
    assert client_schema() != schema()


@given(st.binary(max_size=200))
def test_garbage_is_no_greeting(noise: bytes) -> None:
    """And never raises anything."""
    assert read_greeting([b"greet" + noise]) is None
    for place in (3, 20, 40):
        (frame,) = greeting("abcd")
        read_greeting([bytes(frame[:place]) + noise[:2] + bytes(frame[place:])])
