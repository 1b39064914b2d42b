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
from swarm.wire.tcp_info import TcpInfo, read_tcp_info
from swarm.wire.tensors import Bytes
from swarm.wire.transport.client_handshake import AuthRejected, ClientMechanism, PlainClient, client_mechanism
from swarm.wire.transport.connect import LONGEST_PAUSE_S, PAUSE_S, connect_any, parse_endpoint, wait_for_any
from swarm.wire.transport.connection import set_options
from swarm.wire.transport.curve_session import CurveSession
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.keys import KeyPair, address_and_key, split_ticket
from swarm.wire.transport.relay.rendezvous import JOINED, Side, encode_preamble, is_ticket
from swarm.wire.transport.unix_socket import find_socket, is_same_user
from swarm.wire.transport.zmtp import HANDSHAKE_BYTES, ZmtpDecoder, command_frame, encode_greeting, encode_message

DATA_QUEUE: Final = 4  # Messages, each up to many MB; the broker also bounds the steps in flight.
_HANDSHAKE_S: Final = 3.0
# Kernel buffer between two processes on this host, if the kernel allows it; TCP buffers grow to about this size.
_UNIX_BUFFER_BYTES: Final = 4 << 20
_COPY_BELOW: Final = 64 << 10  # Frames of unsent messages below this size are copied.
_ENCRYPT_IN_BACKGROUND: Final = 64 << 10  # Encrypting more than this takes longer than waking the background thread.


