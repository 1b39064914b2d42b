"""Notification when descriptors become readable or writable: an asyncio loop, or ``PollLoop`` in a plain thread, which
other threads wake with ``WakeupFd``."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
from collections.abc import Callable
from typing import Any, Final, Protocol

_MAX_EVENTS: Final = 256  # Events of one turn.


class IoLoop(Protocol):
    """Interface of an event loop: calls back when a descriptor is readable or writable. asyncio loops implement it."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_reader(self, fd: int) -> Any: ...
    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_writer(self, fd: int) -> Any: ...
    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...


class PollLoop:
    """Event loop of a plain thread that only receives: ``run_ready`` runs the callbacks of readable descriptors."""

    def __init__(self) -> None:
        self._poll: _Epoll | _Selector = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._callbacks: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}  # Callbacks by descriptor.

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to do."""
        return self._poll.fileno()

    def run_ready(self) -> bool:
        """Run the callbacks of all readable descriptors without waiting. Return whether there were any."""
        readable = self._poll.readable()
        for fd in readable:
            if (call := self._callbacks.get(fd)) is not None:
                call[0](*call[1])
        return bool(readable)

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self._poll.add(fd)
        self._callbacks[fd] = callback, args

    def remove_reader(self, fd: int) -> None:
        self._poll.remove(fd)
        del self._callbacks[fd]

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def remove_writer(self, fd: int) -> None:
        raise NotImplementedError("nothing is sent from here")

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def close(self) -> None:
        self._poll.close()


class _Epoll:
    """Minimal epoll wrapper. Every hop uses it, so it avoids the bookkeeping of ``selectors``."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fileno, self.close = self._epoll.fileno, self._epoll.close

    def add(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # Closed already.
            self._epoll.unregister(fd)

    def readable(self) -> list[int]:
        return [fd for fd, _ in self._epoll.poll(0, _MAX_EVENTS)]


class _Selector:
    """Fallback for systems without epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.fileno, self.close = self._selector.fileno, self._selector.close

    def add(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        self._selector.unregister(fd)

    def readable(self) -> list[int]:
        return [key.fd for key, _ in self._selector.select(0)]


_ONE: Final = (1).to_bytes(8, "little")  # An eventfd counts in 64-bit numbers; a pipe takes any bytes.


class WakeupFd:
    """Descriptor that wakes a thread waiting in ``PullChannel.wait``.

    Any thread may call ``set()`` any number of times; it stays set until ``clear()``. It is a descriptor because the
    waiting thread polls sockets. Call ``close()`` after the last ``set()``.
    """

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
        with contextlib.suppress(BlockingIOError):  # The buffer is full, so it is set already.
            os.write(self._writes, _ONE)

    def clear(self) -> None:
        """Reset it. Call this before checking for the announced work, so that no later ``set`` is lost."""
        with contextlib.suppress(BlockingIOError):  # Empty: it was not set.
            os.read(self._reads, 4096)

    def close(self) -> None:
        os.close(self._reads)
        if self._writes != self._reads:
            os.close(self._writes)
