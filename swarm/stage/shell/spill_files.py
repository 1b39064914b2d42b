"""Files of keys and values on the local disk: one for each chunk of positions and each layer.

The name says what is in it: the model with its bits (the folder), the tokens up to the chunk's end, and the layer. So
workers of one machine may share the folder, whatever their layers are, and any later plan finds what it needs.

A file is written under another name and then renamed, without a sync. Its checksum covers the name, too: a torn,
damaged or foreign file counts as missing and is removed. Files are private to their owner, since prompts can be
reconstructed from keys and values. A checksum does not show who wrote a file. So a folder that other users can write is
not used, and a file counts only if it is a regular one of this user.

The total size is limited, and a twentieth of the disk stays free. The least recently used files go first; among those
used within the same ten minutes the ones further behind, because a chunk is of no use without those before it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import xxhash

from swarm.private_files import make_private_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.stage.executor import KvDtype

_MAGIC: Final = b"swarm kv 1\n"
_HEADER: Final = struct.Struct("<16s16s16sQ")  # magic, checksum, dtype, size of the numbers
_STORED: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
_MAX_BYTES: Final = 64 << 20  # of a file's numbers; 256 positions with 128 KiB in a layer have half of it
_RESERVE: Final = 20  # the files leave this part of the disk free: one twentieth
_LEFTOVER_S: Final = 600.0  # age at which a file that is still being written belongs to a process that has ended
_FORGET_S: Final = 86_400.0  # after which a worker that writes no files removes those of others
_PERIOD_S: Final = 600.0  # files used within the same period count as equally recent
_ROOM: Final = 16  # part of the limit that is freed at once, and that may be written until the folder is read again


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """Identity of a file. ``model``: digest of the model and the bits; ``name``: digest of the tokens."""

    model: str
    name: str
    index: int  # number of the chunk
    layer: int

    def path(self, root: Path) -> Path:
        return root / self.model / self.name[:2] / f"{self.index:05}-{self.name}-{self.layer}"


@dataclass(frozen=True, slots=True)
class _Listed:
    path: Path
    num_bytes: int
    used_at: float

    @property
    def order(self) -> tuple[int, int]:
        """Return the place in the order of removal; the smallest goes first."""
        index = self.path.name.partition("-")[0]
        return int(self.used_at // _PERIOD_S), -int(index) if index.isdecimal() else -(1 << 30)


class SpillFiles:
    """The files of one folder. Used by one thread. Methods raise ``OSError``, except ``read``."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self.limit_bytes = limit_bytes  # for all files; 0: none are written
        self._unlisted_bytes = limit_bytes  # written since the folder was read last
        self.num_bytes = 0  # of all files, when the folder was read last, and of what was written since
        self.num_damaged = 0  # files that were removed because their content was wrong
        self.num_removed = 0  # files that were removed for space
        self.num_written = 0  # files

    def write(self, file: ChunkFile, dtype: KvDtype, numbers: NDArray[np.generic]) -> bool:
        """Write a file, unless it is there or has no space. Return whether it is there now."""
        path, data = file.path(self._root), np.ascontiguousarray(numbers).data.cast("B")
        num_bytes = _HEADER.size + len(data)
        if len(data) > _MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self._check_root()
        if self._has_file(path, num_bytes):
            with contextlib.suppress(OSError):  # another process may just have removed it
                _mark_used(path)
                return True
        if not self._make_space(num_bytes):
            return False
        for folder in (self._root, path.parent.parent, path.parent):
            make_private_directory(folder)
        # Processes in different containers may have the same process ID, so the name is random.
        new = path.with_name(f".{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(_header(file, dtype, data))
                opened.write(data)
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self.num_written += 1
        self.num_bytes += num_bytes
        self._unlisted_bytes += num_bytes
        return True

    def read(self, file: ChunkFile) -> tuple[KvDtype, NDArray[np.generic]] | None:
        """Return a file's dtype and numbers; None if it is missing, unreadable or damaged. A damaged one is removed."""
        path = file.path(self._root)
        try:
            self._check_root()
            content = _read_private(path)
        except OSError:
            return None
        if (found := _decode(file, content)) is None:
            self._remove_damaged(path)
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            _mark_used(path)
        return found

    def _check_root(self) -> None:
        """Raise ``PermissionError`` if other users can write the folder: they could plant keys and values."""
        try:
            status = self._root.stat()
        except FileNotFoundError:
            return
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"the directory {self._root} belongs to another user: remove it")
        if status.st_mode & 0o022:
            problem = f"others may write the directory {self._root}: remove it, or empty it and chmod 700 it"
            raise PermissionError(errno.EPERM, problem)

    def _has_file(self, path: Path, num_bytes: int) -> bool:
        """Return whether a file of this size is there. Remove anything else of this name: a torn file, for example."""
        try:
            status = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        if _is_private_file(status) and status.st_size == num_bytes:
            return True
        self._remove_damaged(path)
        return False

    def _remove_damaged(self, path: Path) -> None:
        self.num_damaged += 1
        with contextlib.suppress(OSError):
            path.unlink()

    def _make_space(self, num_bytes: int) -> bool:
        """Remove files until one of this size fits. Return False if it can't."""
        is_due = self._unlisted_bytes + num_bytes > self.limit_bytes // _ROOM
        if is_due or self.num_bytes + num_bytes > self.limit_bytes or self._missing_bytes(num_bytes) > 0:
            self._tidy(num_bytes)
        return self.num_bytes + num_bytes <= self.limit_bytes and self._missing_bytes(num_bytes) <= 0

    def _missing_bytes(self, num_bytes: int) -> int:
        """Return what the disk lacks so that a file of this size leaves the reserve free."""
        try:
            disk = shutil.disk_usage(self._root)
        except FileNotFoundError:
            make_private_directory(self._root)
            disk = shutil.disk_usage(self._root)
        return num_bytes + disk.total // _RESERVE - disk.free

    def tidy(self) -> None:
        """Read the folder, which other workers use, too, and remove what exceeds the limit. Without a limit, remove
        files that were not used for a day: a worker with other settings may use the rest."""
        self._check_root()
        if not self.limit_bytes:
            for file in self._list():
                if file.used_at < time.time() - _FORGET_S:
                    file.path.unlink(missing_ok=True)
                    self.num_removed += 1
        elif self._root.exists():
            self._tidy(0)
        for folder in (*self._root.glob("*/*"), *self._root.glob("*")):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    def _tidy(self, num_bytes: int) -> None:
        """Read the folder, and remove what the limit or the disk has no space for."""
        files = list(self._list())
        self.num_bytes, self._unlisted_bytes = sum(file.num_bytes for file in files), 0
        excess = max(self.num_bytes + num_bytes - self.limit_bytes, self._missing_bytes(num_bytes))
        if excess <= 0:
            return
        excess += self.limit_bytes // _ROOM
        for file in sorted(files, key=lambda file: file.order):
            if excess <= 0:
                break
            file.path.unlink(missing_ok=True)
            self.num_removed += 1
            self.num_bytes -= file.num_bytes
            excess -= file.num_bytes

    def _list(self) -> Iterator[_Listed]:
        """Yield all files. Remove what processes that have ended left unfinished."""
        for path in self._root.glob("*/*/*"):
            try:
                status = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has just removed it
            if path.name.startswith(".") and status.st_mtime < time.time() - _LEFTOVER_S:
                path.unlink(missing_ok=True)
            else:
                yield _Listed(path, status.st_size, status.st_mtime)


