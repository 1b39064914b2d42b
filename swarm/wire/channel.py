"""The sockets that carry messages: every option set here, each with its reason.

Control plane, on an asyncio loop; sends are plain calls that never wait::

    router = RouterChannel(host, port, CLIENT.frame_limit_bytes)
    async for event in router:                       # Arrived(peer, frames) | PeerLost | Overstepped | GateClosed
        router.send(event.peer, SERVER.encode(...))  # False: nobody there, or its queue is full

    dealer = DealerChannel(context, endpoint, identity, SERVER.frame_limit_bytes)
    async for event in dealer:                       # Frames | Link.UP | Link.DOWN
        dealer.send(CLIENT.encode(...))              # False: not connected, or the queue is full

    beats = AsyncPullChannel(host, BEAT.frame_limit_bytes, BEAT_QUEUE)
    async for event in beats: ...                    # Frames | Overstepped | GateClosed

Data plane, all of it in one plain thread::

    wake = Wake()                                    # any thread may call wake.set()
    pull = PullChannel(host, DATA.frame_limit_bytes)
    push = PushChannel(context, endpoint)            # one per directed edge and epoch
    pull.wait(timeout_s, wake=wake, outgoing=[push]) # returns when any of them is ready; incoming=False: but for pull
    frames = pull.receive()                          # None: nothing there
    push.send(frames)                                # False: can't be sent now, keep it

Who knocks uses libzmq; who listens reads the connections itself (``listener``), within bounds that libzmq doesn't have.
Doors of one direction (``*PullChannel``) have a key, a part of their ``endpoint``: only who was told it is heard.

Every channel is closed with ``close()``, by the thread (or loop) that uses it; then ``context.term()`` returns. The
context is a plain ``zmq.Context``, one per process.

A send that returned True is no delivery: whatever must arrive is acknowledged by messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from math import ceil
from typing import Final, Generic, Self, TypeVar

import zmq

from swarm.errors import ConfigError
from swarm.wire.door.keys import address_and_key, keyed, new_key
from swarm.wire.door.listener import SWEEP_S, Arrived, GateClosed, Listener, Overstepped, PeerLost
from swarm.wire.door.mechanisms import PULL, ROUTER, USERNAME, Kind, asks
from swarm.wire.door.watch import Poll
from swarm.wire.sockets import (
    DATA_PORTS,
    Context,
    Frames,
    Monitor,
    Socket,
    bind,
    bind_free_port,
    connect,
    descriptor,
    endpoint_of,
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
_KNOCK_AGAIN_S = 0.1  # without a descriptor for a new connection
_BATCH = 64  # receiving from a ready socket does not yield to the loop: do it ourselves, every so many messages


class Link(Enum):
    """What became of a dealer's connection. Whoever sees UP introduces itself (again): the peer may be a new one."""

    UP = "up"
    DOWN = "down"


# --- control plane: asyncio -------------------------------------------------------------------------------------------

Event = TypeVar("Event")


