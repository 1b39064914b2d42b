"""A GGUF model on a hub: files that are described by their headers and fetched by ranges.

GGUF files hold all layers of a model, and a worker needs those of its own layers: the parts of the files with their
tensors (``partial_file``). Integrity: each answer must have the requested range, the file's size, and the commit and
sha256 that the hub reported at lookup, as far as the answer names them. Content can be verified only once all of a file
is present; then its sha256 is computed, and the file becomes the hub's own copy in the cache, for other programs too.

From a hub without range requests, or without sha256, files are downloaded whole.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import hf_hub_download

from swarm.hub.cache import OUR_FOLDER, model_folder
from swarm.hub.download import TIMEOUT_S, Download, in_background, wait_with_progress
from swarm.hub.errors import RANGES_FAILED, HubErrors, gigabytes
from swarm.hub.gguf import parse_gguf
from swarm.hub.headers import Progress, RemoteFile, Report, StoredTensor
from swarm.hub.http import HubFile, NoRangesError, changed_file, counting_bar, silence_package, stream_range
from swarm.hub.partial_file import PartialFile, RangeWriter, replace_by_link
from swarm.hub.ranges import Ranges, plan_fetch

PIECE_BYTES = 64 << 20  # fetched while the file is locked
SLICE_BYTES = 16 << 20  # of a piece, fetched over a connection of its own
FIRST_READ_BYTES = 256 << 10  # of a header; then as much again as there is, because vocabularies take megabytes
MAX_FAILURES = 3  # connections in a row without a byte


@dataclass(frozen=True, slots=True)
class GgufSnapshot:
    """A GGUF model at one commit. Each file's header is here; other parts of it may be missing."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def name(self) -> str:
        """A name of exactly this model."""
        return f"{self.repository}/{self.files[0].path}@{self.commit}"

    @property
    def path(self) -> Path:
        """The first file, for reading; the others are beside it. Missing parts of a file read as zeros."""
        return self._path_of(self.files[0])

    @property
    def is_described(self) -> bool:
        """Whether all headers are here."""
        return all(
            self._is_whole(file) or (file.sha256 and self.partial_file(file).is_described) for file in self.files
        )

    def prepare(self, report: Report | None = None) -> None:
        """Fetch the missing headers. A file that can't be fetched in parts is downloaded whole. Raises ModelError."""
        report = report or (lambda _: None)
        for file in self.files:
            if not self._is_whole(file) and (not file.sha256 or not self._describe(file)):
                self._download_whole(file, report)
        if all(map(self._is_whole, self.files)):
            return
        for file in self.files:
            path = self._path_of(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_by_link(path, self.whole_path(file) if self._is_whole(file) else self.partial_file(file).path)

    def describe(self, file: str) -> RemoteFile | None:
        """Return size and sha256 of the file with this name; its header is in the file."""
        for ours in self.files:
            if ours.path.rpartition("/")[2] == file and ours.sha256:
                return RemoteFile(ours.num_bytes, ours.sha256, "")
        return None

    def missing(self, tensors: Collection[StoredTensor]) -> dict[str, int]:
        """Return how many bytes must be fetched before these tensors can be read, by file."""
        plans = {file: self.plan(file, wanted) for file, wanted in self._wanted(tensors).items()}
        return {file.path: plan.num_bytes for file, plan in plans.items() if plan}

    def fetch_tensors(
        self, tensors: Collection[StoredTensor], progress: Progress | None = None, report: Report | None = None
    ) -> None:
        """Fetch the parts of the files with these tensors.

        ``progress`` is called at least once a second with the bytes received so far and the total. Raises ModelError;
        what was received is kept.
        """
        wanted = self._wanted(tensors)
        incomplete = {file: ranges for file, ranges in wanted.items() if self.plan(file, ranges) or self._is_new(file)}
        _Fetch(self, progress or (lambda *_: None), report or (lambda _: None)).run(incomplete)

    @property
    def errors(self) -> HubErrors:
        return HubErrors(self.repository, self.commit)

    def _wanted(self, tensors: Collection[StoredTensor]) -> Mapping[HubFile, Ranges]:
        by_name = {file.path.rpartition("/")[2]: file for file in self.files}
        pairs: dict[HubFile, list[tuple[int, int]]] = defaultdict(list)
        for tensor in tensors:
            pairs[by_name[tensor.path.name]].append((tensor.offset, tensor.offset + tensor.num_bytes))
        return {file: Ranges.of(pairs[file]) for file in self.files if file in pairs}

    def plan(self, file: HubFile, wanted: Ranges) -> Ranges:
        """Return the ranges of a file to fetch before these can be read."""
        if self._is_whole(file):
            return Ranges()
        return plan_fetch(wanted, self.partial_file(file).present(), file.num_bytes)

    def _describe(self, file: HubFile) -> bool:
        """Fetch and check the header. False if the hub does not support range requests."""
        partial = self.partial_file(file)
        with self.errors.converted(RANGES_FAILED, file.path), silence_package(), partial.locked():
            if partial.adopt_blob() or partial.is_described:
                return True
            try:
                with partial.writer() as writer:
                    parse_gguf(self._path_of(file), file.num_bytes, _HeaderReader(file, partial, writer).read)
            except NoRangesError:
                return False
            partial.mark_described()
            return True

    def _download_whole(self, file: HubFile, report: Report) -> None:
        folder = self._snapshot_folder
        Download(self.repository, folder, {file.path: file.num_bytes}, lambda *_: None, report).run([file.path])

    def _is_whole(self, file: HubFile) -> bool:
        return self.whole_path(file).is_file()

    def _is_new(self, file: HubFile) -> bool:
        """Whether the file was fetched completely, but the process was killed before it was verified."""
        if self._is_whole(file):
            return False
        part = self.partial_file(file)
        return part.present().num_bytes == file.num_bytes and not part.is_verified

    @property
    def _snapshot_folder(self) -> Path:
        return model_folder(self.repository) / "snapshots" / self.commit

    def whole_path(self, file: HubFile) -> Path:
        """Return the path at which the hub's own tools have the file once it is whole."""
        return self._snapshot_folder / file.path

    def _path_of(self, file: HubFile) -> Path:
        """Return the path for reading: in the hub's own folder if all files are whole, else in ours.

        Parts of a split model must be beside each other.
        """
        if all(map(self._is_whole, self.files)):
            return self.whole_path(file)
        return model_folder(self.repository) / OUR_FOLDER / self.commit / file.path

    def partial_file(self, file: HubFile) -> PartialFile:
        """Return the file in which the fetched ranges are."""
        return PartialFile(model_folder(self.repository), file.sha256, file.num_bytes)


class _HeaderReader:
    """Reader of a header that fetches what it reads, and at the start of the file as much again."""

    def __init__(self, file: HubFile, partial: PartialFile, writer: RangeWriter) -> None:
        self._file, self._partial, self._writer = file, partial, writer
        self._present = partial.present()

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self._file.num_bytes)
        missing = Ranges.of([(offset, stop)]) - self._present
        if missing:
            first = missing.pairs[0][0]
            if self._present.pairs[:1] in ((), ((0, first),)):
                stop = max(stop, min(2 * first + FIRST_READ_BYTES, self._file.num_bytes))
            _fetch_range(self._file, first, stop, self._writer, lambda _: None)
            self._present |= Ranges.of([(first, stop)])
        return self._writer.read(offset, length)


