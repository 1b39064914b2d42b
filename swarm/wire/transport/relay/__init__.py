"""Relay for listeners that can only make outgoing connections: it joins senders with receivers.

``rendezvous`` decides which connections are joined, ``relay`` is the relay itself, ``receiver`` the receiver's client
of it.
"""

from swarm.wire.transport.relay.relay import Relay

__all__ = ["Relay"]
