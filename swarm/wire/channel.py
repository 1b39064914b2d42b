"""Listening channels on an asyncio loop.

Sends are plain calls that never block::

    router = RouterChannel([BindAddress(host)], port, CLIENT.frame_limit_bytes)
    async for event in router:                       # MessageReceived | PeerDisconnected | LimitExceeded | AcceptPaused
        router.send(event.peer, SERVER.encode(...))  # False: not connected, or its queue is full

    heartbeats = AsyncPullChannel([BindAddress(host)], HEARTBEAT.frame_limit_bytes, HEARTBEAT_QUEUE)
    async for event in heartbeats: ...               # MessageReceived | LimitExceeded | AcceptPaused

The connecting end is a ``DealerChannel`` (``dealer``), which uses libzmq. The listening end reads its connections
itself (``transport.listener``), within limits that libzmq lacks. Steps use other channels: ``pull`` and ``push``.
One-directional channels (``*PullChannel``) have a token or key in their ``endpoint``: only peers that present it are
accepted.

Every channel must be closed with ``close()``, by the thread (or loop) that uses it; otherwise ``context.term()`` does
not return. The context is a plain ``zmq.Context``, one per process.

A send that returned True is no delivery guarantee: what must arrive is acknowledged by messages.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from swarm.errors import ConfigError
from swarm.wire.messages import PROTOCOL_VERSION
from swarm.wire.sockets import (
    DATA_PORTS,
    bind,
    bind_free_port,
    endpoint_of,
)
from swarm.wire.tensors import Bytes
from swarm.wire.transport.accept import AcceptPaused
from swarm.wire.transport.curve import server_mechanism_for
from swarm.wire.transport.keys import AuthPolicy, new_token, with_key
from swarm.wire.transport.listener import SWEEP_S, Listener
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected
from swarm.wire.transport.server_handshake import PULL, ROUTER, SocketType

CONTROL_QUEUE = 1000  # Messages per peer. For a client that reads more slowly, send() returns False.
HEARTBEAT_QUEUE = 16  # Old heartbeats are worthless.
# Receiving from a ready socket does not yield to the loop, so ``__anext__`` yields after this many messages.
_BATCH = 64


class BindAddress(NamedTuple):
    """Address to listen on, and its authentication policy; without a policy every peer is accepted."""

    host: str
    auth: AuthPolicy | None = None


Event = TypeVar("Event")


class AsyncChannel(Generic[Event]):
    """Asynchronous iterator over arriving events.

    ``await anext(channel)`` may be cancelled at any time, for example by a timeout, without losing a message. Create
    and use a channel within one running loop.
    """

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._arrived: deque[Event] = deque()  # At most _BATCH messages, plus connection events.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._arrived:
            if self._ready.is_set():
                await asyncio.sleep(0)  # A socket that is always ready must not monopolise the loop.
            await self._ready.wait()
            self._ready.clear()
            for _ in range(_BATCH):
                if not self._receive_one():
                    break
            self._check_ready()
        return self._arrived.popleft()

    def pending_events(self) -> Iterator[Event]:
        """Yield events that have already arrived, in order, without waiting; at most a full queue."""
        self._poll()
        for _ in range(self._queue):
            while not self._arrived and self._receive_one():
                pass
            if not self._arrived:
                break
            yield self._arrived.popleft()
        if self._arrived:
            self._ready.set()
        self._check_ready()

    def _poll(self) -> None:
        """Read from the sockets, in channels where the loop does not do that."""

    def _receive_one(self) -> bool:
        """Receive one message into ``_arrived``. Return False if there was none."""
        raise NotImplementedError

    def _check_ready(self) -> None:
        """Set ``_ready`` if more messages may be available."""
        raise NotImplementedError


class _ListeningChannel(AsyncChannel[Event]):
    """Base class of channels that accept connections."""

    def __init__(
        self,
        listening: Sequence[tuple[BindAddress, socket.socket]],
        kind: SocketType,
        limit_bytes: int,
        queue: int,
        *,
        token: bytes = b"",
    ) -> None:
        super().__init__(queue)
        self._listener = Listener(
            [(bound, server_mechanism_for(kind, place.auth, token)) for place, bound in listening],
            limit_bytes,
            self._loop,
            self._ready.set,
            lambda key: any(place.auth is not None and place.auth.is_authorized(key) for place, _ in listening),
            may_use_identity=next(
                (
                    place.auth.may_use_identity
                    for place, _ in listening
                    if place.auth is not None and place.auth.may_use_identity
                ),
                None,
            ),
        )
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def resume_accepting(self) -> None:
        """Resume accepting connections after AcceptPaused. Accepting may be paused again."""
        self._listener.resume_accepting()

    def drop_unauthorized(self) -> None:
        """Disconnect all peers whose keys are no longer authorized."""
        self._listener.drop_unauthorized()

    def close(self) -> None:
        """Close all connections. Cancel the task that receives first: it will never be woken again."""
        self._sweep_timer.cancel()
        self._listener.close()

    def _poll(self) -> None:
        self._listener.poll()

    def _check_ready(self) -> None:
        if self._listener.has_more:
            self._ready.set()

    def _sweep(self) -> None:
        self._listener.enforce_deadlines()
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)


def _bind_all(places: Sequence[BindAddress], port: int) -> list[socket.socket]:
    """Bind all addresses, or none. Raises ConfigError."""
    bound: list[socket.socket] = []
    try:
        for place in places:
            bound.append(bind(place.host, port))
    except ConfigError:
        for sock in bound:
            sock.close()
        raise
    return bound


class RouterChannel(_ListeningChannel[MessageReceived | PeerDisconnected | LimitExceeded | AcceptPaused]):
    """Listening channel with many peers: receives their messages and disconnections, and sends to each of them.

    Port 0 selects any free port; then only one address is allowed. ``endpoint`` is the endpoint of the first address.
    """

    def __init__(self, places: Sequence[BindAddress], port: int, limit_bytes: int) -> None:
        bound = _bind_all(places, port)
        super().__init__(list(zip(places, bound, strict=True)), ROUTER, limit_bytes, CONTROL_QUEUE)
        self.endpoint = endpoint_of(bound[0])
        self._older_versions: dict[bytes, int] = {}  # Connected peers with an older protocol version, and that version.

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """Queue a message for a peer. Return False if it is not connected, or does not read and its queue is full."""
        return self._listener.send(peer, frames)

    def is_connected(self, peer: bytes) -> bool:
        """Whether the peer is connected, as far as this end has noticed."""
        return self._listener.is_connected(peer)

    def remote_address(self, peer: bytes) -> str:
        """Return the remote address of the peer's connection; empty if it has none any more."""
        return self._listener.remote_address(peer)

    def authenticated_peers(self) -> list[tuple[bytes, str]]:
        """Return the connected peers that have authenticated with a key, with their keys."""
        return self._listener.authenticated_peers()

    def set_version(self, peer: bytes, version: int) -> None:
        """Record the protocol version that was negotiated with a peer."""
        if version < PROTOCOL_VERSION and self.is_connected(peer):
            self._older_versions[peer] = version

    def version_of(self, peer: bytes) -> int:
        """Return the protocol version for messages to a peer."""
        return self._older_versions.get(peer, PROTOCOL_VERSION)

    def disconnect(self, peer: bytes) -> None:
        """Stop reading from a peer and disconnect it a moment later, after queued messages have been sent. It may
        reconnect."""
        self._listener.disconnect(peer)

    def pause_reading(self, peer: bytes, for_s: float) -> None:
        """Stop reading from a peer for this time (back-pressure): its messages wait at its own end."""
        if (resume := self._listener.pause_reading(peer)) is not None:
            self._loop.call_later(for_s, resume)

    def _receive_one(self) -> bool:
        event = self._listener.next_event()
        if event is not None:
            self._arrived.append(event)
        if isinstance(event, PeerDisconnected):
            self._older_versions.pop(event.peer, None)
        return event is not None


