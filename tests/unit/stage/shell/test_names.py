"""Names that messages carry, and what becomes of a worker that can't send its own."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from swarm.config.worker import MAX_WORKER_NAME
from swarm.errors import WireError
from swarm.stage.model.checkpoint import shorten_name
from swarm.stage.shell.control import ControlConnection, exit_code_without
from swarm.testing import fake_manifest
from swarm.wire.codec import WORKER
from swarm.wire.messages import MAX_NAME, PROTOCOL_VERSION, HeldSequence, Hello, LogRange, Stats
from swarm.wire.versions import VERSIONS


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(_HELLO, **changes)


_HELLO = Hello(
    name="w0",
    incarnation="w0-12345678",
    pid=1,
    host="here",
    wire_versions=VERSIONS,
    schema="",
    device="cpu",
    dtype="float32",
    cores=2,
    endpoint="tcp://127.0.0.1:20000",
    memory_bytes=1,
    costs=(),
    manifest=fake_manifest(),
    held_layers=None,
    held=(),
    logs=(),
)


def with_model(name: str) -> Hello:
    return hello(manifest=msgspec.structs.replace(fake_manifest(), name=name))


@pytest.mark.parametrize("name", ["m", "m" * MAX_NAME, "ü" * 128])
def test_names_that_fit_are_shown_as_they_are(name: str) -> None:
    """Up to what messages carry, in characters."""
    assert shorten_name(name) == name
    WORKER.encode(with_model(name))


def test_long_names_are_shortened_in_the_middle_and_stay_apart() -> None:
    """Whatever differs, beginning, middle or end; and a message carries what comes out."""
    names = ["m" * 129, "m" * 255, *("m" * at + "x" + "m" * (254 - at) for at in (0, 100, 127, 254)), "🐝" * 200]
    shown = [shorten_name(name) for name in names]
    assert len(set(shown)) == len(names)
    for name, short in zip(names, shown, strict=True):
        assert len(short) == MAX_NAME
        assert (name[:50], name[-50:]) == (short[:50], short[-50:])
        WORKER.encode(with_model(short))


def test_a_name_that_is_no_text_is_shown_all_the_same() -> None:
    """A folder may be called by any bytes."""
    assert shorten_name(os.fsdecode(b"model-\xff")) == "model-?"


def test_the_longest_name_of_a_worker_fits_with_its_processs_own() -> None:
    """What the settings allow, messages carry; a character more they don't."""
    longest = "w" * MAX_WORKER_NAME
    WORKER.encode(hello(name=longest, incarnation=f"{longest}-12345678"))
    with pytest.raises(WireError, match=r"hello\.incarnation"):
        WORKER.encode(hello(name=longest, incarnation=f"{longest}w-12345678"))


def test_only_what_is_held_is_gone_at_the_next_start() -> None:
    """So a worker that holds nothing, and can't say who it is, never will."""
    assert exit_code_without(hello()) == 78
    assert exit_code_without(hello(held=(HeldSequence(1, ()),))) == 1
    assert exit_code_without(hello(logs=(LogRange(1, 3, 0, 5),))) == 1


def test_what_cannot_be_encoded_is_not_sent() -> None:
    """It ends no process; if the broker waits for it, that has a deadline. The socket, which is not there, is never
    asked."""
    control = object.__new__(ControlConnection)
    control._version = PROTOCOL_VERSION
    control.send(Stats(incarnation="w0.1", values={"x" * 1000: 1.0}))