def _is_private_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _read_private(path: Path) -> bytes:
    """Return a file's content; nothing if it is none of this user's regular files, or too large. Never waits for a
    writer, as opening a FIFO would. Raises ``OSError``."""
    if not _is_private_file(path.stat(follow_symlinks=False)):
        return b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as opened:
        status = os.fstat(descriptor)
        if not _is_private_file(status) or status.st_size > _HEADER.size + _MAX_BYTES:
            return b""
        parts = []
        left = status.st_size
        while left > 0 and (part := opened.read(left)):
            parts.append(part)
            left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _mark_used(path: Path) -> None:
    now = time.time()
    os.utime(path, (now, now))


def _header(file: ChunkFile, dtype: KvDtype, data: memoryview | bytes) -> bytes:
    digest = xxhash.xxh3_128(f"{file.model} {file.name} {file.index} {file.layer} {dtype} {len(data)}\n".encode())
    digest.update(data)
    return _HEADER.pack(_MAGIC, digest.digest(), dtype.encode(), len(data))


def _decode(file: ChunkFile, content: bytes) -> tuple[KvDtype, NDArray[np.generic]] | None:
    """Return the dtype and the numbers of a file's content; None if it is not what was written under this name."""
    if len(content) < _HEADER.size:
        return None
    name = _HEADER.unpack_from(content)[2].rstrip(b"\0").decode("ascii", "replace")
    if name not in _STORED:
        return None
    dtype, data = cast("KvDtype", name), memoryview(content)[_HEADER.size :]
    if content[: _HEADER.size] != _header(file, dtype, data):
        return None
    return dtype, np.frombuffer(data, _STORED[dtype])
