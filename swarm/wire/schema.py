"""A name for the messages as this build knows them.

Peers refuse messages with fields that they don't know, so two builds that differ in one can't work together, even where
the protocol's number is the same (while it is being developed). Whoever meets compares this name (``greeting``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Final, get_args

import msgspec
import xxhash

from swarm.wire import messages

# In which module of the package a struct stands is no difference between two builds.
_PLACE: Final = re.compile(re.escape(messages.__name__) + r"\.[a-z_]+\.")

# Structs that were renamed in Python: new name -> the name that goes into the digest. The wire format is the same.
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
    """Name the schema: the same for the same kinds, fields, types and bounds; sixteen hexadecimal digits."""
    return _name(messages.Message.__subclasses__())


@cache
def client_schema() -> str:
    """Name the schema of what passes the client door, either way."""
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
