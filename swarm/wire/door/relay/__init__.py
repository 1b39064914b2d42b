"""Doors of those who can only connect outwards: a relay joins who sends with who receives.

``rendezvous`` decides who meets whom, ``passing`` is the relay itself, ``outreach`` the receiver's end of it.
"""

from swarm.wire.door.relay.passing import Relay

__all__ = ["Relay"]
