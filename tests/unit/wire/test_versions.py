"""Versions of the protocol: what this build says to an older one, and what it makes of what that one says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm.errors import WireError
from swarm.params import SamplingParams
from swarm.testing import fake_manifest
from swarm.wire import schema, versions
from swarm.wire.codec import CLIENT, ORDER, SERVER, WORKER, MessageCodec
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Description,
    Enrol,
    Hello,
    Manifest,
    Release,
    RequestDetails,
    StopWorker,
    Submit,
)
from swarm.wire.tensors import Bytes
from swarm.wire.versions import ADDED, VERSIONS
from tests.unit.wire.any_message import DOORS

OLD = Path(__file__).parents[2] / "old"
NEVER_SENT = {"copy", "copy_done", "weight_part"}  # kinds of older versions that no build ever sent: this one has none

# By version: names of all its messages, and of those at the client door.
NAMES = {4: ("c8c1eecbcf023db4", "4e6669d44d5dd3d7")}


def test_a_version_s_messages_don_t_change() -> None:
    """Who changes a message makes a new version: counts up PROTOCOL_VERSION, says in ADDED what came, names it here,
    and keeps frames and a wheel of the version before in tests/old."""
    assert NAMES[PROTOCOL_VERSION] == (schema.schema(), schema.client_schema())
    assert set(ADDED) == set(VERSIONS[1:])


def kept(version: int) -> list[tuple[str, str, list[bytes]]]:
    """Door, kind and frames of messages of every kind, as a build of that version made them."""
    return msgspec.msgpack.decode(
        (OLD / f"frames-{version}.msgpack").read_bytes(), type=list[tuple[str, str, list[bytes]]]
    )


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_what_an_older_build_says_is_understood_and_said_the_same(version: int) -> None:
    """Every kind of message of the version before, read by this build, and said to one of that version: just what it
    would say itself."""
    doors = {door.name: door for door in DOORS}
    frames = kept(version)
    assert len({kind for _, kind, _ in frames}) > 60
    for name, kind, old in frames:
        door = doors[name]
        if kind in NEVER_SENT:
            with pytest.raises(WireError):
                door.decode(old)
            continue
        message, payload = door.decode(old)
        assert said(door.encode(message, payload, version=version), door) == said(old, door), kind


def said(frames: Sequence[Bytes], door: MessageCodec[Any] = CLIENT) -> tuple[dict[str, object], list[bytes]]:
    """The header's fields, and the other frames."""
    return msgspec.msgpack.decode(door.verify_checksum(frames[0])), [bytes(frame) for frame in frames[1:]]


def test_what_an_older_one_does_not_know_is_left_out_or_refused() -> None:
    """Never said differently: without what came later it must mean the same."""
    usual = StopWorker(worker="w0")
    (ours, _), (theirs, _) = said(CLIENT.encode(usual)), said(CLIENT.encode(usual, version=1))
    assert ours == theirs | {"v": 2, "again": False}
    with pytest.raises(
        WireError, match=r"stop_worker\.again needs version 2 of the protocol, the peer supports 1: upgrade it"
    ):
        CLIENT.encode(StopWorker(worker="w0", again=True), version=1)
    with pytest.raises(WireError, match=r"release\.again needs version 2"):
        ORDER.encode(Release(reason="", again=True), version=1)


def test_an_older_broker_is_not_told_of_a_proof() -> None:
    """It needs none, and takes the key."""
    (theirs, _) = said(CLIENT.encode(Enrol(key="0" * 64, name="far", proof="1" * 168), version=2))
    assert theirs["v"] == 2
    assert "proof" not in theirs


def test_a_part_of_a_field_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new way to draw would be, within what ``Submit`` carries whole."""
    header = msgspec.msgpack.encode({"v": 2, "params": {"top_k": 3, "seed": 7}})
    monkeypatch.setattr(versions, "VERSIONS", (1, 2))
    monkeypatch.setattr(versions, "ADDED", {2: {"submit.params.seed": True}})
    said = msgspec.msgpack.decode(versions.downgrade_header(1, "submit", header))
    assert said == {"v": 1, "params": {"top_k": 3}}
    monkeypatch.setattr(versions, "ADDED", {2: {"submit.params.seed": False}})
    with pytest.raises(WireError, match=r"submit\.params\.seed needs version 2"):
        versions.downgrade_header(1, "submit", header)
    bare = msgspec.msgpack.encode({"v": 2})
    assert msgspec.msgpack.decode(versions.downgrade_header(1, "submit", bare)) == {"v": 1}


def test_a_message_within_a_message_is_of_the_older_version_too() -> None:
    """A client of the version before reads what was asked for with a field that it does not know."""
    asked = Submit(request_id="r", prompt=(5,), params=SamplingParams(), seed=1, keep_s=5.0)
    (theirs, _) = said(SERVER.encode(RequestDetails(submit=asked), version=2), SERVER)
    inner = theirs["submit"]
    assert isinstance(inner, dict)
    assert inner["v"] == 2
    assert "keep_s" not in inner
    with pytest.raises(WireError, match=r"submit\.keep_s needs version 3"):
        CLIENT.encode(asked, version=2)


def test_a_cancel_of_a_reader_is_a_cancel_to_an_older_broker() -> None:
    (theirs, _) = said(CLIENT.encode(Cancel(request_id="r", if_reader=True), version=2))
    assert theirs["v"] == 2
    assert "if_reader" not in theirs


def test_quantized_weights_are_not_taken_for_plain_ones() -> None:
    """A broker of the version before can't compare them, so a worker that has them does not join it; a client may
    go without."""
    plain = hello(fake_manifest())
    (theirs, _) = said(WORKER.encode(plain, version=3), WORKER)
    manifest = theirs["manifest"]
    assert isinstance(manifest, dict)
    assert not {"weights", "activations"} & manifest.keys()
    for field in ("weights", "activations"):
        quantized = msgspec.structs.replace(fake_manifest(), **{field: "int8"})
        with pytest.raises(WireError, match=rf"hello\.manifest\.{field} needs version 4 of the protocol"):
            WORKER.encode(hello(quantized), version=3)
        (description, _) = said(SERVER.encode(describe(quantized), version=3), SERVER)
        assert field not in description["manifest"]  # type: ignore[operator]


def hello(manifest: Manifest) -> Hello:
    return Hello(
        name="w0",
        incarnation="w0-1",
        pid=1,
        host="here",
        wire_versions=VERSIONS,
        schema="",
        device="cpu",
        dtype=manifest.dtype,
        cores=1,
        endpoint="tcp://127.0.0.1:1",
        memory_bytes=1,
        costs=(),
        manifest=manifest,
        held_layers=None,
        held=(),
        logs=(),
    )


def describe(manifest: Manifest) -> Description:
    return Description(manifest=manifest, state="serving", waits_for="", max_context=1, max_queue=1, swarm_version="1")
