"""The sockets that carry messages: every option set here, each with its reason.

Control plane, on an asyncio loop; sends are plain calls that never wait::

    router = RouterChannel(context, host, port, CLIENT.frame_limit_bytes)
    async for event in router:                       # Arrived(peer, frames, connection) | PeerLost(peer) | GateClosed
        router.send(event.peer, SERVER.encode(...))  # False: nobody there, or its queue is full

    dealer = DealerChannel(context, endpoint, identity, SERVER.frame_limit_bytes)
    async for event in dealer:                       # Frames | Link.UP | Link.DOWN
        dealer.send(CLIENT.encode(...))              # False: not connected, or the queue is full

    beats = AsyncPullChannel(context, host, BEAT.frame_limit_bytes, BEAT_QUEUE)
    async for event in beats: ...                    # Frames | GateClosed

    push = AsyncPushChannel(context, endpoint)       # one per directed edge and epoch
    push.send(DATA.encode(...))                      # False: can't be sent now, keep it …
    await push.sendable()                            # … until then

Data plane, all of it in one plain thread::

    wake = Wake()                                    # any thread may call wake.set()
    pull = PullChannel(context, host, DATA.frame_limit_bytes)
    push = PushChannel(context, endpoint)
    pull.wait(timeout_s, wake=wake, outgoing=[push]) # returns when any of them is ready
    frames = pull.receive()                          # None: nothing there
    push.send(frames)                                # False: can't be sent now, keep it

Every channel is closed with ``close()``, by the thread (or loop) that uses it; then ``context.term()`` returns. The
context is a plain ``zmq.Context``, one per process.

A send that returned True is no delivery: whatever must arrive is acknowledged by messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from math import ceil
from typing import Final, Generic, NamedTuple, Self, TypeVar

import zmq

from swarm.errors import ConfigError
from swarm.wire.gate import GATES, Gate, Gates
from swarm.wire.sockets import (
    DATA_PORTS,
    Connections,
    Context,
    Frames,
    Monitor,
    Socket,
    SocketEvent,
    bind,
    bind_free_port,
    connect,
    descriptor,
    has,
    receive_now,
    send_now,
    set_options,
)
from swarm.wire.tensors import Bytes

_CONTROL_QUEUE = 1000  # messages per peer; a client that reads slower than this is told so by send() returning False
DATA_QUEUE = 4  # messages, each up to many MB; the broker bounds the steps in flight anyway
BEAT_QUEUE = 16  # old beats are worthless
_NO_MESSAGES_BYTES = 4096  # who only sends receives nothing but the handshake
_CONTROL_LINGER_MS = 1000  # a last word (a denial, an end of stream) should still leave when a socket closes
_BATCH = 64  # receiving from a ready socket does not yield to the loop: do it ourselves, every so many messages


class Arrived(NamedTuple):
    """A message, who sent it, and the descriptor of the connection it came over."""

    peer: bytes
    frames: Frames
    connection: int


class PeerLost(NamedTuple):
    """A peer that had sent something has no connection any more. It may come back under the same name.

    Said within milliseconds of a crash, and before the socket has tidied up: a send may still be taken for a moment."""

    peer: bytes


class GateClosed(NamedTuple):
    """Accepting failed with this error number, for want of a descriptor or of memory: nobody new is let in until
    ``let_in()``, here or at a channel that shares its gates with this one. Who is connected stays so."""

    code: int


class Link(Enum):
    """What became of a dealer's connection. Whoever sees UP introduces itself (again): the peer may be a new one."""

    UP = "up"
    DOWN = "down"


# --- control plane: asyncio -------------------------------------------------------------------------------------------

Event = TypeVar("Event")


