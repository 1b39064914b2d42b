"""What a process tells the service manager that started it: that it serves, how it is, that it is still at it.

A datagram each, to the socket that ``NOTIFY_SOCKET`` names (sd_notify(3)); it is never waited for. A watchdog hears
only what is proof: whoever calls :meth:`Manager.alive` has just seen that work goes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Final

from swarm.clock import Clock, SystemClock

_MAX_STATUS: Final = 300
_SIGNS: Final = 4  # of life within the time that the watchdog waits


class Manager:
    """``address``: the manager's socket; None: there is none, and nothing is said. ``watchdog_s``: for how long it
    waits for a sign of life; None: it doesn't."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None, clock: Clock | None = None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s
        self._clock = clock or SystemClock()
        self._said_alive_at = float("-inf")
        self._is_ready = False
        self._status = ""
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def of(cls, environment: MutableMapping[str, str], clock: Clock | None = None) -> Manager:
        """The one that started this process. Its variables are taken away: a child's words are not this process's."""
        address = environment.pop("NOTIFY_SOCKET", None)
        wait_us, of = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", str(os.getpid()))
        watchdog_s = int(wait_us) / 1e6 if wait_us.isdecimal() and of == str(os.getpid()) else None
        if address is None or address[:1] not in ("/", "@"):
            return cls(clock=clock)
        return cls(address, watchdog_s or None, clock)

    @property
    def is_there(self) -> bool:
        return self._socket is not None

    def ready(self, status: str = "") -> None:
        """It does what it is for; once is enough, and more do no harm."""
        said = [] if self._is_ready else ["READY=1"]
        self._is_ready = True
        self._say(*said, *self._changed(status))

    def status(self, text: str) -> None:
        """How it is, in a line."""
        self._say(*self._changed(text))

    def alive(self) -> None:
        """Work goes on. Said as often as the watchdog needs it, however often it is seen."""
        if self._watchdog_s is None or self._clock.now() - self._said_alive_at < self._watchdog_s / _SIGNS:
            return
        self._said_alive_at = self._clock.now()
        self._say("WATCHDOG=1")

    def reloading(self) -> None:
        """It reads its settings again; :meth:`ready` ends that."""
        self._is_ready = False
        self._say("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.now() * 1e6)}")

    def stopping(self, status: str = "") -> None:
        self._say("STOPPING=1", *self._changed(status))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _changed(self, status: str) -> list[str]:
        line = " ".join(status.split())[:_MAX_STATUS]
        if not line or line == self._status:
            return []
        self._status = line
        return [f"STATUS={line}"]

    def _say(self, *lines: str) -> None:
        if self._socket is None or not lines:
            return
        assert self._address is not None
        where = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError):  # it is being replaced, or has no room: the next word comes soon
            self._socket.sendto("\n".join(lines).encode(), where)


class Progress:
    """Whether somebody who works was seen to be at it since the last look."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None

    def is_made(self, *signs: object) -> bool:
        """``signs``: what changes with work, a counter say, or when somebody last went round."""
        moved, self._seen = signs != self._seen, signs
        return moved
