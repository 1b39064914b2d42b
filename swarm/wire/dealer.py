"""Connecting end of the client and control channels, on an asyncio loop: one connection that reconnects whenever it is
lost::

    dealer = DealerChannel(context, endpoint, identity, SERVER.frame_limit_bytes)
    async for event in dealer:                       # Frames | ConnectionEvent
        dealer.send(CLIENT.encode(...))              # False: not connected, or the queue is full
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum

import zmq

from swarm.errors import ConfigError
from swarm.wire.channel import CONTROL_QUEUE, AsyncChannel
from swarm.wire.door.keys import KeyPair
from swarm.wire.door.knocking import is_refused
from swarm.wire.sockets import (
    Context,
    Frames,
    Monitor,
    Socket,
    connect,
    descriptor,
    has,
    receive_now,
    send_now,
    set_options,
    unlocked,
)
from swarm.wire.tensors import Bytes

_KNOCK_AGAIN_S = 0.1  # Retry interval while there is no file descriptor for a new connection.
_GIVEN_UP_S = 0.3  # After a connection ends: time within which libzmq announces a reconnect, if it makes one.
_DOUBT_S = 1.0  # Pause after a refusal that was not proven to come from the real peer.
_LINGER_MS = 1000  # Final messages (a denial, an end of stream) should still be sent when a socket closes.


class Link(Enum):
    """State change of a connection. On CONNECTED the owner must introduce itself (again), because the peer may be a new
    process."""

    UP = "up"
    DOWN = "down"
    TURNED_AWAY = "turned away"  # The peer proved that it rejects our key; no more reconnects.
    UNHEARD = "unheard"  # Disconnected during the handshake; reconnects continue. Perhaps the peer's key has changed.


class DealerChannel(AsyncChannel[Frames | Link]):
    """Connecting channel. Connects and reconnects by itself, and reports each change as an event.

    The loop watches the descriptor of a plain socket. A ZeroMQ descriptor is edge-triggered, and any call on the socket
    may consume the edge; so after every call the socket is queried for further events.

    libzmq stops reconnecting for ever when a byte of a connection is corrupted, and when an ERROR arrives in the
    handshake, which any attacker on the path can send. Neither may silence this end. If libzmq does not announce
    another attempt, a new socket replaces the old one; and an ERROR counts only if the peer has proven it
    (``client_handshake.is_refused``).
    """

    def __init__(
        self, context: Context, endpoint: str, identity: bytes, limit_bytes: int, pair: KeyPair | None = None
    ) -> None:
        """``pair``: our key pair, for an endpoint with a public key."""
        super().__init__(CONTROL_QUEUE)
        self._context, self._identity, self._limit_bytes = context, identity, limit_bytes
        self._endpoint, self._pair = endpoint, pair
        self._is_lost = False  # The connection is down.
        self._is_turned_away = False  # By a peer without authentication.
        self._moves = False  # The endpoint or its key has changed; the next connection needs a new socket.
        self._socket: Socket | None = None  # None while there is no file descriptor for a new one.
        self._knocks_again: asyncio.TimerHandle | None = None  # Timer of the next attempt with a new socket.
        self._doubts: asyncio.Task[None] | None = None  # Checks whether a refusal really came from the peer.
        self._knock()

    def _knock(self) -> None:
        self._moves = self._is_lost = self._is_turned_away = False
        made = self._context.socket(zmq.DEALER)
        set_options(made, self._limit_bytes, CONTROL_QUEUE, _LINGER_MS)
        made.set(zmq.IDENTITY, self._identity)
        address = unlocked(made, self._endpoint, self._pair)
        # Don't queue messages for a broker that is not there: they would reach it before CONNECTED was reported.
        made.set(zmq.IMMEDIATE, 1)
        try:
            self._monitor = Monitor(self._context, made)
        except zmq.ZMQError:
            made.close()
            raise
        self._socket = made
        for each in (made, self._monitor.socket):
            self._loop.add_reader(descriptor(each), self._look_again)
        try:
            connect(made, address)
        except ConfigError:
            self.close()
            raise
        self._look_again()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Send a message. Return False if not connected, or if the other end does not read and the queue is full."""
        sent = self._socket is not None and send_now(self._socket, frames)
        self._look_again()
        return sent

    def move(self, endpoint: str) -> None:
        """Use this endpoint from the next connection on; the current connection stays."""
        self._moves |= endpoint != self._endpoint
        self._endpoint = endpoint

    def renew(self, pair: KeyPair | None = None) -> None:
        """Disconnect and reconnect: reports LOST immediately, CONNECTED when the new connection is established.

        Uses a new socket: a late event of the former connection must not be mistaken for one of the new connection.
        ``pair``: our new key pair.
        """
        self._pair = pair or self._pair
        self.close()
        self._arrived.append(Link.DOWN)
        self._ready.set()
        self._knock_as_soon_as_possible()

    def _knock_as_soon_as_possible(self) -> None:
        """Connect; while there is no free file descriptor, retry until there is one."""
        try:
            self._knock()
        except zmq.ZMQError:
            self._knocks_again = self._loop.call_later(_KNOCK_AGAIN_S, self._knock_as_soon_as_possible)

    def _knock_later(self, pause_s: float) -> None:
        """Connect with a new socket after a pause, unless libzmq announces a reconnect before that."""
        self._knock_not()
        self._knocks_again = self._loop.call_later(pause_s, self._replace)

    def _knock_not(self) -> None:
        if self._knocks_again is not None:
            self._knocks_again.cancel()
            self._knocks_again = None

    def _replace(self) -> None:
        # Messages that arrived before the end are delivered first.
        if self._socket is not None and has(self._socket, zmq.POLLIN):
            self._ready.set()
            self._knock_later(_KNOCK_AGAIN_S)
            return
        self.close()
        self._knock_as_soon_as_possible()

    async def _doubt(self) -> None:
        """Check with a separate connection whether the real peer rejects our key."""
        assert self._pair is not None
        is_proven = await asyncio.to_thread(is_refused, self._endpoint, self._pair)
        self._arrived.append(Link.TURNED_AWAY if is_proven else Link.UNHEARD)
        self._ready.set()
        if not is_proven:
            self._knock_later(_DOUBT_S)

    def close(self) -> None:
        """Close the socket. Cancel the task that receives first: it will never be woken again."""
        self._knock_not()
        if self._doubts is not None:
            self._doubts.cancel()
            self._doubts = None
        if self._socket is None:
            return
        for each in (self._socket, self._monitor.socket):
            self._loop.remove_reader(descriptor(each))
        self._monitor.close()
        self._socket.close()
        self._socket = None

    def _take(self) -> bool:
        if self._socket is None:
            return False
        frames = receive_now(self._socket)
        # After the message, so that CONNECTED is reported before messages of that connection.
        for event in self._monitor.events():
            self._happened(event)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        elif self._is_lost and self._moves:
            self.close()
            self._knock_as_soon_as_possible()
        return frames is not None

    def _happened(self, event: zmq.Event) -> None:
        """Handle an event of the socket's monitor."""
        if event is zmq.Event.CONNECT_RETRIED:
            self._knock_not()
            return
        self._is_lost = event is not zmq.Event.HANDSHAKE_SUCCEEDED
        if event is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._knock_not()
            self._arrived.append(Link.UP)
        elif event is zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._refused()
        elif event is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._arrived.append(Link.UNHEARD)
        elif self._doubts is None:
            self._arrived.append(Link.DOWN)
            if not self._is_turned_away:
                self._knock_later(_GIVEN_UP_S)

    def _refused(self) -> None:
        """Handle an ERROR in the handshake. libzmq does not reconnect after it."""
        if self._pair is None:
            self._is_turned_away = True
            self._arrived.append(Link.TURNED_AWAY)
        elif self._doubts is None:
            self._doubts = self._loop.create_task(self._doubt(), name="verify rejection")

    def _look_again(self) -> None:
        if self._socket is not None and (has(self._socket, zmq.POLLIN) or has(self._monitor.socket, zmq.POLLIN)):
            self._ready.set()