class AsyncPullChannel(_ListeningChannel[MessageReceived | LimitExceeded | AcceptPaused]):
    """Receiving channel for many senders on an asyncio loop (heartbeats; finished steps); accepts peers that present
    its token or key.

    Listens either on one address without authentication policy, at any free port of ``ports``; or on several addresses
    with the same policy, at ``port``. In the second case ``endpoint`` has the host ``*``: each sender fills in its own
    route.
    """

    def __init__(
        self,
        places: Sequence[BindAddress],
        limit_bytes: int,
        queue: int,
        *,
        ports: range = DATA_PORTS,
        port: int | None = None,
    ) -> None:
        auth = places[0].auth
        if auth is None or port is None:
            token = new_token()
            bound = [bind_free_port(places[0].host, ports)]
            self.endpoint = with_key(endpoint_of(bound[0]), token)
        else:
            token = b""
            bound = _bind_all(places, port)
            self.endpoint = with_key(f"tcp://*:{port}", auth.pair.public.encode())
        super().__init__(list(zip(places, bound, strict=True)), PULL, limit_bytes, queue, token=token)

    def _receive_one(self) -> bool:
        event = self._listener.next_event()
        if isinstance(event, MessageReceived | LimitExceeded | AcceptPaused):
            self._arrived.append(event)
        return event is not None