class _AsyncChannel(Generic[Event]):
    """An asynchronous iterator over what arrives. ``await anext(channel)`` may be cancelled, say by a timeout, at any
    time without losing a message. Made and used within one running loop."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._arrived: deque[Event] = deque()  # never more than _BATCH messages and what became of connections

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
            self._look_again()
        return self._arrived.popleft()

    def waiting(self) -> Iterator[Event]:
        """Yield what is there already, in order, without waiting: a queue's worth at most."""
        self._look()
        for _ in range(self._queue):
            while not self._arrived and self._take():
                pass
            if not self._arrived:
                break
            yield self._arrived.popleft()
        if self._arrived:
            self._ready.set()
        self._look_again()

    def _look(self) -> None:
        """Read what is there, where nobody else does."""

    def _take(self) -> bool:
        """Receive one message into ``_arrived``; False if there was none."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """Set ``_ready`` if there is more to take."""
        raise NotImplementedError


class _ListeningChannel(_AsyncChannel[Event]):
    """A channel that listens for those who knock."""

    def __init__(self, bound: socket.socket, kind: Kind, limit_bytes: int, queue: int, key: bytes = b"") -> None:
        super().__init__(queue)
        self.endpoint = keyed(endpoint_of(bound), key)
        self._listener = Listener(bound, limit_bytes, self._loop, self._ready.set, asks(kind, key))
        self._sweeps = self._loop.call_later(SWEEP_S, self._sweep)

    def let_in(self) -> None:
        """Accept whoever knocks again, after GateClosed; it may be told again."""
        self._listener.let_in()

    def close(self) -> None:
        """End the task that receives first: nothing will wake it any more."""
        self._sweeps.cancel()
        self._listener.close()

    def _look(self) -> None:
        self._listener.look()

    def _look_again(self) -> None:
        if self._listener.has_more:
            self._ready.set()

    def _sweep(self) -> None:
        self._listener.sweep()
        self._sweeps = self._loop.call_later(SWEEP_S, self._sweep)


class RouterChannel(_ListeningChannel[Arrived | PeerLost | Overstepped | GateClosed]):
    """The listening end of a door: messages of many peers, and the news that one has gone. Port 0: any free one."""

    def __init__(self, host: str, port: int, limit_bytes: int) -> None:
        super().__init__(bind(host, port), ROUTER, limit_bytes, _CONTROL_QUEUE)

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """False: the peer is not connected, or it does not read and its queue is full."""
        return self._listener.send(peer, frames)

    def has(self, peer: bytes) -> bool:
        """Is it connected, as far as is known?"""
        return self._listener.has(peer)

    def hang_up(self, peer: bytes) -> None:
        """Read a peer no more; it is lost a moment later. What it was told still leaves. Who knocks again is heard."""
        self._listener.hang_up(peer)

    def _take(self) -> bool:
        event = self._listener.take()
        if event is not None:
            self._arrived.append(event)
        return event is not None


class DealerChannel(_AsyncChannel[Frames | Link]):
    """The knocking end of a door. Connects, and connects again, by itself; says so each time.

    The socket is a plain one that the loop watches. A ZeroMQ descriptor tells of news once (it is edge-triggered), and
    any call on the socket may swallow that; so after every call the socket is asked again whether something is there.
    """

    def __init__(self, context: Context, endpoint: str, identity: bytes, limit_bytes: int) -> None:
        super().__init__(_CONTROL_QUEUE)
        self._context, self._endpoint, self._identity, self._limit_bytes = context, endpoint, identity, limit_bytes
        self._socket: Socket | None = None  # None: there was no descriptor for a new one
        self._knocks_again: asyncio.TimerHandle | None = None
        self._knock()

    def _knock(self) -> None:
        made = self._context.socket(zmq.DEALER)
        set_options(made, self._limit_bytes, _CONTROL_QUEUE, _CONTROL_LINGER_MS)
        made.set(zmq.IDENTITY, self._identity)
        # Nothing queues for a broker that isn't there, to reach it before UP is told.
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
            connect(made, self._endpoint)
        except ConfigError:
            self.close()
            raise
        self._look_again()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """False: not connected, or the other end does not read and the queue is full."""
        sent = self._socket is not None and send_now(self._socket, frames)
        self._look_again()
        return sent

    def renew(self) -> None:
        """Hang up and knock again: DOWN at once, UP when the new connection stands. With a new socket: the former
        connection's end may come late, and must not be taken for the new one's."""
        self.close()
        self._arrived.append(Link.DOWN)
        self._ready.set()
        self._knock_as_soon_as_possible()

    def _knock_as_soon_as_possible(self) -> None:
        """Where there is no descriptor for it, again and again until there is one."""
        try:
            self._knock()
        except zmq.ZMQError:
            self._knocks_again = self._loop.call_later(_KNOCK_AGAIN_S, self._knock_as_soon_as_possible)

    def close(self) -> None:
        """Close the socket. End the task that receives first: nothing will wake it any more."""
        if self._knocks_again is not None:
            self._knocks_again.cancel()
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
        for event in self._monitor.events():  # after the message: UP is told before what came over that connection
            if event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._arrived.append(Link.UP)
            elif event is zmq.Event.DISCONNECTED:
                self._arrived.append(Link.DOWN)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        return frames is not None

    def _look_again(self) -> None:
        if self._socket is not None and (has(self._socket, zmq.POLLIN) or has(self._monitor.socket, zmq.POLLIN)):
            self._ready.set()


class AsyncPullChannel(_ListeningChannel[Frames | Overstepped | GateClosed]):
    """Receives from many senders on an asyncio loop (beats; finished steps), from those who know its key."""

    def __init__(self, host: str, limit_bytes: int, queue: int, *, ports: range = DATA_PORTS) -> None:
        super().__init__(bind_free_port(host, ports), PULL, limit_bytes, queue, new_key())

    def _take(self) -> bool:
        event = self._listener.take()
        if isinstance(event, Arrived):
            self._arrived.append(event.frames)
        elif isinstance(event, Overstepped | GateClosed):
            self._arrived.append(event)
        return event is not None


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
    """The sending end of one directed edge. One per edge and epoch: a socket with two peers would deal in turns. A key
    in the endpoint is named in the handshake, as a password. If it is the wrong one, the other end says so, and this
    one knocks no more: it can't send for ever, as if nobody were there."""

    def __init__(self, context: Context, endpoint: str, queue: int = DATA_QUEUE) -> None:
        self.endpoint, key = address_and_key(endpoint)
        self.socket = context.socket(zmq.PUSH)
        set_options(self.socket, _NO_MESSAGES_BYTES, queue, linger_ms=0)
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing queues for a peer that isn't there; "can't send" becomes visible
        try:
            if key:
                self.socket.set(zmq.PLAIN_USERNAME, USERNAME)
                self.socket.set(zmq.PLAIN_PASSWORD, key)
            connect(self.socket, self.endpoint)
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"the key in an endpoint at {self.endpoint} is none: {error.strerror}") from None

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Hand a message over if it can be taken now; False if the peer is away or its queue is full.

        Buffers above 64 KB are not copied: they must not be written to afterwards.
        """
        return send_now(self.socket, frames)

    def close(self) -> None:
        """Close the socket; what it still queues is dropped."""
        self.socket.close()


class PullChannel:
    """The receiving end of data edges, for one plain thread, from those who know its key. Nothing is read but while
    that thread waits or receives: what comes meanwhile is kept by the kernel, and stops the sender when that is
    full."""

    def __init__(self, host: str, limit_bytes: int, ports: range = DATA_PORTS, *, key: bytes | None = None) -> None:
        key = new_key() if key is None else key
        bound = bind_free_port(host, ports)
        self.endpoint = keyed(endpoint_of(bound), key)
        self._poll = Poll()
        self._listener = Listener(bound, limit_bytes, self._poll, _nothing, asks(PULL, key))
        self._message: Frames | None = None
        self._swept_at = time.monotonic()
        self.num_shut = 0  # times that there was no descriptor for who knocked
        self._watch(None, ())

    @property
    def num_refused(self) -> int:
        """Counts who knocked and did not know the key, was too slow or went over a bound."""
        return self._listener.num_refused

    def receive(self) -> Frames | None:
        """The next message, None if there is none now."""
        self._look()
        message, self._message = self._message, None
        return message

    def wait(
        self,
        timeout_s: float,
        *,
        wake: Wake | None = None,
        outgoing: Sequence[PushChannel] = (),
        incoming: bool = True,
    ) -> bool:
        """Wait until a message is there, ``wake`` is set or one of ``outgoing`` can send. False: the time passed.
        Without ``incoming``, for who would not take it now, a message ends no wait: one is kept, the rest comes no
        further than the kernel."""
        if wake is not self._wake or outgoing != self._outgoing:
            self._watch(wake, outgoing)
        give_up_at = time.monotonic() + timeout_s
        own, left_s = self._poll.fileno(), timeout_s
        while not (incoming and self._has_message()):
            watched = self._watched if self._message is None else self._watched[1:]
            found = zmq.zmq_poll(watched, ceil(max(0.0, left_s) * 1000))
            if any(each != own for each, _ in found) or (found and self._look() and incoming):
                return True
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return self._look() and incoming
        return True

    def _has_message(self) -> bool:
        """Is there one among what was read already?"""
        return self._message is not None or (self._listener.has_more and self._look())

    def _look(self) -> bool:
        """Read what is there, until it is a whole message."""
        for _ in range(_BATCH):
            if self._message is not None:
                break
            event = self._listener.take()
            if isinstance(event, Arrived):
                self._message = event.frames
            elif isinstance(event, GateClosed):
                self.num_shut += 1
            elif event is None and not self._poll.turn():
                break
        if (now := time.monotonic()) - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._listener.sweep()
            self._listener.let_in()
        return self._message is not None

    def _watch(self, wake: Wake | None, outgoing: Sequence[PushChannel]) -> None:
        """Set what ends the waits from now on. Kept, because it seldom changes and every hop waits."""
        self._wake, self._outgoing = wake, outgoing
        self._watched: list[tuple[Socket | int, int]] = [(self._poll.fileno(), zmq.POLLIN)]  # the own one first
        self._watched += [(channel.socket, zmq.POLLOUT) for channel in outgoing]
        if wake is not None:
            self._watched.append((wake.fileno(), zmq.POLLIN))

    def close(self) -> None:
        self._listener.close()
        self._poll.close()


def _nothing() -> None:
    """Wake nobody: who waits in a plain thread asks."""
