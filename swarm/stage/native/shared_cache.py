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

_SIZE_BYTES = 64 << 10  # size of the shared memory
_LENGTH = 4  # bytes of the length prefix
# longest wait for another worker that computes a result; after that, this worker computes it itself
_LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.005  # between two attempts to take the lock

T = TypeVar("T")
_Entries = dict[str, bytes]  # by a digest of the key


class _SharedMemory:
    """Shared memory and a lock for all children of a process. The system releases the lock when its holder dies."""

    def __init__(self) -> None:
        self._file = os.memfd_create("swarm siblings")
        os.ftruncate(self._file, _SIZE_BYTES)
        self._memory = mmap.mmap(self._file, _SIZE_BYTES)

    @contextmanager
    def locked(self) -> Iterator[None]:
        ends = time.monotonic() + _LOCK_TIMEOUT_S
        while time.monotonic() < ends:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def read(self) -> _Entries:
        length = int.from_bytes(self._memory[:_LENGTH], "big")
        if length == 0:
            return {}
        return msgspec.msgpack.decode(self._memory[_LENGTH : _LENGTH + length], type=_Entries)

    def write(self, entries: _Entries) -> None:
        """Replace the contents. A process that dies in between leaves an empty cache: the length is written last."""
        text = msgspec.msgpack.encode(entries)
        if len(text) > _SIZE_BYTES - _LENGTH:
            return
        self._memory[:_LENGTH] = bytes(_LENGTH)
        self._memory[_LENGTH : _LENGTH + len(text)] = text
        self._memory[:_LENGTH] = len(text).to_bytes(_LENGTH, "big")


_memory: _SharedMemory | None = None  # of the fork server that this process was forked from


def create_shared_cache() -> None:
    """Create the cache, before the first fork: results of one child are shared with the others."""
    global _memory  # noqa: PLW0603
    _memory = _SharedMemory()


def get_or_compute(key_text: str, kind: type[T], compute: Callable[[], T]) -> T:
    """Return the cached result; compute and store it if there is none. ``kind`` is its type, for encoding."""
    memory = _memory
    if memory is None:
        return compute()
    key = hashlib.sha256(key_text.encode()).hexdigest()
    with memory.locked():
        cached = memory.read().get(key)
        if cached is not None:
            return msgspec.msgpack.decode(cached, type=kind)
        result = compute()
        memory.write(memory.read() | {key: msgspec.msgpack.encode(result)})
    return result
