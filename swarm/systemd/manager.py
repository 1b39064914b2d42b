"""Notifications to the service manager: the process is ready, its status, and signs of life for the watchdog.

Each is a datagram to the socket that ``NOTIFY_SOCKET`` names (sd_notify(3)), sent without waiting. The watchdog gets
only proof: the caller of :meth:`ServiceManager.send_alive` has just seen progress.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Final

from swarm.clock import Clock, SystemClock

_MAX_STATUS: Final = 300
_SIGNS_PER_TIMEOUT: Final = 4  # signs of life within the watchdog's timeout


class ServiceManager:
    """Connection to the service manager.

    ``address``: the manager's socket; None: there is none, and nothing is sent. ``watchdog_s``: timeout of its
    watchdog; None: it has none.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None, clock: Clock | None = None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s
        self._clock = clock or SystemClock()
        self._alive_sent_at = float("-inf")
        self._is_ready = False
        self._status = ""
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], clock: Clock | None = None) -> ServiceManager:
        """Return the manager that started this process. Its variables are removed, so that child processes don't use
        them."""
        address = environment.pop("NOTIFY_SOCKET", None)
        wait_us, of = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", str(os.getpid()))
        watchdog_s = int(wait_us) / 1e6 if wait_us.isdecimal() and of == str(os.getpid()) else None
        if address is None or address[:1] not in ("/", "@"):
            return cls(clock=clock)
        return cls(address, watchdog_s or None, clock)

    @property
    def is_present(self) -> bool:
        return self._socket is not None

    def send_ready(self, status: str = "") -> None:
        """Report that the process is ready. Further calls only update the status."""
        lines = [] if self._is_ready else ["READY=1"]
        self._is_ready = True
        self._send(*lines, *self._status_line(status))

    def send_status(self, text: str) -> None:
        """Report the status, in one line."""
        self._send(*self._status_line(text))

    def send_alive(self) -> None:
        """Report that the process makes progress. Sent only as often as the watchdog needs it."""
        if self._watchdog_s is None or self._clock.now() - self._alive_sent_at < self._watchdog_s / _SIGNS_PER_TIMEOUT:
            return
        self._alive_sent_at = self._clock.now()
        self._send("WATCHDOG=1")

    def send_reloading(self) -> None:
        """Report that the settings are being reloaded; :meth:`send_ready` ends that."""
        self._is_ready = False
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.now() * 1e6)}")

    def send_stopping(self, status: str = "") -> None:
        self._send("STOPPING=1", *self._status_line(status))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _status_line(self, status: str) -> list[str]:
        line = " ".join(status.split())[:_MAX_STATUS]
        if not line or line == self._status:
            return []
        self._status = line
        return [f"STATUS={line}"]

    def _send(self, *lines: str) -> None:
        if self._socket is None or not lines:
            return
        assert self._address is not None
        where = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # the manager is being replaced, or its queue is full: another notification follows soon
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(), where)


class ProgressDetector:
    """Detector of progress since the last check."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None

    def update(self, *signs: object) -> bool:
        """Return whether a sign has changed. ``signs``: values that change with work, such as counters or times."""
        moved, self._seen = signs != self._seen, signs
        return moved
