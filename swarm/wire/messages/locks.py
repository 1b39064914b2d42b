"""What the broker says of keys to those who are connected, clients and workers alike, and what they answer."""

from __future__ import annotations

from swarm.wire.messages.common import Message, PublicKey


class BrokerKey(Message, frozen=True):
    """Broker → who knocked with a key: this is my public key from now on. The one that you knocked at is answered to
    for a while."""

    key: PublicKey


class BrokerKeyKept(Message, frozen=True):
    """The answer: the broker's key is on the disk here, and will be used at the next connection."""

    key: PublicKey


class RotateYours(Message, frozen=True):
    """Broker → who knocked with a key: draw another one for your machine, and tell me (``Rotate``)."""
