"""Wire protocol: message types, their encoding, and the channels that carry them between processes.

In: message structs. Out: checked frames on sockets, and checked messages from frames that arrive.

* ``messages``: one struct per message; ``versions`` and ``greeting``: which protocol version two peers use;
* ``codec``: messages to frames and back, with every check; ``tensors``: arrays to bytes and back;
* ``channel``: listening ends on an asyncio loop; ``dealer``: the connecting end;
* ``push`` and ``pull``: the two ends of a data edge, which carries steps between stages;
* ``transport``: the ZMTP implementation behind the listening ends: handshakes, framing, limits, the relay.

Imports nothing else of Swarm but ``errors``, ``params``, ``version``, and the socket activation of systemd.
"""
