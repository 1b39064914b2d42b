"""Sending end of data edges. It implements ZMTP itself, so that a hop costs one thread wake-up: the receiver's.

The thread that calls ``send`` writes directly whatever the kernel accepts; libzmq would wake a thread of its own for
that. Each channel also has a background thread, which usually sleeps and which no sender waits for. It connects and
reconnects, writes what the kernel did not accept immediately, and encrypts large messages while the caller computes.

If the listener has a Unix socket on this host (``unix_socket``), that is used, and nothing is encrypted.
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

DATA_QUEUE: Final = 4  # Messages, each up to many MB; the broker bounds the steps in flight anyway.
_HANDSHAKE_S: Final = 3.0
# Kernel buffer between two processes on this host, if the kernel allows it; TCP buffers grow to about this size.
_NEARBY_BYTES: Final = 4 << 20
_CLOSE_S: Final = 1.0
_COPIED: Final = 64 << 10  # Frames of unsent messages below this size are copied.
_SEALED_ASIDE: Final = 64 << 10  # Encrypting more than this takes longer than waking the background thread.


class PushChannel:
    """Sender of one directed edge in one epoch, for one thread.

    A token in the endpoint is sent as the password of the handshake. If the peer rejects it, the channel stops
    reconnecting; otherwise it would retry for ever as if the peer were merely absent. If the endpoint has a public key,
    the handshake is CURVE with our own ``pair``. If it has a ticket, the connection goes through a relay
    (``rendezvous``), but the handshake is still with the listener itself.
    """

    def __init__(self, endpoint: str, queue: int = DATA_QUEUE, *, pair: KeyPair | None = None) -> None:
        self.endpoint, key = address_and_key(endpoint)
        address, self._ticket = without_ticket(self.endpoint)
        if self._ticket and not is_ticket(self._ticket):
            raise ConfigError(f"the ticket in an endpoint at {address} is invalid: it must have 32 digits (0-9, a-f)")
        self._place = place_of(address if self._ticket else self.endpoint)
        self._key = key
        self._tries_nearby = True  # Whether the next attempt uses the Unix socket, if there is one.
        self._knocks = knocks(self.endpoint, key, pair)
        self._queue = queue
        self._lock = threading.Lock()  # Protects everything below except the wake-up descriptors.
        self._socket: socket.socket | None = None  # Connected, with the handshake complete.
        self._session: Session | None = None  # Encrypts frames; None without CURVE.
        self._first_seen: Seen | None = None  # At the handshake, which the peer answers immediately.
        self._waiting: deque[_Waiting] = deque()  # Accepted but unsent messages; the first may be partly sent.
        self._is_asked = False  # The caller waits for space in the queue.
        self._closes_at: float | None = None  # Deadline of ``close``: unsent messages are dropped then.
        self._num_users = 2  # Of the wake-up descriptors: the owner and the background thread.
        self._room = Wake()
        self._wake = Wake()  # Wakes the background thread.
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Accept a message for sending. Return False if the peer is not connected or the queue is full.

        Buffers above 64 KB are not copied: do not write to them afterwards.
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
        """Whether a message would be accepted now. If not, ``fileno`` becomes readable as soon as one would be."""
        with self._lock:
            self._room.clear()
            self._is_asked = not self._has_room
            return self._has_room

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message would be accepted. Return False on timeout."""
        if not self.asks_for_room():
            wait_for(time.monotonic() + timeout_s, self._room)
        return self.asks_for_room()

    def fileno(self) -> int:
        """Return the descriptor described in ``poll_writable``."""
        return self._room.fileno()

    def seen(self) -> Seen | None:
        """Return the kernel's measurements of the connection; callable from any thread.

        The round trip is that of the handshake, because a peer that only receives lets its kernel delay
        acknowledgements. None if not connected, connected through a relay, or not TCP.
        """
        with self._lock, contextlib.suppress(OSError):
            now = None if self._socket is None else seen_of(self._socket)
            if now is not None and self._first_seen is not None:
                return now._replace(round_trip_s=self._first_seen.round_trip_s)
        return None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection. Accepted messages may still be sent for ``linger_s``, in the background."""
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
        """Drop the connection; the background thread notices that by itself."""
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
                    self._tries_nearby = not is_nearby  # Reset when the handshake succeeds.
                    session = self._shaken(made, Word(self._key) if is_nearby else self._knocks())
                    self._tries_nearby, pause_s = True, PAUSE_S
                    self._serve(made, session)
                if self._is_over():  # The wake-up for closing is already consumed, and ``close`` waits for this thread.
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
        """Connect to the Unix socket if there is one, else to any of the host's addresses, or through the relay. Raises
        OSError."""
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
        """Send our ticket to the relay and wait for the receiver. Raises OSError."""
        said = preamble(Side.SENDS, self._ticket)
        if made.send(said) < len(said):
            raise BlockingIOError(errno.EAGAIN, "not even the ticket is read")
        self._await(made, select.POLLIN, time.monotonic() + _HANDSHAKE_S)
        if made.recv(len(JOINED)) != JOINED:
            raise ConnectionResetError(errno.ECONNRESET, "disconnected")

    def _connected_nearby(self, path: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            set_options(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEARBY_BYTES)
            made.connect(path)
            if not is_own(made):
                raise PermissionError(errno.EPERM, "a process of another user")
        except OSError:
            made.close()
            raise
        return made

    def _shaken(self, made: socket.socket, knocker: Knocker) -> Session | None:
        """Complete the handshake. Raises OSError for temporary failures, AuthRejected for permanent ones."""
        inlet = Inlet(HANDSHAKE_BYTES, knocker)
        give_up_at = time.monotonic() + _HANDSHAKE_S
        answer = greeting(knocker.name, listens=False) + as_command(knocker.first)
        while True:
            if answer and made.send(answer) < len(answer):
                raise BlockingIOError(errno.EAGAIN, "not even the handshake is read")
            self._await(made, select.POLLIN, give_up_at)
            if not (came := made.recv(HANDSHAKE_BYTES)):
                raise ConnectionResetError(errno.ECONNRESET, "disconnected")
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
        """Whether the rejection is permanent. Through a relay it is, too: only the listener itself can prove it."""
        return made.family != socket.AF_UNIX

    def _await(self, made: socket.socket, event: int, give_up_at: float) -> None:
        """Wait for the other end. Raises OSError on timeout, or when this channel is closed."""
        news = wait_for(give_up_at, self._wake, (made, event))
        self._wake.clear()
        if made.fileno() not in news:
            raise TimeoutError(errno.ETIMEDOUT, "closed" if self._is_over() else "no answer")

    def _serve(self, made: socket.socket, session: Session | None) -> None:
        """Send queued messages until the connection ends. Raises OSError."""
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
        """Wait for an event and handle it. Return False when the connection has ended."""
        with self._lock:
            first = self._waiting[0] if self._waiting else None
            give_up_at = self._closes_at
        news = wait_for(
            give_up_at, self._wake, (made, select.POLLIN if first is None else select.POLLIN | select.POLLOUT)
        )
        if self._wake.fileno() in news:
            self._wake.clear()
        came = news.get(made.fileno(), 0)
        if came & ~select.POLLOUT:  # The other end never sends anything, so this is the end of the connection.
            return False
        if came and first is not None:
            first.seal()
        with self._lock:
            if self._socket is made and came and first is not None and first.write(made):
                self._waiting.popleft()
                self._tell_room()
            return self._socket is made


class _Waiting:
    """An unsent message, or the rest of one."""

    def __init__(self, frames: Sequence[Bytes], session: Session | None = None, sent: int = 0) -> None:
        """``session``: encrypts the frames later. Without it ``frames`` are encoded already, and ``sent`` bytes of them
        are sent."""
        self._parts: list[Bytes] = [frame if len(frame) > _COPIED else bytes(frame) for frame in frames]
        self._session = session
        self._drop(sent)

    def seal(self) -> None:
        if self._session is not None:
            self._parts, self._session = written(self._parts, self._session), None

    def write(self, connected: socket.socket) -> bool:
        """Write what the kernel accepts. Return whether everything is written. Raises OSError."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._drop(connected.sendmsg(self._parts))
        return not self._parts

    def _drop(self, num_bytes: int) -> None:
        while self._parts and num_bytes >= len(self._parts[0]):
            num_bytes -= len(self._parts.pop(0))
        if num_bytes:
            self._parts[0] = memoryview(self._parts[0])[num_bytes:]
