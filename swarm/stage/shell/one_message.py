"""A connection for a single message, to a stage that nothing else is sent to. It may take its time, and may be lost:
whoever waits for what becomes of it has a deadline."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from swarm.log import get_logger
from swarm.wire.channel import PushChannel
from swarm.wire.messages import Edge
from swarm.wire.tensors import Bytes

RETRY_S = 0.005  # how soon to try again: a fresh connection takes a moment
PATIENCE_S = 5.0  # for the connection; on a network that is no slower, the message is on its way then
LINGER_MS = 2000  # how long the rest of it may still leave when the connection is closed

log = get_logger(__name__)


class AsideEdge:
    """One message at a time; a later one takes the place of one that could not be sent yet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._channel: PushChannel | None = None
        self._frames: Sequence[Bytes] = ()
        self._give_up_at = 0.0

    @property
    def is_full(self) -> bool:
        return self._channel is not None

    def send(self, edge: Edge, frames: Sequence[Bytes], now: float) -> None:
        self.close()
        self._channel = PushChannel(self._context, edge.endpoint)
        self._channel.socket.set(zmq.LINGER, LINGER_MS)
        self._frames, self._give_up_at = frames, now + PATIENCE_S
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send it if that is possible now; give up in the end."""
        if self._channel is None:
            return
        if self._channel.send(self._frames):
            self.close()
        elif now >= self._give_up_at:
            log.warning("aside_not_sent", to=self._channel.endpoint)
            self.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, self._frames = None, ()
