"""The sending end of data edges. It speaks ZMTP itself, so that a hop takes one wake-up: the receiver's.

What the kernel takes at once is written by the thread that calls ``send``; libzmq would wake a thread of its own for
it. Each channel has a thread, too, which nobody waits for and which sleeps as a rule: it connects, again and again,
writes the rest of what the kernel did not take at once, and seals what takes long, while the caller computes.

Where the door has a back door on this host (``nearby``), that is taken, and nothing is sealed.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from swarm.errors import ConfigError, WireError
from swarm.wire.door.connection import set_options
from swarm.wire.door.dialing import LONGEST_PAUSE_S, PAUSE_S, dialled, place_of, wait_for
from swarm.wire.door.keys import KeyPair, address_and_key, without_ticket
from swarm.wire.door.knocking import Knocker, TurnedAway, Word, knocks
from swarm.wire.door.nearby import found, is_own
from swarm.wire.door.relay.rendezvous import JOINED, Side, is_ticket, preamble
from swarm.wire.door.sealing import Session
from swarm.wire.door.watch import Wake
from swarm.wire.door.zmtp import HANDSHAKE_BYTES, Inlet, as_command, greeting, written
from swarm.wire.seen import Seen, seen_of
from swarm.wire.tensors import Bytes

DATA_QUEUE: Final = 4  # messages, each up to many MB; the broker bounds the steps in flight anyway
_HANDSHAKE_S: Final = 3.0
_NEARBY_BYTES: Final = 4 << 20  # that the kernel holds between two processes here, if it is allowed to; tcp's grows so
_CLOSE_S: Final = 1.0
_COPIED: Final = 64 << 10  # of what is left of a message, frames below this are copied
_SEALED_ASIDE: Final = 64 << 10  # sealing more takes longer than waking a thread


class PushChannel:
    """One directed edge, for one thread. One per edge and epoch. A word in the endpoint is named in the handshake, as a
    password. If it is the wrong one, the other end says so, and this one knocks no more: it can't send for ever, as if
    nobody were there. Where the endpoint has a public key, the door has a lock, and we show it our own ``pair``. Where
    it has a ticket, the door is reached by a relay (``rendezvous``), and it is still the door that we shake hands
    with."""

    def __init__(self, endpoint: str, queue: int = DATA_QUEUE, *, pair: KeyPair | None = None) -> None:
        self.endpoint, key = address_and_key(endpoint)
        address, self._ticket = without_ticket(self.endpoint)
        if self._ticket and not is_ticket(self._ticket):
            raise ConfigError(f"the ticket in an endpoint at {address} is none: 32 digits (0-9, a-f) are one")
        self._place = place_of(address if self._ticket else self.endpoint)
        self._key = key
        self._tries_nearby = True
        self._knocks = knocks(self.endpoint, key, pair)
        self._queue = queue
        self._lock = threading.Lock()  # of all that follows but the wakes
        self._socket: socket.socket | None = None  # connected, and through the handshake
        self._session: Session | None = None
        self._first_seen: Seen | None = None  # at the handshake, which is answered at once
        self._waiting: deque[_Waiting] = deque()  # messages that were taken and have not left; the first maybe in part
        self._is_asked = False  # for room
        self._closes_at: float | None = None
        self._num_users = 2  # of the wakes: who made this, and the thread
        self._room = Wake()
        self._wake = Wake()  # the own thread's
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Hand a message over if it can be taken now; False if the peer is away or its queue is full.

        Buffers above 64 KB are not copied: they must not be written to afterwards.
        """
        with self._lock:
            connected, session = self._socket, self._session
            if connected is None or len(self._waiting) >= self._queue:
                return False
            if session is not None and (self._waiting or sum(map(len, frames)) > _SEALED_ASIDE):
                self._waiting.append(_Waiting(frames, session))
            elif self._waiting:
                self._waiting.append(_Waiting(written(frames, None)))
            else:
                parts = written(frames, session)
                try:
                    sent = connected.sendmsg(parts)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError:
                    self._lose()
                    return False
                if sent == sum(map(len, parts)):
                    return True
                self._waiting.append(_Waiting(parts, sent=sent))
        self._wake.set()
        return True

    def asks_for_room(self) -> bool:
        """Can a message be taken now? If not, ``fileno`` can be read as soon as one can."""
        with self._lock:
            self._room.clear()
            self._is_asked = not self._has_room
            return self._has_room

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message can be taken. False: the time passed."""
        if not self.asks_for_room():
            wait_for(time.monotonic() + timeout_s, self._room)
        return self.asks_for_room()

    def fileno(self) -> int:
        """See ``asks_for_room``."""
        return self._room.fileno()

    def seen(self) -> Seen | None:
        """What was seen of the way there, from any thread: the time there and back at the handshake, for whoever only
        listens lets the kernel answer late; and what has passed since. None: not connected, by relay, or not by tcp."""
        with self._lock, contextlib.suppress(OSError):
            now = None if self._socket is None else seen_of(self._socket)
            if now is not None and self._first_seen is not None:
                return now._replace(round_trip_s=self._first_seen.round_trip_s)
        return None

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection. What was taken may still leave for so long, without anybody's waiting for it."""
        with self._lock:
            self._closes_at = time.monotonic() + linger_s
        self._wake.set()
        if not linger_s:
            self._thread.join(_CLOSE_S)
        self._leave()

    @property
    def _has_room(self) -> bool:
        return self._socket is not None and len(self._waiting) < self._queue

    def _tell_room(self) -> None:
        if self._is_asked and self._has_room:
            self._is_asked = False
            self._room.set()

    def _lose(self) -> None:
        """The connection has ended: its thread finds out by itself."""
        self._waiting.clear()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket = self._session = None

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            self._room.close()
            self._wake.close()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = PAUSE_S
        try:
            while not self._is_over():
                with contextlib.suppress(OSError), self._connected() as made:
                    is_nearby = made.family == socket.AF_UNIX
                    self._tries_nearby = not is_nearby  # unless it works
                    session = self._shaken(made, Word(self._key) if is_nearby else self._knocks())
                    self._tries_nearby, pause_s = True, PAUSE_S
                    self._serve(made, session)
                if self._is_over():  # the wake for it is spent, and whoever closes waits for us
                    break
                wait_for(time.monotonic() + pause_s, self._wake)
                self._wake.clear()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except TurnedAway:
            pass
        finally:
            self._leave()

    def _is_over(self) -> bool:
        with self._lock:
            closes_at, waits = self._closes_at, bool(self._waiting)
        return closes_at is not None and (not waits or time.monotonic() >= closes_at)

    def _connected(self) -> socket.socket:
        """Connect: to the back door where there is one, else to any of the addresses that the host has; by a relay,
        be joined there. Raises OSError."""
        nearby = found(self._key, self._place[1]) if self._tries_nearby and not self._ticket else None
        if nearby is not None:
            with contextlib.suppress(OSError):
                return self._connected_nearby(nearby)
        made = dialled(self._place, self._await)
        try:
            if self._ticket:
                self._be_joined(made)
        except OSError:
            made.close()
            raise
        return made

    def _be_joined(self, made: socket.socket) -> None:
        """Show the relay our ticket, and wait for who receives. Raises OSError."""
        said = preamble(Side.SENDS, self._ticket)
        if made.send(said) < len(said):
            raise BlockingIOError(errno.EAGAIN, "not even the ticket is read")
        self._await(made, select.POLLIN, time.monotonic() + _HANDSHAKE_S)
        if made.recv(len(JOINED)) != JOINED:
            raise ConnectionResetError(errno.ECONNRESET, "hung up on")

    def _connected_nearby(self, path: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            set_options(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEARBY_BYTES)
            made.connect(path)
            if not is_own(made):
                raise PermissionError(errno.EPERM, "somebody else's process")
        except OSError:
            made.close()
            raise
        return made

    def _shaken(self, made: socket.socket, knocker: Knocker) -> Session | None:
        """Go through the handshake. Raises OSError if that is not possible now, TurnedAway if it never will be."""
        inlet = Inlet(HANDSHAKE_BYTES, knocker)
        give_up_at = time.monotonic() + _HANDSHAKE_S
        answer = greeting(knocker.name, listens=False) + as_command(knocker.first)
        while True:
            if answer and made.send(answer) < len(answer):
                raise BlockingIOError(errno.EAGAIN, "not even the handshake is read")
            self._await(made, select.POLLIN, give_up_at)
            if not (came := made.recv(HANDSHAKE_BYTES)):
                raise ConnectionResetError(errno.ECONNRESET, "hung up on")
            inlet.feed(came)
            try:
                is_through = inlet.shake()
            except WireError as error:
                if isinstance(error, TurnedAway) and self._is_final(made):
                    raise
                raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from None
            if is_through:
                return knocker.session
            answer, inlet.answer = inlet.answer, b""

    def _is_final(self, made: socket.socket) -> bool:
        """Whether the door itself turned this channel away, for good. By a relay, too: only the door can prove that."""
        return made.family != socket.AF_UNIX

    def _await(self, made: socket.socket, event: int, give_up_at: float) -> None:
        """Wait for the other end. Raises OSError if that takes too long, or this channel is closed meanwhile."""
        news = wait_for(give_up_at, self._wake, (made, event))
        self._wake.clear()
        if made.fileno() not in news:
            raise TimeoutError(errno.ETIMEDOUT, "closed" if self._is_over() else "no answer")

    def _serve(self, made: socket.socket, session: Session | None) -> None:
        """Be connected, until either end has had enough. Raises OSError."""
        first_seen = None if self._ticket else seen_of(made)
        with self._lock:
            self._socket, self._session, self._first_seen = made, session, first_seen
            self._tell_room()
        try:
            while not self._is_over() and self._goes_on(made):
                pass
        finally:
            with self._lock:
                self._lose()

    def _goes_on(self, made: socket.socket) -> bool:
        """Wait for something to do, and do it. False: the connection has ended."""
        with self._lock:
            first = self._waiting[0] if self._waiting else None
            give_up_at = self._closes_at
        news = wait_for(
            give_up_at, self._wake, (made, select.POLLIN if first is None else select.POLLIN | select.POLLOUT)
        )
        if self._wake.fileno() in news:
            self._wake.clear()
        came = news.get(made.fileno(), 0)
        if came & ~select.POLLOUT:  # there is nothing that the other end could have to say
            return False
        if came and first is not None:
            first.seal()
        with self._lock:
            if self._socket is made and came and first is not None and first.write(made):
                self._waiting.popleft()
                self._tell_room()
            return self._socket is made


class _Waiting:
    """A message, or what is left of it."""

    def __init__(self, frames: Sequence[Bytes], session: Session | None = None, sent: int = 0) -> None:
        """``session``: by which it is still to be sealed. Else ``frames`` are its parts as they travel, of which so
        many bytes have left."""
        self._parts: list[Bytes] = [frame if len(frame) > _COPIED else bytes(frame) for frame in frames]
        self._session = session
        self._drop(sent)

    def seal(self) -> None:
        if self._session is not None:
            self._parts, self._session = written(self._parts, self._session), None

    def write(self, connected: socket.socket) -> bool:
        """Write what the kernel takes. Is all of it gone? Raises OSError."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._drop(connected.sendmsg(self._parts))
        return not self._parts

    def _drop(self, num_bytes: int) -> None:
        while self._parts and num_bytes >= len(self._parts[0]):
            num_bytes -= len(self._parts.pop(0))
        if num_bytes:
            self._parts[0] = memoryview(self._parts[0])[num_bytes:]