class _AsyncChannel(Generic[Event]):
    """An asynchronous iterator over what arrives. ``await anext(channel)`` may be cancelled, say by a timeout, at any
    time without losing a message. Made and used within one running loop.

    The sockets are plain ones that the loop watches. A ZeroMQ descriptor tells of news once (it is edge-triggered), and
    any call on the socket may swallow that; so after every call the socket is asked again whether something is there.
    """

    def __init__(self, context: Context, kind: int, limit_bytes: int, queue: int, linger_ms: int) -> None:
        self._socket = context.socket(kind)
        set_options(self._socket, limit_bytes, queue, linger_ms)
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._arrived: deque[Event] = deque()  # never more than _BATCH messages and what the monitor said
        self._watch(self._socket)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._arrived:
            if self._ready.is_set():
                await asyncio.sleep(0)  # a socket that is always ready must not keep the loop for itself
            await self._ready.wait()
            self._ready.clear()
            for _ in range(_BATCH):
                if not self._take():
                    break
            self._look_again(self._socket)
        return self._arrived.popleft()

    def waiting(self) -> Iterator[Event]:
        """What is there already, in order, without waiting: a queue's worth at most."""
        for _ in range(self._queue):
            if not self._arrived:
                self._take()
            if not self._arrived:
                break
            yield self._arrived.popleft()
        if self._arrived:
            self._ready.set()
        self._look_again(self._socket)

    def close(self) -> None:
        """Close the socket. End the task that receives first: nothing will wake it any more."""
        self._unwatch(self._socket)
        self._socket.close()

    def _take(self) -> bool:
        """Receive one message into ``_arrived``; False if there was none."""
        raise NotImplementedError

    def _send(self, frames: Sequence[Bytes]) -> bool:
        sent = send_now(self._socket, frames)
        self._look_again(self._socket)
        return sent

    def _watch(self, socket: Socket) -> None:
        self._loop.add_reader(descriptor(socket), self._look_again, socket)
        self._look_again(socket)

    def _unwatch(self, socket: Socket) -> None:
        self._loop.remove_reader(descriptor(socket))

    def _look_again(self, socket: Socket) -> None:
        if has(socket, zmq.POLLIN):
            self._ready.set()


class _ListeningChannel(_AsyncChannel[Event]):
    """One that people knock at. Channels of one loop should share their ``gates``. ``events``: what its monitor tells
    beside."""

    def __init__(
        self,
        context: Context,
        kind: int,
        limit_bytes: int,
        queue: int,
        *,
        linger_ms: int,
        gates: Gates | None,
        events: int = 0,
    ) -> None:
        super().__init__(context, kind, limit_bytes, queue, linger_ms)
        self._gate = Gate(gates or Gates())
        self._monitor = Monitor(context, self._socket, events | (Monitor.GATE_EVENTS if GATES else 0))
        self._watch(self._monitor.socket)

    def let_in(self) -> None:
        """After GateClosed: whoever knocks is accepted again, or GateClosed is told again."""
        self._gate.open()

    def close(self) -> None:
        self._unwatch(self._monitor.socket)
        self._monitor.close()
        self._gate.close()
        super().close()

    def _heed(self, event: SocketEvent) -> GateClosed | None:
        """What the monitor says of the door itself."""
        if event.event is zmq.Event.LISTENING:
            self._gate.listens(event.value)
        elif event.event is zmq.Event.ACCEPT_FAILED and self._gate.refused(event.value):
            return GateClosed(event.value)
        return None


