"""Cache of one worker's findings about this machine, shared by workers that are forked from the same process.

The first worker computes a result; each later one, including a dead worker's replacement, starts faster. A result is
valid for workers with the same model, device, kernels and threads, which are all part of its key.
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
except ImportError:  # a system without a fork server, so nothing is shared
    fcntl = None  # type: ignore[assignment]

_BYTES = 64 << 10  # size of the shared memory
_LENGTH = 4  # bytes of the length prefix
_PATIENCE_S = 30.0  # longest wait for another worker that computes a result; after that, this worker computes it itself
_LOOK_AGAIN_S = 0.005  # between two attempts to take the lock

T = TypeVar("T")
_Told = dict[str, bytes]  # by a digest of the key


class _Board:
    """Shared memory and a lock for all children of a process. The system releases the lock when its holder dies."""

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
        """Replace the contents. A process that dies in between leaves an empty cache: the length is written last."""
        text = msgspec.msgpack.encode(told)
        if len(text) > _BYTES - _LENGTH:
            return
        self._memory[:_LENGTH] = bytes(_LENGTH)
        self._memory[_LENGTH : _LENGTH + len(text)] = text
        self._memory[:_LENGTH] = len(text).to_bytes(_LENGTH, "big")


_board: _Board | None = None  # of the fork server that this process was forked from


def share_with_children() -> None:
    """Create the cache, before the first fork: results of one child are shared with the others."""
    global _board  # noqa: PLW0603
    _board = _Board()


def once(name: str, kind: type[T], find: Callable[[], T]) -> T:
    """Return the cached result; compute and store it if there is none. ``kind`` is its type, for encoding."""
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
