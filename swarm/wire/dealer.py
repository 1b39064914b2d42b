"""Who knocks at a door, on an asyncio loop: one connection that is made again whenever it is lost::

dealer = DealerChannel(context, endpoint, identity, SERVER.frame_limit_bytes)
async for event in dealer:                       # Frames | Link
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

_KNOCK_AGAIN_S = 0.1  # without a descriptor for a new connection
_GIVEN_UP_S = 0.3  # after a connection ends, until libzmq must have announced that it will connect again
_DOUBT_S = 1.0  # after a refusal that the door did not prove
_LINGER_MS = 1000  # a last word (a denial, an end of stream) should still leave when a socket closes


class Link(Enum):
    """What became of a dealer's connection. Whoever sees UP introduces itself (again): the peer may be a new one."""

    UP = "up"
    DOWN = "down"
    TURNED_AWAY = "turned away"  # the door proved that our key does not open it; nobody knocks any more
    UNHEARD = "unheard"  # hung up on while knocking, which goes on: perhaps the door's key is another one by now


class DealerChannel(AsyncChannel[Frames | Link]):
    """The knocking end of a door. Connects, and connects again, by itself; says so each time.

    The socket is a plain one that the loop watches. A ZeroMQ descriptor tells of news once (it is edge-triggered), and
    any call on the socket may swallow that; so after every call the socket is asked again whether something is there.

    libzmq gives a connection up for good when a byte of it is damaged, and when an ERROR comes in the handshake, which
    anybody on the way can send. Neither may silence this end for ever. When libzmq does not announce another attempt, a
    new socket takes over; and an ERROR counts only after the door has proven it (``knocking.is_refused``).
    """

    def __init__(
        self, context: Context, endpoint: str, identity: bytes, limit_bytes: int, pair: KeyPair | None = None
    ) -> None:
        """``pair``: ours, for a door that has a lock (its public key is in the endpoint)."""
        super().__init__(CONTROL_QUEUE)
        self._context, self._identity, self._limit_bytes = context, identity, limit_bytes
        self._endpoint, self._pair = endpoint, pair
        self._is_lost = False  # the connection
        self._is_turned_away = False  # by a door without a lock
        self._moves = False  # the next connection is to be made with another key of the door's
        self._socket: Socket | None = None  # None: there was no descriptor for a new one
        self._knocks_again: asyncio.TimerHandle | None = None
        self._doubts: asyncio.Task[None] | None = None  # whether it was the door that turned us away
        self._knock()

    def _knock(self) -> None:
        self._moves = self._is_lost = self._is_turned_away = False
        made = self._context.socket(zmq.DEALER)
        set_options(made, self._limit_bytes, CONTROL_QUEUE, _LINGER_MS)
        made.set(zmq.IDENTITY, self._identity)
        address = unlocked(made, self._endpoint, self._pair)
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
            connect(made, address)
        except ConfigError:
            self.close()
            raise
        self._look_again()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """False: not connected, or the other end does not read and the queue is full."""
        sent = self._socket is not None and send_now(self._socket, frames)
        self._look_again()
        return sent

    def move(self, endpoint: str) -> None:
        """Knock there from the next connection on; the one that stands is kept."""
        self._moves |= endpoint != self._endpoint
        self._endpoint = endpoint

    def renew(self, pair: KeyPair | None = None) -> None:
        """Hang up and knock again: DOWN at once, UP when the new connection stands. With a new socket: the former
        connection's end may come late, and must not be taken for the new one's. ``pair``: ours from now on."""
        self._pair = pair or self._pair
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

    def _knock_later(self, pause_s: float) -> None:
        """Knock with a new socket then, unless libzmq announces before that it connects again."""
        self._knock_not()
        self._knocks_again = self._loop.call_later(pause_s, self._replace)

    def _knock_not(self) -> None:
        if self._knocks_again is not None:
            self._knocks_again.cancel()
            self._knocks_again = None

    def _replace(self) -> None:
        if self._socket is not None and has(self._socket, zmq.POLLIN):  # what came before the end is taken first
            self._ready.set()
            self._knock_later(_KNOCK_AGAIN_S)
            return
        self.close()
        self._knock_as_soon_as_possible()

    async def _doubt(self) -> None:
        """Ask the door itself whether it turned us away."""
        assert self._pair is not None
        is_proven = await asyncio.to_thread(is_refused, self._endpoint, self._pair)
        self._arrived.append(Link.TURNED_AWAY if is_proven else Link.UNHEARD)
        self._ready.set()
        if not is_proven:
            self._knock_later(_DOUBT_S)

    def close(self) -> None:
        """Close the socket. End the task that receives first: nothing will wake it any more."""
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
        for event in self._monitor.events():  # after the message: UP is told before what came over that connection
            self._happened(event)
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        elif self._is_lost and self._moves:
            self.close()
            self._knock_as_soon_as_possible()
        return frames is not None

    def _happened(self, event: zmq.Event) -> None:
        """Take an event of the socket's monitor."""
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
        """An ERROR came in the handshake. libzmq knocks no more."""
        if self._pair is None:
            self._is_turned_away = True
            self._arrived.append(Link.TURNED_AWAY)
        elif self._doubts is None:
            self._doubts = self._loop.create_task(self._doubt(), name="was it the door?")

    def _look_again(self) -> None:
        if self._socket is not None and (has(self._socket, zmq.POLLIN) or has(self._monitor.socket, zmq.POLLIN)):
            self._ready.set()
