"""Messages about keys: invitations, members, and key rotation of a machine or of the broker itself."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.wire.messages.common import Message, Name, PublicKey, Version


class BrokerKey(Message, frozen=True):
    """Announcement from the broker to a peer that authenticated with a key: the broker's new public key. The key that
    the peer has used remains valid for a while."""

    key: PublicKey


class BrokerKeyKept(Message, frozen=True):
    """Confirmation that the broker's new key is stored on the peer's disk and will be used for the next connection."""

    key: PublicKey


class RotateKey(Message, frozen=True, tag="rotate_yours"):
    """Order from the broker to a peer that authenticated with a key: generate a new key pair for the machine, and send
    it with ``Rotate``."""


Role = Literal["client", "gateway", "worker", "admin"]


class Enrol(Message, frozen=True, kw_only=True):
    """Registration of a machine's own key by a peer that connected with an invitation's key.

    ``name``: the name it asks for; empty: the broker picks one. ``proof``: hexadecimal proof that the sender holds the
    secret half of its key (``swarm.auth``).
    """

    key: PublicKey
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    proof: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{168})?$")] = ""
    v: Version = 3


class Invite(Message, frozen=True):
    """Request by ``swarmctl`` for an invitation. ``swarmctl`` has generated its secret; ``key`` is the public half.
    ``name``: name of the machine that uses it; empty: the machine's own choice."""

    key: PublicKey
    role: Role
    uses: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 3600.0
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Revoke(Message, frozen=True):
    """Request by ``swarmctl`` to revoke a key or an invitation, given by its name or by a prefix of the key."""

    name: Name


class Rotate(Message, frozen=True):
    """Announcement of the sender's new key for future connections. The key of this connection is valid until the new
    one has been used."""

    key: PublicKey


class RotateBroker(Message, frozen=True):
    """Request by ``swarmctl`` for a new key of the broker, or for the progress of that. ``now``: retire the old key
    immediately, even if some members lack the new one."""

    now: bool = False


class RotateMember(Message, frozen=True):
    """Request by ``swarmctl`` for a new key of a member's machine. The machine generates it itself."""

    name: Name


class Enrolled(Message, frozen=True):
    """Answer to ``Enrol``. Its receiver uses its own key for all further connections."""

    name: Name
    role: Role


KeyMessage = Enrol | Invite | Revoke | Rotate | RotateBroker | RotateMember | BrokerKeyKept
