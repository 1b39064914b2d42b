"""One accepted connection: decodes received bytes into messages (``zmtp``), and queues outgoing messages.

It makes no decisions about other connections and watches no descriptor; the ``listener`` does both. Nothing here blocks
except ``finish``.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final

from swarm.wire.tensors import Bytes
from swarm.wire.transport.unix_socket import is_same_user
from swarm.wire.transport.zmtp import ZmtpDecoder

MESSAGE_S: Final = 15.0
_MIN_BYTES_PER_S: Final = 16 << 10  # Bytes a second: a slower transfer of a message is cut off.
_MAX_QUEUED: Final = 1000  # Messages that wait for one peer; further ones are rejected.
_MAX_QUEUED_BYTES: Final = 16 << 20
_HEAD_BYTES: Final = 8 << 10  # First read of a large message: the rest is read directly into its frame's buffer.
_JOIN_BYTES: Final = 64 << 10  # Frames below this size are copied into one write.


class ReadResult(Enum):
    """Result of a read."""

    NOTHING = "nothing"
    PART = "part"  # Part of a large frame; no whole message yet.
    SOME = "some"  # There may be a whole message.
    END = "end"


class Connection:
    """One accepted connection."""

    __slots__ = (
        "_is_large",
        "_num_since",
        "_out_bytes",
        "_socket",
        "counted",
        "fd",
        "has_spoken",
        "inlet",
        "is_over",
        "is_ready",
        "is_watched",
        "leaves_at",
        "out",
        "rests",
        "since",
        "writes",
    )

    def __init__(self, connected: socket.socket, inlet: ZmtpDecoder, now: float) -> None:
        """Raises OSError if the peer is gone already, or if it is another user's process on the Unix socket."""
        set_options(connected)
        if connected.family == socket.AF_UNIX and not is_same_user(connected):
            raise PermissionError(errno.EPERM, "a process of another user")
        self._socket = connected
        self.fd = connected.fileno()
        self.inlet = inlet
        self.is_watched = False  # Whether the loop watches it for reading.
        self.is_ready = False  # Data has been received that is not processed yet.
        self.is_over = False  # The peer has closed; nothing more arrives.
        self.has_spoken = False  # Whether the peer has sent a message, so that its loss must be reported.
        self.rests = False  # Reading is paused for back-pressure.
        self.leaves_at: float | None = None  # Time of the disconnect, if it is scheduled.
        self.since = now  # Start of the handshake or of the message in progress.
        self._is_large = False  # The last message was large, so the next one probably is.
        self._num_since = 0  # Bytes received since ``since``.
        self.counted = 0  # Part of the held bytes that the listener has in its totals.
        self.out: deque[Bytes] = deque()  # Encoded, unsent data.
        self._out_bytes = 0
        self.writes = False  # Whether the loop watches it for writing.

    @property
    def name(self) -> bytes:
        """Return the peer's identity; valid after the handshake."""
        assert self.inlet.identity is not None
        return self.inlet.identity

    @property
    def remote_address(self) -> str:
        """Return the remote address of a TCP connection; empty if it has ended or is no TCP."""
        with contextlib.suppress(OSError):
            if self._socket.family != socket.AF_UNIX:
                return str(self._socket.getpeername()[0])
        return ""

    # --- what comes --------------------------------------------------------------------------------------------------

    def receive(self, scratch: memoryview) -> ReadResult:
        """Read once. Data in ``scratch`` must stay unchanged until ``inlet.copy_unread``."""
        inlet = self.inlet
        buffer = inlet.recv_buffer()
        if buffer is None and self._is_large:
            scratch = scratch[:_HEAD_BYTES]
        try:
            num_bytes = self._socket.recv_into(scratch if buffer is None else buffer)
        except (BlockingIOError, InterruptedError):
            return ReadResult.NOTHING
        except OSError:  # Reset, or timed out.
            num_bytes = 0
        self._num_since += num_bytes
        if not num_bytes:
            return ReadResult.END
        self._is_large = buffer is not None or (self._is_large and num_bytes == _HEAD_BYTES)
        if buffer is None:
            inlet.feed(scratch[:num_bytes])
            return ReadResult.SOME
        inlet.commit(num_bytes)
        return ReadResult.PART if num_bytes < len(buffer) or inlet.recv_buffer() is not None else ReadResult.SOME

    def start_message(self, now: float) -> None:
        """Record that a message starts to arrive now."""
        self.since, self._num_since = now, 0

    @property
    def message_deadline(self) -> float:
        """Return the deadline for the message in progress."""
        return self.since + MESSAGE_S + self._num_since / _MIN_BYTES_PER_S

    # --- sending -----------------------------------------------------------------------------------------------------

    def send_handshake(self, words: bytes) -> bool:
        """Send a part of the handshake, which is short enough for the kernel's buffer. Return False if that failed."""
        with contextlib.suppress(OSError):
            return self._socket.send(words) == len(words)
        return False

    @property
    def is_full(self) -> bool:
        """Whether the peer does not read and the queue has reached its limit."""
        return len(self.out) >= _MAX_QUEUED or self._out_bytes > _MAX_QUEUED_BYTES

    @property
    def queued_bytes(self) -> int:
        """Return the bytes that wait for the peer to read."""
        return self._out_bytes

    def queue(self, frames: Sequence[Bytes]) -> None:
        """Append a message to the queue."""
        small: list[Bytes] = []
        for part in self.inlet.encode(frames):
            if len(part) > _JOIN_BYTES:
                self._append(b"".join(small))
                self._append(part)
                small = []
            else:
                small.append(part)
        if small:
            self._append(b"".join(small))

    def _append(self, data: Bytes) -> None:
        self.out.append(data)
        self._out_bytes += len(data)

    def write(self) -> bool:
        """Write as much as the kernel accepts. Return False if the peer is gone; queued data is dropped then."""
        out = self.out
        while out:
            some = [out.popleft()]
            size = len(some[0])
            while out and size + len(out[0]) <= _JOIN_BYTES:
                some.append(out.popleft())
                size += len(some[-1])
            data = some[0] if len(some) == 1 else b"".join(some)
            try:
                sent = self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                out.clear()
                self._out_bytes = 0
                return False
            self._out_bytes -= sent
            if sent < size:
                out.appendleft(memoryview(data)[sent:])
                return True
        return True

    def finish(self, give_up_at: float) -> None:
        """Send queued messages before closing. Blocks until the deadline at most."""
        with contextlib.suppress(OSError):
            while self.out and (left_s := give_up_at - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                self.write()
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def set_options(connected: socket.socket) -> None:
    """Set the same TCP options that ``sockets.set_options`` sets for ZeroMQ sockets."""
    connected.setblocking(False)
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 120_000)):
        if (option := getattr(socket, name, None)) is not None:  # Not all systems have all of them.
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
