"""Version negotiation at the beginning of every connection of the client and control channels.

The connecting side greets, the listening side answers with its greeting, and only then other messages follow. All other
messages are strict: a peer never receives a field that its version lacks. Both sides therefore choose the newest
version that both support, and the newer side leaves out later additions (``versions``). If there is none, each can
report that in a readable error. A greeting itself is not strict: its four fields stay for ever, others may be added,
and any build can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from swarm.version import __version__
from swarm.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from swarm.wire.tensors import Bytes
from swarm.wire.versions import VERSIONS, newest_common

_MAX_BYTES: Final = 4096
_MARK: Final = b"greet"


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_MARK.decode()):
    """First message in both directions.

    ``versions``: all protocol versions that the sender supports. ``schema``: digest of the channel's messages in the
    sender's build. ``build``: release of the sender, for error messages.
    """

    v: int = PROTOCOL_VERSION
    versions: tuple[int, ...] = VERSIONS
    schema: str
    build: str = __version__

    def __str__(self) -> str:
        versions = ", ".join(map(str, self.versions))
        return f"swarm {self.build} (protocol {versions}, messages {self.schema})"


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Greeting)


def encode_greeting(schema: str) -> list[Bytes]:
    """Return the frames of our greeting."""
    return [_ENCODER.encode(Greeting(schema=schema))]


def read_greeting(frames: Sequence[Bytes]) -> Greeting | None:
    """Decode a greeting. Return None if the frames are something else."""
    if len(frames) != 1 or len(frames[0]) > _MAX_BYTES or _MARK not in bytes(frames[0]):
        return None
    try:
        return _DECODER.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def incompatibility(theirs: Greeting, schema: str) -> str | None:
    """Return why this build can't work with a peer that sent this greeting, or None. ``schema``: our own digest.

    If both have the same newest version, their messages must be equal, too: two builds between releases may differ.
    """
    ours = Greeting(schema=schema)
    if newest_common(theirs.versions) is None:
        return f"it is {theirs}, and here is {ours}: upgrade the older one, by single releases"
    if max(theirs.versions) == PROTOCOL_VERSION and theirs.schema != schema:
        return f"it is {theirs}, and here is {ours}: install the same version on both"
    return None


def negotiated_version(theirs: Greeting) -> int:
    """Return the version to use with a compatible peer."""
    return newest_common(theirs.versions) or OLDEST_VERSION
