"""A flag with a descriptor: one thread sets it, another one waits for it among its sockets."""

from __future__ import annotations

import contextlib
import os
from typing import Final

_ONE: Final = (1).to_bytes(8, "little")  # an eventfd counts in 64-bit numbers; a pipe takes any bytes


class Wake:
    """Wakes a thread that waits in ``PullChannel.wait``. ``set()`` may be called from any thread, any number of times;
    it stays set until ``clear()``. A descriptor, because who waits there waits for sockets. ``close()`` comes after the
    last ``set()``."""

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
        with contextlib.suppress(BlockingIOError):  # full: it is set already
            os.write(self._writes, _ONE)

    def clear(self) -> None:
        """Call it before looking at what was announced, so that no later ``set`` is lost."""
        with contextlib.suppress(BlockingIOError):  # empty: it was not set
            os.read(self._reads, 4096)

    def close(self) -> None:
        os.close(self._reads)
        if self._writes != self._reads:
            os.close(self._writes)
