"""Files of packed matrices, which the workers of a host share. Does not import torch.

A file is a header of one page and the packed numbers. It is written under another name and then renamed, so processes
that write the same file at once do not disturb each other. The header has the size and a checksum of the numbers: a
damaged or truncated file counts as missing. Files that were not used for the longest time are removed when space is
needed. Removal does not disturb a process that has the file mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

_MAGIC: Final = b"swarm packed matrix 1\n"
FIRST_NUMBER: Final = 4096  # offset of the numbers, a page
_RESERVE: Final = 20  # the cache leaves this part of the disk free: one twentieth
_LEFTOVER_S: Final = 3600.0  # age at which a file that is still being written belongs to a process that has ended


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache. ``used_at`` is the time of its last use."""

    path: Path
    num_bytes: int
    used_at: float


class PackedFiles:
    """The files of one folder. ``limit_bytes`` bounds their total size.

    Methods raise ``OSError``.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._began_at = time.time()

    def map(self, name: str, num_bytes: int) -> mmap.mmap | None:
        """Return the file's mapping, whose numbers start at :data:`FIRST_NUMBER`; None if there is no such file.

        A damaged file is removed. Nothing that is written to the mapping reaches the file.
        """
        path = self._folder / name
        try:
            with path.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == FIRST_NUMBER + num_bytes
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if is_whole else None
        except FileNotFoundError:
            return None
        if mapping is None or not _is_intact(mapping):
            path.unlink(missing_ok=True)
            return None
        # another process may just have removed it; it may be another user's, or on a read-only disk
        with contextlib.suppress(OSError):
            _mark_used(path)
        return mapping

    def write(self, name: str, numbers: memoryview) -> bool:
        """Write a file, unless there is no space for it beside the files in use. Return whether it was written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._make_space(FIRST_NUMBER + len(numbers)):
            return False
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
            try:
                file.write(_header(numbers))
                file.write(numbers)
                file.flush()
                os.fchmod(file.fileno(), 0o644)  # temporary files are private to their user
                _mark_used(Path(file.name))
                os.replace(file.name, self._folder / name)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return True

    def _make_space(self, num_bytes: int) -> bool:
        disk = shutil.disk_usage(self._folder)
        files = list(_list_files(self._folder))
        # files of processes that are writing now count, but are no candidates
        fixed = sum(file.num_bytes for file in files if _is_being_written(file))
        ready = [file for file in files if not _is_being_written(file)]
        total = fixed + sum(file.num_bytes for file in ready)
        limit = min(self._limit_bytes, total + disk.free - disk.total // _RESERVE)
        chosen = choose_removals(ready, num_bytes, limit - fixed, self._began_at)
        for file in chosen or ():
            file.path.unlink(missing_ok=True)
        return chosen is not None


def choose_removals(
    files: Iterable[CachedFile], num_bytes: int, limit_bytes: int, in_use_since: float
) -> list[CachedFile] | None:
    """Return which files must go so that one of ``num_bytes`` fits, least recently used first; None if it can't.

    Files that were used at or after ``in_use_since`` stay. A model larger than the cache would otherwise remove its own
    files at each start before it comes to read them.
    """
    by_age = sorted(files, key=lambda file: file.used_at)
    excess = sum(file.num_bytes for file in by_age) + num_bytes - limit_bytes
    chosen = []
    for file in by_age:
        if excess <= 0:
            break
        if file.used_at >= in_use_since:
            return None
        chosen.append(file)
        excess -= file.num_bytes
    return chosen if excess <= 0 else None


def _list_files(folder: Path) -> Iterable[CachedFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has just removed it
            yield CachedFile(Path(entry.path), status.st_size, status.st_mtime)


def _is_being_written(file: CachedFile) -> bool:
    return file.path.name.startswith(".") and file.used_at > time.time() - _LEFTOVER_S


def _mark_used(path: Path) -> None:
    """Set the time of the last use. The system's own stamps lag by milliseconds behind the clock that is read here."""
    now = time.time()
    os.utime(path, (now, now))


def _is_intact(mapping: mmap.mmap) -> bool:
    with memoryview(mapping) as content, content[FIRST_NUMBER:] as numbers:
        return content[:FIRST_NUMBER] == _header(numbers)


def _header(numbers: memoryview) -> bytes:
    text = _MAGIC + f"{len(numbers)} {xxhash.xxh3_128_hexdigest(numbers)}\n".encode()
    return text.ljust(FIRST_NUMBER, b"\0")
