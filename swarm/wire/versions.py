"""Versions of the protocol: what each added, and how this build says something to one that knows less.

Builds of one version say exactly the same; a test holds every version to a name of its messages (``schema``). A version
only adds: kinds of messages, and fields with a default to kinds that there are. So whoever is newer understands what an
older one says, and leaves out what that one does not know. What an older one would misunderstand without it is not said
to it at all, but refused in words. Nothing is added to small records (arrays): a new one takes their place.
Steps between stages are said as of the version that made them; the day they change, ``Prepare`` must say how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from swarm.errors import WireError
from swarm.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION

VERSIONS: Final = tuple(range(OLDEST_VERSION, PROTOCOL_VERSION + 1))

# By version: the kinds and fields (``kind.field``, ``kind.field.part``) that it added, and whether an older peer may do
# without.
ADDED: Final[Mapping[int, Mapping[str, bool]]] = {
    2: {
        "hello.build": True,
        "hello.kv_share": True,
        "hello.settings": True,
        "release.again": False,
        "show_settings": False,
        "shun": False,
        "stop_worker.again": False,
    },
    3: {
        "cancel.if_reader": True,
        "denied.dtype": True,
        "enrol.proof": True,
        "look_up": False,
        "recalled.submit.keep_s": True,
        "self_tested": False,
        "snapshot": False,
        "submit.keep_s": False,
        "trouble.failed": True,
    },
}


def common(theirs: Iterable[int]) -> int | None:
    """The newest version that both speak."""
    return max(set(theirs) & set(VERSIONS), default=None)


def as_of(version: int, kind: str, header: bytes) -> bytes:
    """A message's header as an older version has it. Raises WireError if it can't be said so."""
    added = [(newer, name) for newer in VERSIONS if newer > version for name in ADDED[newer] if _is_of(name, kind)]
    if not added:
        return header
    fields: dict[str, Any] = msgspec.msgpack.decode(header)
    for newer, name in added:
        value = _taken_out(fields, name.split(".")[1:], version)
        if value and not ADDED[newer][name]:
            raise WireError(f"{name} is of version {newer} of the protocol, the peer speaks {version}: upgrade it")
    fields["v"] = min(fields["v"], version)
    return msgspec.msgpack.encode(fields)


def _taken_out(fields: dict[str, Any], path: list[str], version: int) -> object:
    """Take a field out; return its value. One that is not there has its default; a whole kind (no path) is said. A
    message within the message is then of that version, too."""
    if not path:
        return True
    for part in path[:-1]:
        fields = fields.get(part) or {}
        if "v" in fields:
            fields["v"] = min(fields["v"], version)
    return fields.pop(path[-1], False)


def _is_of(name: str, kind: str) -> bool:
    return name.partition(".")[0] == kind
