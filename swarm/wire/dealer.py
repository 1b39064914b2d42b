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
from swarm.wire.sockets import (
    Context,
    Frames,
    Monitor,
    Socket,
    configure_auth,
    connect,
    file_descriptor,
    has_event,
    receive_now,
    send_now,
    set_options,
)
from swarm.wire.tensors import Bytes
from swarm.wire.transport.client_handshake import is_refused
from swarm.wire.transport.keys import KeyPair

_RETRY_S = 0.1  # Retry interval while there is no file descriptor for a new connection.
_RECONNECT_GRACE_S = 0.3  # After a connection ends: time within which libzmq announces a reconnect, if it makes one.
_UNPROVEN_PAUSE_S = 1.0  # Pause after a refusal that was not proven to come from the real peer.
_LINGER_MS = 1000  # Final messages (a denial, an end of stream) should still be sent when a socket closes.


class ConnectionEvent(Enum):
    """State change of a connection. On CONNECTED the owner must introduce itself (again), because the peer may be a new
    process."""

    CONNECTED = "up"
    LOST = "down"
    AUTH_REJECTED = "turned away"  # The peer proved that it rejects our key; no more reconnects.
    # Disconnected during the handshake; reconnects continue. Perhaps the peer's key has changed.
    HANDSHAKE_FAILED = "unheard"


class DealerChannel(AsyncChannel[Frames | ConnectionEvent]):
    """Connecting side of a channel. It connects and reconnects by itself, and reports each change as an event.

    The loop watches the descriptor of a plain socket. A ZeroMQ descriptor is edge-triggered, and any call on the socket
    may consume the edge; so after every call the socket is queried for further events.

    libzmq stops reconnecting for ever in two cases: a byte of a connection is corrupted, or an ERROR arrives in the
    handshake, which any attacker on the path can send. The channel continues in both cases. If libzmq does not announce
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
        self._is_rejected = False  # The handshake was rejected on a connection without keys; no more reconnects.
        self._has_new_endpoint = False  # The endpoint or its key has changed; the next connection needs a new socket.
        self._socket: Socket | None = None  # None while there is no file descriptor for a new one.
        self._reconnect_timer: asyncio.TimerHandle | None = None  # Timer of the next attempt with a new socket.
        self._verification: asyncio.Task[None] | None = None  # Checks whether a refusal really came from the peer.
        self._open_socket()

    def _open_socket(self) -> None:
        self._has_new_endpoint = self._is_lost = self._is_rejected = False
        sock = self._context.socket(zmq.DEALER)
        set_options(sock, self._limit_bytes, CONTROL_QUEUE, _LINGER_MS)
        sock.set(zmq.IDENTITY, self._identity)
        address = configure_auth(sock, self._endpoint, self._pair)
        # Don't queue messages for a broker that is not there: they would reach it before CONNECTED was reported.
        sock.set(zmq.IMMEDIATE, 1)
        try:
            self._monitor = Monitor(self._context, sock)
        except zmq.ZMQError:
            sock.close()
            raise
        self._socket = sock
        for each in (sock, self._monitor.socket):
            self._loop.add_reader(file_descriptor(each), self._check_ready)
        try:
            connect(sock, address)
        except ConfigError:
            self.close()
            raise
        self._check_ready()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Send a message. Return False if not connected, or if the other end does not read and the queue is full."""
        sent = self._socket is not None and send_now(self._socket, frames)
        self._check_ready()
        return sent

    def set_endpoint(self, endpoint: str) -> None:
        """Use this endpoint from the next connection on; the current connection stays."""
        self._has_new_endpoint |= endpoint != self._endpoint
        self._endpoint = endpoint

    def reconnect(self, pair: KeyPair | None = None) -> None:
        """Disconnect and reconnect: reports LOST immediately, CONNECTED when the new connection is established.

        Uses a new socket: a late event of the former connection must not be mistaken for one of the new connection.
        ``pair``: our new key pair.
        """
        self._pair = pair or self._pair
        self.close()
        self._arrived.append(ConnectionEvent.LOST)
        self._ready.set()
        self._open_socket_or_retry()

    def _open_socket_or_retry(self) -> None:
        """Connect; while there is no free file descriptor, retry until there is one."""
        try:
            self._open_socket()
        except zmq.ZMQError:
            self._reconnect_timer = self._loop.call_later(_RETRY_S, self._open_socket_or_retry)

    def _schedule_reconnect(self, pause_s: float) -> None:
        """Connect with a new socket after a pause, unless libzmq announces a reconnect before that."""
        self._cancel_reconnect()
        self._reconnect_timer = self._loop.call_later(pause_s, self._replace)

    def _cancel_reconnect(self) -> None:
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None

    def _replace(self) -> None:
        # Messages that arrived before the end are delivered first.
        if self._socket is not None and has_event(self._socket, zmq.POLLIN):
            self._ready.set()
            self._schedule_reconnect(_RETRY_S)
            return
        self.close()
        self._open_socket_or_retry()

    async def _verify_rejection(self) -> None:
        """Check with a separate connection whether the real peer rejects our key."""
        assert self._pair is not None
        is_proven = await asyncio.to_thread(is_refused, self._endpoint, self._pair)
        self._arrived.append(ConnectionEvent.AUTH_REJECTED if is_proven else ConnectionEvent.HANDSHAKE_FAILED)
        self._ready.set()
        if not is_proven:
            self._schedule_reconnect(_UNPROVEN_PAUSE_S)

    def close(self) -> None:
        """Close the socket. Cancel the task that receives first: it will never be woken again."""
        self._cancel_reconnect()
        if self._verification is not None:
            self._verification.cancel()
            self._verification = None
        if self._socket is None:
            return
        for each in (self._socket, self._monitor.socket):
            self._loop.remove_reader(file_descriptor(each))
        self._monitor.close()
        self._socket.close()
        self._socket = None

    def _receive_one(self) -> bool:
        if self._socket is None:
            return False
        frames = receive_now(self._socket)
        # After the message, so that CONNECTED is reported before messages of that connection.
        for event in self._monitor.events():
            self._on_monitor_event(event)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        elif self._is_lost and self._has_new_endpoint:
            self.close()
            self._open_socket_or_retry()
        return frames is not None

    def _on_monitor_event(self, event: zmq.Event) -> None:
        """Handle an event of the socket's monitor."""
        if event is zmq.Event.CONNECT_RETRIED:
            self._cancel_reconnect()
            return
        self._is_lost = event is not zmq.Event.HANDSHAKE_SUCCEEDED
        if event is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._cancel_reconnect()
            self._arrived.append(ConnectionEvent.CONNECTED)
        elif event is zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._on_rejected()
        elif event is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._arrived.append(ConnectionEvent.HANDSHAKE_FAILED)
        elif self._verification is None:
            self._arrived.append(ConnectionEvent.LOST)
            if not self._is_rejected:
                self._schedule_reconnect(_RECONNECT_GRACE_S)

    def _on_rejected(self) -> None:
        """Handle an ERROR in the handshake. libzmq does not reconnect after it."""
        if self._pair is None:
            self._is_rejected = True
            self._arrived.append(ConnectionEvent.AUTH_REJECTED)
        elif self._verification is None:
            self._verification = self._loop.create_task(self._verify_rejection(), name="verify rejection")

    def _check_ready(self) -> None:
        if self._socket is not None and (
            has_event(self._socket, zmq.POLLIN) or has_event(self._monitor.socket, zmq.POLLIN)
        ):
            self._ready.set()