class PushChannel:
    """Sender of one directed edge in one epoch, for one thread.

    A token in the endpoint is sent as the password of the handshake. If the peer rejects it, the channel stops
    reconnecting; otherwise it would retry for ever as if the peer were merely absent. If the endpoint has a public key,
    the handshake is CURVE with our own ``pair``. If it has a ticket, the connection goes through a relay
    (``rendezvous``), but the handshake is still with the listener itself.
    """

    def __init__(self, endpoint: str, queue: int = DATA_QUEUE, *, pair: KeyPair | None = None) -> None:
        self.endpoint, key = address_and_key(endpoint)
        address, self._ticket = split_ticket(self.endpoint)
        if self._ticket and not is_ticket(self._ticket):
            raise ConfigError(f"the ticket in an endpoint at {address} is invalid: it must have 32 digits (0-9, a-f)")
        self._address = parse_endpoint(address if self._ticket else self.endpoint)
        self._key = key
        self._try_unix = True  # Whether the next attempt uses the Unix socket, if there is one.
        self._new_mechanism = client_mechanism(self.endpoint, key, pair)
        self._queue = queue
        self._lock = threading.Lock()  # Protects everything below except the wake-up descriptors.
        self._socket: socket.socket | None = None  # Connected, with the handshake complete.
        self._session: CurveSession | None = None  # Encrypts frames; None without CURVE.
        # State of the connection at the handshake, which the peer answers immediately.
        self._handshake_info: TcpInfo | None = None
        self._unsent: deque[_Unsent] = deque()  # Accepted but unsent messages; the first may be partly sent.
        self._is_space_requested = False  # The caller waits for space in the queue.
        self._closes_at: float | None = None  # Deadline of ``close``: unsent messages are dropped then.
        self._num_users = 2  # Users of the wake-up descriptors: the owner and the background thread.
        self._space_wakeup = WakeupFd()
        self._wakeup = WakeupFd()  # Wakes the background thread.
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """Accept a message for sending. Return False if the peer is not connected or the queue is full.

        Buffers above 64 KB are not copied: do not write to them afterwards.
        """
        return self.send_all((frames,))

    def send_all(self, messages: Sequence[Sequence[Bytes]]) -> bool:
        """Accept all these messages together, which takes one place in the queue; or none, like ``send``."""
        with self._lock:
            connected, session = self._socket, self._session
            if connected is None or len(self._unsent) >= self._queue:
                return False
            if session is not None and (self._unsent or _count_bytes(messages) > _ENCRYPT_IN_BACKGROUND):
                self._unsent.append(_Unsent((), plain=messages, session=session))
            elif self._unsent:
                self._unsent.append(_Unsent(_encode(messages, None)))
            else:
                parts = _encode(messages, session)
                try:
                    sent = connected.sendmsg(parts)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError:
                    self._drop_connection()
                    return False
                if sent == sum(map(len, parts)):
                    return True
                self._unsent.append(_Unsent(parts, sent=sent))
        self._wakeup.set()
        return True

    def poll_writable(self) -> bool:
        """Whether a message would be accepted now. If not, ``fileno`` becomes readable as soon as one would be."""
        with self._lock:
            self._space_wakeup.clear()
            self._is_space_requested = not self._has_space
            return self._has_space

    @property
    def is_ready(self) -> bool:
        """Whether a message would be accepted now. Cheaper than ``poll_writable``, and arms no wake-up."""
        with self._lock:
            return self._has_space

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message would be accepted. Return False on timeout."""
        if not self.poll_writable():
            wait_for_any(time.monotonic() + timeout_s, self._space_wakeup)
        return self.poll_writable()

    def fileno(self) -> int:
        """Return the descriptor to poll while no message would be accepted (see ``poll_writable``)."""
        return self._space_wakeup.fileno()

    def tcp_info(self) -> TcpInfo | None:
        """Return the kernel's measurements of the connection; callable from any thread.

        The round trip is that of the handshake, because a peer that only receives lets its kernel delay
        acknowledgements. None if not connected, connected through a relay, or not TCP.
        """
        with self._lock, contextlib.suppress(OSError):
            now = None if self._socket is None else read_tcp_info(self._socket)
            if now is not None and self._handshake_info is not None:
                return now._replace(round_trip_s=self._handshake_info.round_trip_s)
        return None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection. Accepted messages may still be sent for ``linger_s``, in the background.

        Without it, nothing is sent once this returns. The background thread ends by itself: waiting for it on busy
        cores would delay a stage that changes its neighbour.
        """
        with self._lock:
            self._closes_at = time.monotonic() + linger_s
            if not linger_s:
                self._drop_connection()
        self._wakeup.set()
        self._release_wakeups()

    @property
    def _has_space(self) -> bool:
        return self._socket is not None and len(self._unsent) < self._queue

    def _signal_space(self) -> None:
        if self._is_space_requested and self._has_space:
            self._is_space_requested = False
            self._space_wakeup.set()

    def _drop_connection(self) -> None:
        """Drop the connection; the background thread notices that by itself."""
        self._unsent.clear()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket = self._session = None

    def _release_wakeups(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            self._space_wakeup.close()
            self._wakeup.close()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = PAUSE_S
        try:
            while not self._is_closed():
                with contextlib.suppress(OSError), self._connect() as made:
                    is_nearby = made.family == socket.AF_UNIX
                    self._try_unix = not is_nearby  # Reset when the handshake succeeds.
                    session = self._handshake(made, PlainClient(self._key) if is_nearby else self._new_mechanism())
                    self._try_unix, pause_s = True, PAUSE_S
                    self._serve(made, session)
                # The wake-up for closing is already consumed: no pause then.
                if self._is_closed():
                    break
                wait_for_any(time.monotonic() + pause_s, self._wakeup)
                self._wakeup.clear()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except AuthRejected:
            pass
        finally:
            self._release_wakeups()

    def _is_closed(self) -> bool:
        with self._lock:
            closes_at, waits = self._closes_at, bool(self._unsent)
        return closes_at is not None and (not waits or time.monotonic() >= closes_at)

    def _connect(self) -> socket.socket:
        """Connect to the Unix socket if there is one, else to any of the host's addresses, or through the relay. Raises
        OSError."""
        path = find_socket(self._key, self._address[1]) if self._try_unix and not self._ticket else None
        if path is not None:
            with contextlib.suppress(OSError):
                return self._connect_unix(path)
        sock = connect_any(self._address, self._wait_for_event)
        try:
            if self._ticket:
                self._wait_for_join(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def _wait_for_join(self, sock: socket.socket) -> None:
        """Send our ticket to the relay and wait for the receiver. Raises OSError."""
        line = encode_preamble(Side.SENDER, self._ticket)
        if sock.send(line) < len(line):
            raise BlockingIOError(errno.EAGAIN, "not even the ticket is read")
        self._wait_for_event(sock, select.POLLIN, time.monotonic() + _HANDSHAKE_S)
        if sock.recv(len(JOINED)) != JOINED:
            raise ConnectionResetError(errno.ECONNRESET, "disconnected")

    def _connect_unix(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            set_options(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            sock.connect(path)
            if not is_same_user(sock):
                raise PermissionError(errno.EPERM, "a process of another user")
        except OSError:
            sock.close()
            raise
        return sock

    def _handshake(self, sock: socket.socket, mechanism: ClientMechanism) -> CurveSession | None:
        """Complete the handshake. Raises OSError for temporary failures, AuthRejected for permanent ones."""
        decoder = ZmtpDecoder(HANDSHAKE_BYTES, mechanism)
        give_up_at = time.monotonic() + _HANDSHAKE_S
        answer = encode_greeting(mechanism.name, is_server=False) + command_frame(mechanism.first)
        while True:
            if answer and sock.send(answer) < len(answer):
                raise BlockingIOError(errno.EAGAIN, "not even the handshake is read")
            self._wait_for_event(sock, select.POLLIN, give_up_at)
            if not (received := sock.recv(HANDSHAKE_BYTES)):
                raise ConnectionResetError(errno.ECONNRESET, "disconnected")
            decoder.feed(received)
            try:
                is_through = decoder.advance_handshake()
            except WireError as error:
                if isinstance(error, AuthRejected) and self._is_final(sock):
                    raise
                raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from None
            if is_through:
                return mechanism.session
            answer, decoder.answer = decoder.answer, b""

    def _is_final(self, sock: socket.socket) -> bool:
        """Whether the rejection is permanent. Through a relay it is, too: only the listener itself can prove it."""
        return sock.family != socket.AF_UNIX

    def _wait_for_event(self, sock: socket.socket, event: int, give_up_at: float) -> None:
        """Wait for the other end. Raises OSError on timeout, or when this channel is closed."""
        events = wait_for_any(give_up_at, self._wakeup, (sock, event))
        self._wakeup.clear()
        if sock.fileno() not in events:
            raise TimeoutError(errno.ETIMEDOUT, "closed" if self._is_closed() else "no answer")

    def _serve(self, sock: socket.socket, session: CurveSession | None) -> None:
        """Send queued messages until the connection ends. Raises OSError."""
        first_seen = None if self._ticket else read_tcp_info(sock)
        with self._lock:
            self._socket, self._session, self._handshake_info = sock, session, first_seen
            self._signal_space()
        try:
            while not self._is_closed() and self._serve_once(sock):
                pass
        finally:
            with self._lock:
                self._drop_connection()

    def _serve_once(self, sock: socket.socket) -> bool:
        """Wait for an event and handle it. Return False when the connection has ended."""
        with self._lock:
            first = self._unsent[0] if self._unsent else None
            give_up_at = self._closes_at
        events = wait_for_any(
            give_up_at, self._wakeup, (sock, select.POLLIN if first is None else select.POLLIN | select.POLLOUT)
        )
        if self._wakeup.fileno() in events:
            self._wakeup.clear()
        ready = events.get(sock.fileno(), 0)
        if ready & ~select.POLLOUT:  # The other end never sends anything, so this is the end of the connection.
            return False
        if ready and first is not None:
            first.encrypt()
        with self._lock:
            if self._socket is sock and ready and first is not None and first.write(sock):
                self._unsent.popleft()
                self._signal_space()
            return self._socket is sock


def _encode(messages: Sequence[Sequence[Bytes]], session: CurveSession | None) -> list[Bytes]:
    return [part for frames in messages for part in encode_message(frames, session)]


def _count_bytes(messages: Sequence[Sequence[Bytes]]) -> int:
    return sum(len(frame) for frames in messages for frame in frames)


def _keep(frame: Bytes) -> Bytes:
    """Copy a small frame, which its owner may write to again."""
    return frame if len(frame) > _COPY_BELOW else bytes(frame)


class _Unsent:
    """Unsent messages that were accepted together, or the rest of them."""

    def __init__(
        self,
        parts: Sequence[Bytes],
        sent: int = 0,
        *,
        plain: Sequence[Sequence[Bytes]] = (),
        session: CurveSession | None = None,
    ) -> None:
        """``parts`` are encoded already, and ``sent`` bytes of them are sent. ``session`` encrypts the messages in
        ``plain`` later."""
        self._parts = list(map(_keep, parts))
        self._plain = [list(map(_keep, frames)) for frames in plain]
        self._session = session
        self._drop(sent)

    def encrypt(self) -> None:
        if self._session is not None:
            self._parts, self._session, self._plain = _encode(self._plain, self._session), None, []

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
