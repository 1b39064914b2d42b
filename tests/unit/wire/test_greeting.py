"""Greetings: read by every build, whatever else has changed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import __version__
from swarm.wire.codec import CLIENT
from swarm.wire.greeting import Greeting, encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import PROTOCOL_VERSION, Ack
from swarm.wire.schema import client_schema, schema
from swarm.wire.versions import VERSIONS


def test_two_of_one_build_understand_each_other() -> None:
    """What one says, the other reads, and finds nothing strange."""
    theirs = read_greeting(encode_greeting("abcd"))
    assert theirs == Greeting(schema="abcd")
    assert theirs.build == __version__
    assert incompatibility(theirs, "abcd") is None


@pytest.mark.parametrize(
    ("later", "remedy"),
    [
        ({"v": 70, "versions": [60, 70]}, "upgrade the older one, by single releases"),
        ({"versions": VERSIONS, "keys": {"any": [1, 2]}}, "install the same version on both"),
    ],
)
def test_a_later_build_is_read_and_named(later: dict[str, object], remedy: str) -> None:
    """Whatever its versions and whatever fields it has beside ours."""
    later |= {"schema": "ef", "build": "9.9"}
    theirs = read_greeting([msgspec.msgpack.encode({"kind": "greet"} | later)])
    assert theirs is not None
    reason = incompatibility(theirs, "abcd")
    assert reason is not None
    versions = ", ".join(map(str, theirs.versions))
    assert reason.startswith(f"it is swarm 9.9 (protocol {versions}, messages ef), and here is swarm {__version__}")
    assert reason.endswith(remedy)


@pytest.mark.parametrize(
    ("versions", "spoken"),
    [(VERSIONS, PROTOCOL_VERSION), ((*VERSIONS, PROTOCOL_VERSION + 1), PROTOCOL_VERSION), (VERSIONS[:1], VERSIONS[0])],
)
def test_the_newest_version_that_both_speak(versions: tuple[int, ...], spoken: int) -> None:
    """A newer build is no stranger, nor an older one, whatever their messages are called."""
    schema = "abcd" if versions == VERSIONS else "ef"
    theirs = Greeting(versions=versions, schema=schema, build="9.9")
    assert (incompatibility(theirs, "abcd"), negotiated_version(theirs)) == (None, spoken)


def test_other_messages_are_no_greetings() -> None:
    """Nor one that only has the word in it."""
    assert read_greeting(CLIENT.encode(Ack(request_id="greet", index=0, next_index=1))) is None
    assert read_greeting([]) is None
    assert read_greeting([*encode_greeting("a"), b""]) is None
    assert read_greeting([b"greet" * 1000]) is None
    assert client_schema() != schema()


@given(st.binary(max_size=200))
def test_garbage_is_no_greeting(noise: bytes) -> None:
    """And never raises anything."""
    assert read_greeting([b"greet" + noise]) is None
    for place in (3, 20, 40):
        (frame,) = encode_greeting("abcd")
        read_greeting([bytes(frame[:place]) + noise[:2] + bytes(frame[place:])])