class RouterChannel(_ListeningChannel[Arrived | PeerLost | GateClosed]):
    """The listening end of a door: messages of many peers, and the news that one has gone. Port 0: any free one."""

    def __init__(self, context: Context, host: str, port: int, limit_bytes: int, *, gates: Gates | None = None) -> None:
        linger_ms, events = _CONTROL_LINGER_MS, Monitor.EVENTS
        super().__init__(
            context, zmq.ROUTER, limit_bytes, _CONTROL_QUEUE, linger_ms=linger_ms, gates=gates, events=events
        )
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # else a message to nobody vanishes without a word
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # else a peer that lost its connection is ignored when it comes back
        self._connections = Connections()
        try:
            self.endpoint = bind(self._socket, host, port)
        except ConfigError:
            self.close()
            raise

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """False: the peer is not connected, or it does not read and its queue is full."""
        return self._send([peer, *frames])

    def has(self, peer: bytes) -> bool:
        """Is it connected, as far as is known?"""
        return self._connections.has(peer)

    def _take(self) -> bool:
        frames = receive_now(self._socket)
        lost = self._read_monitor()  # after the message: see Connections
        if frames:
            peer, connection = frames[0].bytes, int(frames[-1].get(zmq.SRCFD))
            self._arrived.append(Arrived(peer, [frame.buffer for frame in frames[1:]], connection))
            lost.append(self._connections.used(connection, peer))
        self._arrived.extend(PeerLost(peer) for peer in lost if peer is not None and not self._connections.has(peer))
        return frames is not None

    def _read_monitor(self) -> list[bytes | None]:
        lost = []
        for event in self._monitor.events():
            match event.event:
                case zmq.Event.ACCEPTED:
                    self._connections.accepted(event.value)
                case zmq.Event.DISCONNECTED:
                    lost.append(self._connections.closed(event.value))
                case _:
                    if (closed := self._heed(event)) is not None:
                        self._arrived.append(closed)
        self._look_again(self._monitor.socket)
        return lost


class DealerChannel(_AsyncChannel[Frames | Link]):
    """The knocking end of a door. Connects, and connects again, by itself; says so each time."""

    def __init__(self, context: Context, endpoint: str, identity: bytes, limit_bytes: int) -> None:
        super().__init__(context, zmq.DEALER, limit_bytes, _CONTROL_QUEUE, _CONTROL_LINGER_MS)
        self._socket.set(zmq.IDENTITY, identity)
        self._socket.set(
            zmq.IMMEDIATE, 1
        )  # nothing queues for a broker that isn't there, to reach it before UP is told
        self._monitor = Monitor(context, self._socket)
        self._watch(self._monitor.socket)
        try:
            connect(self._socket, endpoint)
        except ConfigError:
            self.close()
            raise

    def send(self, frames: Sequence[Bytes]) -> bool:
        """False: not connected, or the other end does not read and the queue is full."""
        return self._send(frames)

    def close(self) -> None:
        self._unwatch(self._monitor.socket)
        self._monitor.close()
        super().close()

    def _take(self) -> bool:
        frames = receive_now(self._socket)
        for event in self._monitor.events():  # after the message: UP is told before what came over that connection
            if event.event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._arrived.append(Link.UP)
            elif event.event is zmq.Event.DISCONNECTED:
                self._arrived.append(Link.DOWN)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        return frames is not None


class AsyncPullChannel(_ListeningChannel[Frames | GateClosed]):
    """Receives from many senders on an asyncio loop (beats; finished steps)."""

    def __init__(
        self,
        context: Context,
        host: str,
        limit_bytes: int,
        queue: int,
        *,
        ports: range = DATA_PORTS,
        gates: Gates | None = None,
    ) -> None:
        super().__init__(context, zmq.PULL, limit_bytes, queue, linger_ms=0, gates=gates)
        try:
            self.endpoint = bind_free_port(self._socket, host, ports)
        except ConfigError:
            self.close()
            raise

    def _take(self) -> bool:
        for event in self._monitor.events():
            if (closed := self._heed(event)) is not None:
                self._arrived.append(closed)
        self._look_again(self._monitor.socket)
        frames = receive_now(self._socket)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        return frames is not None


# --- data plane: one plain thread -------------------------------------------------------------------------------------


