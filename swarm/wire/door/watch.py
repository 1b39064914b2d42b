"""Who tells a door that a descriptor can be read or written: an asyncio loop, or ``Poll`` in a plain thread."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any, Protocol


class Watch(Protocol):
    """Calls back when a descriptor can be read or written. An asyncio loop is one."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_reader(self, fd: int) -> Any: ...
    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_writer(self, fd: int) -> Any: ...
    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...


class Poll:
    """Serves a plain thread that only listens: what can be read is read when ``turn`` is called."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Readable while there is something to do."""
        return self._selector.fileno()

    def turn(self) -> bool:
        """Do what can be done without waiting; was there anything?"""
        found = self._selector.select(0)
        for key, _ in found:
            callback, args = key.data
            callback(*args)
        return bool(found)

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (callback, args))

    def remove_reader(self, fd: int) -> None:
        self._selector.unregister(fd)

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def remove_writer(self, fd: int) -> None:
        raise NotImplementedError("nothing is sent from here")

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def close(self) -> None:
        self._selector.close()
