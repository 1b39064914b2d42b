"""What is said first in every conversation at the client door and the control door: who speaks which version.

Whoever connects greets, whoever listens greets back, and only then anything else is said. All other messages are
strict: nobody is told a field that it does not know. So the two choose the newest version that both speak, and the
newer one leaves out what came later (``versions``). Where there is none, each can say so in words. That is why a
greeting is not strict itself: its four fields stay for ever, others may be added, and any build reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from swarm.version import __version__
from swarm.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from swarm.wire.tensors import Bytes
from swarm.wire.versions import VERSIONS, common

_MAX_BYTES: Final = 4096
_MARK: Final = b"greet"


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_MARK.decode()):
    """``versions``: of the protocol, all that are spoken. ``schema``: a name for the messages of the door as this build
    knows them. ``build``: for the texts of errors."""

    v: int = PROTOCOL_VERSION
    versions: tuple[int, ...] = VERSIONS
    schema: str
    build: str = __version__

    def __str__(self) -> str:
        versions = ", ".join(map(str, self.versions))
        return f"swarm {self.build} (protocol {versions}, messages {self.schema})"


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Greeting)


def greeting(schema: str) -> list[Bytes]:
    """The frames of ours."""
    return [_ENCODER.encode(Greeting(schema=schema))]


def read_greeting(frames: Sequence[Bytes]) -> Greeting | None:
    """Decode a greeting; None if it is something else."""
    if len(frames) != 1 or len(frames[0]) > _MAX_BYTES or _MARK not in bytes(frames[0]):
        return None
    try:
        return _DECODER.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def why_strangers(theirs: Greeting, schema: str) -> str | None:
    """Why a peer that greets so can't be talked to; ``schema``: our own. Whose newest version is the same must have the
    same messages: two builds between releases may not."""
    ours = Greeting(schema=schema)
    if common(theirs.versions) is None:
        return f"it is {theirs}, and here is {ours}: upgrade the older one, by single releases"
    if max(theirs.versions) == PROTOCOL_VERSION and theirs.schema != schema:
        return f"it is {theirs}, and here is {ours}: install the same version on both"
    return None


def spoken_with(theirs: Greeting) -> int:
    """The version to be spoken with a peer that is no stranger."""
    return common(theirs.versions) or OLDEST_VERSION
