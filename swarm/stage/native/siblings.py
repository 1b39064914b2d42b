"""What one worker has found out about this machine, told to those that are forked from the same process.

The first one finds it out; each later one, a dead worker's replacement too, begins sooner. What is told is of value to
whoever has the same model, device, kernels and threads: the name under which it is kept says all of that.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

try:
    import fcntl
except ImportError:  # no nursery there, so no siblings
    fcntl = None  # type: ignore[assignment]

_BYTES = 64 << 10
_LENGTH = 4  # bytes that say how long the rest is
_PATIENCE_S = 30.0  # with a sibling that finds something out; then this one does so itself
_LOOK_AGAIN_S = 0.005

T = TypeVar("T")
_Told = dict[str, bytes]  # by a digest of the name


class _Board:
    """Memory and a lock that all children of a process have in common. A lock ends with the process that has it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("swarm siblings")
        os.ftruncate(self._file, _BYTES)
        self._memory = mmap.mmap(self._file, _BYTES)

    @contextmanager
    def held(self) -> Iterator[None]:
        ends = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_AGAIN_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def read(self) -> _Told:
        length = int.from_bytes(self._memory[:_LENGTH], "big")
        if length == 0:
            return {}
        return msgspec.msgpack.decode(self._memory[_LENGTH : _LENGTH + length], type=_Told)

    def write(self, told: _Told) -> None:
        """Whoever ends in between leaves nothing."""
        text = msgspec.msgpack.encode(told)
        if len(text) > _BYTES - _LENGTH:
            return
        self._memory[:_LENGTH] = bytes(_LENGTH)
        self._memory[_LENGTH : _LENGTH + len(text)] = text
        self._memory[:_LENGTH] = len(text).to_bytes(_LENGTH, "big")


_board: _Board | None = None  # of the nursery that this process was forked from


def share_with_children() -> None:
    """From now on, what one child of this process finds out, others needn't."""
    global _board  # noqa: PLW0603
    _board = _Board()


def once(name: str, kind: type[T], find: Callable[[], T]) -> T:
    """Find it out, unless a sibling has. ``kind``: of what is found, to be encoded."""
    board = _board
    if board is None:
        return find()
    key = hashlib.sha256(name.encode()).hexdigest()
    with board.held():
        known = board.read().get(key)
        if known is not None:
            return msgspec.msgpack.decode(known, type=kind)
        found = find()
        board.write(board.read() | {key: msgspec.msgpack.encode(found)})
    return found
