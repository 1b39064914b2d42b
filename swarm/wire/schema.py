"""Digests of the message schema of this build, which peers compare in their greetings.

Peers reject messages with unknown fields, so two builds whose messages differ in one field can't work together, even if
their protocol number is the same (which happens between releases). ``greeting`` compares the digests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Final, get_args

import msgspec
import xxhash

from swarm.wire import messages

# The module of the package in which a struct is defined makes no difference between two builds.
_PLACE: Final = re.compile(re.escape(messages.__name__) + r"\.[a-z_]+\.")

# Classes that were renamed in Python: new name -> the name used in the digest. Their wire format is unchanged.
_PUBLISHED_NAMES: Final = {
    "AllowKey": "Expect",
    "BlockKey": "Shun",
    "DataPathError": "Trouble",
    "GetDigest": "TellDigest",
    "GetRequest": "Recall",
    "Heartbeat": "Beat",
    "KeepWarm": "Keep",
    "KeptWarm": "Kept",
    "LeaseRenewed": "Alive",
    "LogDigest": "Digested",
    "PlanCommand": "Steer",
    "PlanOverrides": "ByHand",
    "PlanWhatIf": "Suppose",
    "RecheckHop": "Leg",
    "RecheckRoute": "Trial",
    "RequestDetails": "Recalled",
    "RotateKey": "RotateYours",
    "TokensSnapshot": "Snapshot",
    "Unassign": "Dismiss",
}
_RENAMED: Final = re.compile(rf"\b({'|'.join(_PUBLISHED_NAMES)})\b")


@cache
def schema() -> str:
    """Return the digest of all messages: 16 hexadecimal digits, equal for equal kinds, fields, types and bounds."""
    return _name(messages.Message.__subclasses__())


@cache
def client_schema() -> str:
    """Return the digest of the messages of the client channel, in both directions."""
    return _name((*get_args(messages.ClientMessage), *get_args(messages.ServerMessage)))


def _name(kinds: Iterable[type[messages.Message]]) -> str:
    kinds = sorted(kinds, key=lambda kind: published_name(kind.__name__))
    described = "\n".join(repr(msgspec.inspect.type_info(kind)) for kind in kinds)
    described = _PLACE.sub(f"{messages.__name__}.", described)
    described = _RENAMED.sub(lambda match: published_name(match[0]), described)
    return xxhash.xxh3_64_hexdigest(described.encode())


def published_name(name: str) -> str:
    """Return the name that this class had when its wire format was published."""
    return _PUBLISHED_NAMES.get(name, name)
