"""Relay that forwards bytes between a sender and a receiver that can only make outgoing connections.

Both connect here and send a ticket (``rendezvous``). When they are joined, bytes are forwarded unchanged in both
directions. The handshake is between the two ends: if the receiver requires CURVE, only encrypted bytes pass the relay.
Back-pressure is TCP's: what the receiver does not read fills one pipe, and then stays with the sender.

The relay has a thread of its own, and large messages move from socket to socket inside the kernel (``splice``), so that
they don't delay the rest of the process.

Limits: a connection without a complete ticket counts as a handshake in progress (``accept``) and has ``_PREAMBLE_S``;
``rendezvous`` limits waiting and joined ones. The last ``RESERVE`` file descriptors are not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from swarm.errors import WireError
from swarm.wire.transport.accept import RESERVE, HandshakeLimiter, source_of
from swarm.wire.transport.connection import set_options
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.relay.rendezvous import JOINED, PREAMBLE_BYTES, Rendezvous, decode_preamble

KEEPALIVE_S: Final = 20  # TCP keepalive of waiting connections: routers silently drop idle ones.
_PREAMBLE_S: Final = 3.0
_MAX_HANDSHAKES: Final = 256
_ACCEPT_AT_ONCE: Final = 64
_SWEEP_S: Final = 1.0
_CLOSE_S: Final = 2.0
_COPY_BYTES: Final = 64 << 10  # A read that fills this buffer switches the direction to a pipe.
_PIPE_BYTES: Final = 256 << 10
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ
_TURNS: Final = 8  # Reads of one direction before others get their turn.
_READS, _WRITES = selectors.EVENT_READ, selectors.EVENT_WRITE


class Relay:
    """The relay. ``bound``: listening sockets, which it closes. It joins no connections before ``admit``. ``on_error``:
    called from its thread if that ends by a bug."""

    def __init__(self, bound: Sequence[socket.socket], on_error: Callable[[BaseException], None]) -> None:
        self._bound = tuple(bound)
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._wake = WakeupFd()
        self._tickets: frozenset[str] = frozenset()  # Admitted tickets.
        self._is_over = False
        self._rendezvous: Rendezvous[_RelayedConnection] = Rendezvous()
        self._handshaking: HandshakeLimiter[_RelayedConnection] = HandshakeLimiter(_MAX_HANDSHAKES)
        self._ends: set[_RelayedConnection] = set()  # All open connections.
        self._scratch = memoryview(bytearray(_COPY_BYTES))
        self._is_accepting = False  # Whether new connections are accepted.
        self._clock = 0.0  # Seconds in which this process was running and swept.
        self._swept_at = time.monotonic()
        self._num_refused = 0
        self._num_bytes = self._num_joined = self._num_waiting = 0
        self._selector.register(self._wake, _READS)
        self._resume_accepting()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def admit(self, tickets: frozenset[str]) -> None:
        """Join connections with these tickets from now on, and disconnect all others immediately. Callable from any
        thread."""
        self._tickets = tickets
        self._wake.set()

    def statistics(self) -> dict[str, float]:
        """Return the current numbers of joined pairs and waiting receivers, and totals of forwarded bytes and refused
        connections."""
        return {
            "joined": self._num_joined,
            "waiting": self._num_waiting,
            "bytes": self._num_bytes,
            "refused": self._num_refused,
        }

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._is_over = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._wake.close()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._run_once()
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            for end in list(self._ends):
                self._close(end)
            for bound in self._bound:
                bound.close()
            self._selector.close()

    def _run_once(self) -> None:
        """Wait for events and handle them."""
        for key, events in self._selector.select(_SWEEP_S):
            if isinstance(key.data, _RelayedConnection):
                self._serve(key.data, events)
            elif key.fileobj is self._wake:
                self._wake.clear()
                for end in self._rendezvous.admit(self._tickets):
                    self._close(end)
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now = time.monotonic()
        if now - self._swept_at >= _SWEEP_S:
            self._sweep(now)
        self._num_joined, self._num_waiting = self._rendezvous.num_joined, self._rendezvous.num_waiting

    def _sweep(self, now: float) -> None:
        """Close connections that missed a deadline."""
        self._clock += min(now - self._swept_at, 2 * _SWEEP_S)
        self._swept_at = now
        for end in [end for end in self._handshaking if self._clock - end.since > _PREAMBLE_S]:
            self._refuse(end)
        for end in self._rendezvous.overdue(self._clock):
            self._end_pair(end)
        self._resume_accepting()

    def _resume_accepting(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            for bound in self._bound:
                self._selector.register(bound, _READS)

    def _pause_accepting(self) -> None:
        """Stop accepting until the next sweep: there is no free descriptor."""
        if self._is_accepting:
            self._is_accepting = False
            for bound in self._bound:
                self._selector.unregister(bound)

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            if not self._is_accepting:
                return
            try:
                connected, came_from = bound.accept()
            except BlockingIOError:
                return
            except OSError:  # No descriptor, no memory, or the peer is gone.
                self._pause_accepting()
                return
            source = source_of(came_from)
            if not _is_free(connected.fileno()):
                connected.close()
                self._pause_accepting()
            elif not self._handshaking.is_allowed(source, self._clock):
                self._num_refused += 1
                connected.close()
            else:
                self._start(connected, source)

    def _start(self, connected: socket.socket, source: str) -> None:
        try:
            set_options(connected)
        except OSError:  # Gone already.
            connected.close()
            return
        end = _RelayedConnection(connected, self._clock)
        self._ends.add(end)
        self._watch(end, _READS)
        if (gives_way := self._handshaking.add(end, source, self._clock)) is not None:
            self._refuse(gives_way)

    def _serve(self, end: _RelayedConnection, events: int) -> None:
        """Handle a readable or writable connection."""
        if end not in self._ends:  # Closed in this turn.
            return
        if end.goes_out is None or end.comes_in is None:
            self._read_preamble(end)
            return
        try:
            if events & _READS:
                self._forward(end.goes_out)
            if events & _WRITES and end in self._ends:
                self._forward(end.comes_in)
        except OSError:
            self._end_pair(end)

    def _read_preamble(self, end: _RelayedConnection) -> None:
        """Read from a connection that is not joined. It may send its preamble and nothing else; otherwise it is
        closed."""
        try:
            received = end.socket.recv(PREAMBLE_BYTES + 1 - len(end.said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if end not in self._handshaking:
            self._end_pair(end)
            return
        end.said += received
        try:
            preamble = decode_preamble(end.said) if received else None
        except WireError:
            received = b""
        if not received or (preamble is not None and not self._rendezvous.is_admitted(preamble.ticket)):
            self._refuse(end)
        elif preamble is not None:
            self._handshaking.on_success(end)
            _keep_alive(end.socket)
            for each in self._rendezvous.add(end, preamble, self._clock):
                self._close(each)
            self._join(preamble.ticket)

    def _join(self, ticket: str) -> None:
        while (pair := self._rendezvous.next_pair(ticket)) is not None:
            sender, receiver = pair
            sender.goes_out = receiver.comes_in = _Direction(sender, receiver, self._scratch)
            receiver.goes_out = sender.comes_in = _Direction(receiver, sender, self._scratch)
            if not (receiver.send(JOINED) and sender.send(JOINED)):
                self._end_pair(receiver)

    def _forward(self, direction: _Direction) -> None:
        """Forward data in one direction. Raises OSError if either end is gone."""
        self._num_bytes += direction.forward()
        if direction.is_over:
            self._end_pair(direction.source)
            return
        for end in (direction.source, direction.target):
            self._watch(end, end.wanted_events)

    def _watch(self, end: _RelayedConnection, events: int) -> None:
        if events == end.watched:
            return
        if not events:
            self._selector.unregister(end.socket)
        elif not end.watched:
            self._selector.register(end.socket, events, end)
        else:
            self._selector.modify(end.socket, events, end)
        end.watched = events

    def _refuse(self, end: _RelayedConnection) -> None:
        self._num_refused += 1
        self._end_pair(end)

    def _end_pair(self, end: _RelayedConnection) -> None:
        """Close a connection, and the one that is joined with it."""
        ticket = self._rendezvous.ticket_of(end)
        other = self._rendezvous.remove(end)
        self._close(end)
        if other is not None:
            self._close(other)
            self._join(ticket)

    def _close(self, end: _RelayedConnection) -> None:
        if end in self._ends:
            self._ends.discard(end)
            self._handshaking.on_failure(end, self._clock)
            self._watch(end, 0)
            end.close()


class _RelayedConnection:
    """An accepted connection."""

    __slots__ = ("comes_in", "goes_out", "said", "since", "socket", "watched")

    def __init__(self, connected: socket.socket, now: float) -> None:
        self.socket = connected
        self.since = now
        self.said = b""  # Received part of the preamble.
        self.goes_out: _Direction | None = None  # Set when it is joined.
        self.comes_in: _Direction | None = None
        self.watched = 0  # Events that the selector watches for.

    def send(self, words: bytes) -> bool:
        with contextlib.suppress(OSError):
            return self.socket.send(words) == len(words)
        return False

    @property
    def wanted_events(self) -> int:
        """Return the selector events to watch for on a joined connection."""
        assert self.goes_out is not None
        assert self.comes_in is not None
        return (0 if self.goes_out.num_held else _READS) | (_WRITES if self.comes_in.num_held else 0)

    def close(self) -> None:
        if self.goes_out is not None:
            self.goes_out.close()
        self.socket.close()


class _Direction:
    """One direction of a joined pair. Nothing is read while the target has not accepted everything read before."""

    def __init__(self, source: _RelayedConnection, target: _RelayedConnection, scratch: memoryview) -> None:
        self.source, self.target = source, target
        self._scratch = scratch
        self._rest = b""  # Copied bytes that the target has not accepted yet.
        # Set when large messages pass: the kernel moves their bytes through it.
        self._pipe: tuple[int, int] | None = None
        self._may_splice = hasattr(os, "splice")
        self.num_held = 0  # Bytes that the target has not accepted yet.
        self.is_over = False  # The source has closed, and everything was forwarded.

    def forward(self) -> int:
        """Forward what is possible within one turn. Return how many bytes were read. Raises OSError."""
        num_taken = 0
        for _ in range(_TURNS):
            with contextlib.suppress(BlockingIOError, InterruptedError):
                if not self.num_held:
                    num_taken += self._read()
                if self.num_held:
                    self._write()
                if not self.num_held and not self.is_over:
                    continue
            break
        return num_taken

    def _read(self) -> int:
        """Read from the source, and write copied bytes to the target immediately."""
        if self._pipe is not None:
            count = os.splice(self.source.socket.fileno(), self._pipe[1], _PIPE_BYTES, flags=os.SPLICE_F_NONBLOCK)
            self.num_held = count
        else:
            count = self.source.socket.recv_into(self._scratch)
            sent = 0
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = self.target.socket.send(self._scratch[:count]) if count else 0
            self._rest = bytes(self._scratch[sent:count])
            self.num_held = count - sent
            if count == _COPY_BYTES and not self.num_held and self._may_splice:
                self._make_pipe()
        self.is_over = not count
        return count

    def _write(self) -> None:
        if self._pipe is not None:
            out, there = self._pipe[0], self.target.socket.fileno()
            self.num_held -= os.splice(out, there, self.num_held, flags=os.SPLICE_F_NONBLOCK)
        else:
            self._rest = self._rest[self.target.socket.send(self._rest) :]
            self.num_held = len(self._rest)

    def _make_pipe(self) -> None:
        """Switch to a pipe if file descriptors are available for it."""
        self._may_splice = False
        with contextlib.suppress(OSError):
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._pipe is not None and not _is_free(max(self._pipe)):
            self.close()
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # The kernel's default size is enough.
                fcntl.fcntl(self._pipe[1], _SET_PIPE_SIZE, _PIPE_BYTES)

    def close(self) -> None:
        if self._pipe is not None:
            for each in self._pipe:
                os.close(each)
            self._pipe = None


def _is_free(fd: int) -> bool:
    """Whether this descriptor is not one of the last ``RESERVE``."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit == resource.RLIM_INFINITY or fd < limit - RESERVE


def _keep_alive(connected: socket.socket) -> None:
    if (option := getattr(socket, "TCP_KEEPIDLE", None)) is not None:
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
