"""A file of which parts are present: the data in a sparse file, and beside it a record of the ranges that are valid.

All processes of a machine share the files, in our folder of the model's cache. Their names are the sha256 of the whole
content, so commits with the same file share it, too:

==============  =========================================================================================
``SHA256``      the data; a link to the hub's own copy once the file is whole
``….json``      the record: ranges that are present, and whether the header has been parsed
``….lock``      lock of the writer; held for one piece at a time, and released if the process is killed
==============  =========================================================================================

The record never contains a range whose bytes are not on the disk: data is synchronised first, then the record is
replaced. A killed download therefore loses at most the bytes since the last record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from huggingface_hub.utils import WeakFileLock

from swarm.hub.cache import OUR_FOLDER, write_atomically
from swarm.hub.presence import PARTS_FOLDER, Record, read_record
from swarm.hub.ranges import Ranges

RECORD_BYTES = 32 << 20  # written between two records


@dataclass(frozen=True, slots=True)
class PartialFile:
    """A file of a model in the cache, by the sha256 and the size that the hub reports."""

    model_folder: Path
    sha256: str
    num_bytes: int

    @property
    def path(self) -> Path:
        """The path from which the ranges that are present can be read; it stays the same when the file is whole."""
        return self.model_folder / OUR_FOLDER / PARTS_FOLDER / self.sha256

    @property
    def blob(self) -> Path:
        """Path of the whole file in the hub's own part of the cache."""
        return self.model_folder / "blobs" / self.sha256

    @property
    def is_whole(self) -> bool:
        """Whether the path is a link to the hub's own copy."""
        return self.path.is_symlink() and self.path.is_file()

    @property
    def is_described(self) -> bool:
        """Whether the header is present, and valid."""
        return self.is_whole or self._read_record().is_described

    @property
    def is_verified(self) -> bool:
        """Whether everything is present, and verified by its sha256."""
        return self.is_whole or self._read_record().is_verified

    def present(self) -> Ranges:
        """Return the ranges that can be read."""
        return Ranges.of([(0, self.num_bytes)] if self.is_whole else self._read_record().ranges)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other processes that write to this file, and hold them off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self.path.with_suffix(".lock")):
            yield

    @contextlib.contextmanager
    def writer(self) -> Iterator[RangeWriter]:
        """Open the data for writing; the caller holds the lock. What was written is recorded at the end, also after an
        exception."""
        if not self._has_data():
            self._remove()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, self.num_bytes)
            writer = RangeWriter(self, descriptor)
            try:
                yield writer
            finally:
                writer.record()
        finally:
            os.close(descriptor)

    def add_ranges(self, ranges: Ranges) -> None:
        """Record further ranges; the caller holds the lock and has written them to the disk."""
        record = self._read_record()
        self._write_record(msgspec.structs.replace(record, ranges=(Ranges.of(record.ranges) | ranges).pairs))

    def mark_described(self) -> None:
        """Record that the header is present and valid; the caller holds the lock."""
        self._write_record(msgspec.structs.replace(self._read_record(), is_described=True))

    def verify(self) -> bool:
        """Whether the content, which is present completely, has its sha256; the caller holds the lock.

        A file with other content is removed: which of its ranges is wrong can't be found out.
        """
        with self.path.open("rb") as file:
            is_right = hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        if is_right:
            self._write_record(msgspec.structs.replace(self._read_record(), is_verified=True))
        else:
            self._remove()
        return is_right

    def promote(self) -> None:
        """Make the verified file the hub's own copy, and the path a link to it; the caller holds the lock.

        Readers find the file at its path at any time. On a disk without hard links, the file stays where it is.
        """
        self.blob.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(self.path, self.blob)
        self.adopt_blob()

    def adopt_blob(self) -> bool:
        """Whether the hub's own copy is here and used from now on; the caller holds the lock."""
        if self.is_whole:
            return True
        if not self.blob.is_file() or self.blob.stat().st_size != self.num_bytes:
            return False
        replace_by_link(self.path, self.blob)
        self._record_path.unlink(missing_ok=True)
        return True

    def _remove(self) -> None:
        # The record first: it must not outlive the data that it describes.
        self._record_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _record_path(self) -> Path:
        return self.path.with_suffix(".json")

    def _has_data(self) -> bool:
        try:
            return not self.path.is_symlink() and self.path.stat().st_size == self.num_bytes
        except OSError:
            return False

    def _read_record(self) -> Record:
        return read_record(self.path, self.num_bytes)

    def _write_record(self, record: Record) -> None:
        write_atomically(self._record_path, msgspec.json.encode(record))


class RangeWriter:
    """Writer of ranges into a partial file, for several threads."""

    def __init__(self, file: PartialFile, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor
        self._lock = threading.Lock()  # of the two fields below, and of the record
        self._unrecorded: list[tuple[int, int]] = []
        self._num_unrecorded = 0

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset."""
        stop = offset + len(data)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.pwrite(self._descriptor, remaining, stop - len(remaining)) :]
        with self._lock:
            self._unrecorded.append((offset, stop))
            self._num_unrecorded += len(data)
            if self._num_unrecorded >= RECORD_BYTES:
                self._record()

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that are present, recorded or not; fewer at the end of the file."""
        return os.pread(self._descriptor, length, offset)

    def record(self) -> None:
        """Synchronise what was written since the last record, then record it."""
        with self._lock:
            self._record()

    def _record(self) -> None:
        if not self._unrecorded:
            return
        os.fsync(self._descriptor)
        self._file.add_ranges(Ranges.of(self._unrecorded))
        self._unrecorded.clear()
        self._num_unrecorded = 0


def replace_by_link(path: Path, target: Path) -> None:
    """Make ``path`` a relative symbolic link to ``target``, at once."""
    link = path.with_name(f"{path.name}.{os.getpid()}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, path.parent))
    os.replace(link, path)