@dataclass(slots=True)
class _Fetch:
    """One fetch of ranges of several files."""

    snapshot: GgufSnapshot
    progress: Progress
    report: Report
    num_received: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the number

    def run(self, wanted: Mapping[HubFile, Ranges]) -> None:
        sizes = {file: self.snapshot.plan(file, ranges).num_bytes for file, ranges in wanted.items()}
        total = sum(sizes.values())
        with self.snapshot.errors.converted(RANGES_FAILED, ", ".join(file.path for file in wanted)), silence_package():
            self._check_space(total)
            finished = 0
            for number, (file, ranges) in enumerate(wanted.items(), 1):
                if sizes[file]:
                    size = f"{gigabytes(sizes[file])} of {gigabytes(file.num_bytes)}"
                    self.report(f"fetching {self.snapshot.repository}: {file.path} ({number} of {len(wanted)}, {size})")
                self._fetch(file, ranges, total)
                finished += sizes[file]
                self.num_received = finished  # Another process may have fetched some of it.
                self.progress(finished, total)

    def _fetch(self, file: HubFile, wanted: Ranges, total: int) -> None:
        future = in_background(lambda: self._fetch_file(file, wanted))
        wait_with_progress(future, lambda: self.progress(min(self.num_received, total), total))

    def _fetch_file(self, file: HubFile, wanted: Ranges) -> None:
        """Fetch piece by piece, so that other processes can fetch theirs in between."""
        partial = self.snapshot.partial_file(file)
        try:
            while self._fetch_piece(file, partial, wanted):
                pass
        except NoRangesError:
            self._fetch_whole(file)
            with partial.locked():
                if not partial.adopt_blob():
                    raise changed_file(file, "another size or sha256") from None

    def _fetch_piece(self, file: HubFile, partial: PartialFile, wanted: Ranges) -> bool:
        """Fetch the next missing piece. False if there is none."""
        with partial.locked():
            piece = Ranges()
            if not partial.adopt_blob():
                piece = plan_fetch(wanted, partial.present(), file.num_bytes).first_bytes(PIECE_BYTES)
            if piece:
                with partial.writer() as writer:
                    self._fetch_slices(file, *piece.pairs[0], writer)
            else:
                self._finish(file, partial)
            return bool(piece)

    def _fetch_slices(self, file: HubFile, first: int, stop: int, writer: RangeWriter) -> None:
        """Fetch a piece, a long one over several connections: hubs limit the rate of each."""

        def fetch(start: int) -> Callable[[], None]:
            return lambda: _fetch_range(file, start, min(start + SLICE_BYTES, stop), writer, self._count)

        slices = [in_background(fetch(start)) for start in range(first, stop, SLICE_BYTES)]
        wait(slices)  # All of them, also after an error: the file must stay open as long as one writes.
        for each in slices:
            each.result()

    def _count(self, num_bytes: int) -> None:
        with self.lock:
            self.num_received += num_bytes

    def _fetch_whole(self, file: HubFile) -> None:
        """Download the whole file from a hub that supported range requests at lookup, but does no longer."""
        self._check_space(file.num_bytes)
        before = self.num_received

        def on_bytes(num_bytes: int) -> None:
            self.num_received = max(self.num_received, before + num_bytes)

        hf_hub_download(
            file.repository,
            file.path,
            revision=file.commit,
            etag_timeout=TIMEOUT_S,
            tqdm_class=counting_bar(on_bytes),
        )

    def _finish(self, file: HubFile, partial: PartialFile) -> None:
        """If all of the file is present, verify it, and make it the hub's own copy."""
        if not partial.is_whole:
            if partial.present().num_bytes < file.num_bytes:
                return
            if not partial.is_verified and not partial.verify():
                raise self.snapshot.errors.wrong_content(file.path, file.sha256)
            partial.promote()
        whole = self.snapshot.whole_path(file)
        if partial.is_whole and not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            replace_by_link(whole, partial.blob)

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(model_folder(self.snapshot.repository)).free
        if num_bytes > free:
            raise self.snapshot.errors.no_space(num_bytes, free)


def _fetch_range(file: HubFile, first: int, stop: int, writer: RangeWriter, on_bytes: Callable[[int], None]) -> None:
    """Fetch a range; a broken connection is resumed where it broke."""
    position, num_failures = first, 0
    while position < stop:
        before = position
        for data in stream_range(file, position, stop):
            writer.write(position, data)
            position += len(data)
            on_bytes(len(data))
        num_failures = 0 if position > before else num_failures + 1
        if num_failures == MAX_FAILURES:
            raise ConnectionError("the connection breaks off before a byte is received")
