"""One connection that came in at a door: what it sends becomes messages (``zmtp``), what it is sent waits here.

It decides nothing about others and watches no descriptor; that is the door's (``listener``). Nothing here waits, but
``finish``.
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

from swarm.wire.door.nearby import is_own
from swarm.wire.door.zmtp import Inlet
from swarm.wire.tensors import Bytes

MESSAGE_S: Final = 15.0
_SLOWEST: Final = 16 << 10  # bytes a second
_MOST_QUEUED: Final = 1000
_MOST_QUEUED_BYTES: Final = 16 << 20
_HEAD_BYTES: Final = 8 << 10  # of a large message: the rest goes to its place without a stop
_JOIN_BYTES: Final = 64 << 10  # frames below this are copied together into one write


class Read(Enum):
    """What reading brought."""

    NOTHING = "nothing"
    PART = "part"  # of a large frame, and there is nothing else yet
    SOME = "some"  # there may be a message
    END = "end"


class Connection:
    """See the module's text. ``since`` is when the handshake or the message under way began."""

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

    def __init__(self, connected: socket.socket, inlet: Inlet, now: float) -> None:
        """Raises OSError if it is gone already, or a back door's and not ours."""
        set_options(connected)
        if connected.family == socket.AF_UNIX and not is_own(connected):
            raise PermissionError(errno.EPERM, "somebody else's process")
        self._socket = connected
        self.fd = connected.fileno()
        self.inlet = inlet
        self.is_watched = False  # for what comes
        self.is_ready = False  # something came that was not looked at
        self.is_over = False  # nothing comes any more
        self.has_spoken = False
        self.rests = False  # it is not its turn for a while
        self.leaves_at: float | None = None  # hung up on then
        self.since = now
        self._is_large = False  # what came last: so is what comes next, as a rule
        self._num_since = 0  # bytes that came since
        self.counted = 0  # of what is held, the part that the door knows of
        self.out: deque[Bytes] = deque()
        self._out_bytes = 0
        self.writes = False  # it is waited for that it takes more

    @property
    def name(self) -> bytes:
        """Return what the peer calls itself, once the handshake is through."""
        assert self.inlet.identity is not None
        return self.inlet.identity

    @property
    def comes_from(self) -> str:
        """Return the remote address of a TCP connection; empty: it has ended, or is none."""
        with contextlib.suppress(OSError):
            if self._socket.family != socket.AF_UNIX:
                return str(self._socket.getpeername()[0])
        return ""

    # --- what comes --------------------------------------------------------------------------------------------------

    def receive(self, scratch: memoryview) -> Read:
        """Read once. What is in ``scratch`` must stay there until ``inlet.keep``."""
        inlet = self.inlet
        room = inlet.room()
        if room is None and self._is_large:
            scratch = scratch[:_HEAD_BYTES]
        try:
            num_bytes = self._socket.recv_into(scratch if room is None else room)
        except (BlockingIOError, InterruptedError):
            return Read.NOTHING
        except OSError:  # reset, or timed out
            num_bytes = 0
        self._num_since += num_bytes
        if not num_bytes:
            return Read.END
        self._is_large = room is not None or (self._is_large and num_bytes == _HEAD_BYTES)
        if room is None:
            inlet.feed(scratch[:num_bytes])
            return Read.SOME
        inlet.filled(num_bytes)
        return Read.PART if num_bytes < len(room) or inlet.room() is not None else Read.SOME

    def begins(self, now: float) -> None:
        """A message is under way from now on."""
        self.since, self._num_since = now, 0

    @property
    def give_up_at(self) -> float:
        """The message under way should be whole by then."""
        return self.since + MESSAGE_S + self._num_since / _SLOWEST

    # --- what it is told ---------------------------------------------------------------------------------------------

    def say(self, words: bytes) -> bool:
        """Part of the handshake, so short that the kernel takes it at once. False: it does not, or nobody is there."""
        with contextlib.suppress(OSError):
            return self._socket.send(words) == len(words)
        return False

    @property
    def is_full(self) -> bool:
        """Does the peer not read, and does enough wait for it?"""
        return len(self.out) >= _MOST_QUEUED or self._out_bytes > _MOST_QUEUED_BYTES

    @property
    def num_queued(self) -> int:
        """Bytes that wait for the peer to read."""
        return self._out_bytes

    def queue(self, frames: Sequence[Bytes]) -> None:
        """Put a message behind those that wait."""
        small: list[Bytes] = []
        for part in self.inlet.written(frames):
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
        """Write as much as the kernel takes. False: there is nobody any more; what waits is dropped."""
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
        """The last words, before it is closed. Waits for them."""
        with contextlib.suppress(OSError):
            while self.out and (left_s := give_up_at - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                self.write()
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def set_options(connected: socket.socket) -> None:
    """Set the options that ``sockets.set_options`` has for those that knock."""
    connected.setblocking(False)
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 120_000)):
        if (option := getattr(socket, name, None)) is not None:  # not all systems have all of them
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
