"""What is said of keys: invitations and members, and another key for a machine or for the broker itself."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.wire.messages.common import Message, Name, PublicKey, Version


class BrokerKey(Message, frozen=True):
    """Broker → who knocked with a key: this is my public key from now on. The one that you knocked at is answered to
    for a while."""

    key: PublicKey


class BrokerKeyKept(Message, frozen=True):
    """The answer: the broker's key is on the disk here, and will be used at the next connection."""

    key: PublicKey


class RotateYours(Message, frozen=True, tag="rotate_yours"):
    """Broker → who knocked with a key: draw another one for your machine, and tell me (``Rotate``)."""


Role = Literal["client", "gateway", "worker", "admin"]


class Enrol(Message, frozen=True, kw_only=True):
    """Who has an invitation, and knocked with its key, makes its own key known. ``name``: what it would like to be
    called; empty: the broker finds one. ``proof``: in hexadecimal digits, that it holds the secret half of its key
    (``swarm.lock.possession``)."""

    key: PublicKey
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    proof: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{168})?$")] = ""
    v: Version = 3


class Invite(Message, frozen=True):
    """``swarmctl`` asks for an invitation, whose secret it has drawn itself: ``key`` is the public half. ``name``: what
    who comes by it is called; empty: what it calls itself."""

    key: PublicKey
    role: Role
    uses: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 3600.0
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Revoke(Message, frozen=True):
    """``swarmctl`` takes a key or an invitation away, by its name or by how the key begins."""

    name: Name


class Rotate(Message, frozen=True):
    """I shall knock with this key from now on: the one of this connection counts until I have."""

    key: PublicKey


class RotateBroker(Message, frozen=True):
    """``swarmctl`` asks for another key for the broker itself, or how far that is. ``now``: the old one is put away,
    whoever does not know the new one yet."""

    now: bool = False


class RotateMember(Message, frozen=True):
    """``swarmctl`` asks for another key for a member's machine, which draws it itself."""

    name: Name


class Enrolled(Message, frozen=True):
    """The answer to ``Enrol``. Whoever has it knocks with its own key from now on."""

    name: Name
    role: Role


LockMessage = Enrol | Invite | Revoke | Rotate | RotateBroker | RotateMember | BrokerKeyKept