class Wake:
    """Wakes a thread that waits in ``PullChannel.wait``. ``set()`` may be called from any thread, any number of times;
    it stays set until ``clear()``. A descriptor, because ZeroMQ sockets belong to one thread each. ``close()`` comes
    after the last ``set()``."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._reads = self._writes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._reads, self._writes = os.pipe()
            os.set_blocking(self._reads, False)
            os.set_blocking(self._writes, False)

    def fileno(self) -> int:
        return self._reads

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is set already
            os.write(self._writes, _ONE)

    def clear(self) -> None:
        """Call it before looking at what was announced, so that no later ``set`` is lost."""
        with contextlib.suppress(BlockingIOError):  # empty: it was not set
            os.read(self._reads, 4096)

    def close(self) -> None:
        os.close(self._reads)
        if self._writes != self._reads:
            os.close(self._writes)


_ONE: Final = (1).to_bytes(8, "little")  # an eventfd counts in 64-bit numbers; a pipe takes any bytes


class PushChannel:
    """The sending end of one directed edge. One per edge and epoch: a PUSH with two peers would deal in turns."""

    def __init__(self, context: Context, endpoint: str, queue: int = DATA_QUEUE) -> None:
        self.endpoint = endpoint
        self.socket = context.socket(zmq.PUSH)
        set_options(self.socket, _NO_MESSAGES_BYTES, queue, linger_ms=0)
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing queues for a peer that isn't there; "can't send" becomes visible
        try:
            connect(self.socket, endpoint)
        except ConfigError:
            self.close()
            raise

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Hand a message over if it can be taken now; False if the peer is away or its queue is full.

        Buffers above 64 KB are not copied: they must not be written to afterwards.
        """
        return send_now(self.socket, frames)

    def close(self) -> None:
        """Close the socket; what it still queues is dropped."""
        self.socket.close()


class AsyncPushChannel(PushChannel):
    """The same on an asyncio loop: the broker's edge to the first stage."""

    def __init__(self, context: Context, endpoint: str, queue: int = DATA_QUEUE) -> None:
        self._loop = asyncio.get_running_loop()
        self._sendable = asyncio.Event()
        super().__init__(context, endpoint, queue)
        self._loop.add_reader(descriptor(self.socket), self._look_again)

    async def sendable(self) -> None:
        """Wait until ``send`` can work again. The caller sets the deadline."""
        while not has(self.socket, zmq.POLLOUT):
            self._sendable.clear()
            await self._sendable.wait()

    def close(self) -> None:
        self._loop.remove_reader(descriptor(self.socket))
        super().close()

    def _look_again(self) -> None:
        if has(self.socket, zmq.POLLOUT):
            self._sendable.set()


class PullChannel:
    """The receiving end of data edges, for one plain thread."""

    def __init__(self, context: Context, host: str, limit_bytes: int, ports: range = DATA_PORTS) -> None:
        self.socket = context.socket(zmq.PULL)
        set_options(self.socket, limit_bytes, DATA_QUEUE, linger_ms=0)
        self._watch(None, ())
        try:
            self.endpoint = bind_free_port(self.socket, host, ports)
        except ConfigError:
            self.close()
            raise

    def receive(self) -> Frames | None:
        """The next message, None if there is none now. The frames are libzmq's own buffers."""
        frames = receive_now(self.socket)
        return None if frames is None else [frame.buffer for frame in frames]

    def wait(self, timeout_s: float, *, wake: Wake | None = None, outgoing: Sequence[PushChannel] = ()) -> bool:
        """Wait until a message is there, ``wake`` is set or one of ``outgoing`` can send. False: the time passed."""
        if wake is not self._wake or outgoing != self._outgoing:
            self._watch(wake, outgoing)
        return bool(zmq.zmq_poll(self._watched, ceil(timeout_s * 1000)))

    def _watch(self, wake: Wake | None, outgoing: Sequence[PushChannel]) -> None:
        """What ends the waits from now on. Kept, because it seldom changes and every hop waits."""
        self._wake, self._outgoing = wake, outgoing
        self._watched: list[tuple[Socket | int, int]] = [(self.socket, zmq.POLLIN)]
        self._watched += [(channel.socket, zmq.POLLOUT) for channel in outgoing]
        if wake is not None:
            self._watched.append((wake.fileno(), zmq.POLLIN))

    def close(self) -> None:
        self.socket.close()
