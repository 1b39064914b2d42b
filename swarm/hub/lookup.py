"""Models by name: ``owner/name`` or ``owner/name@revision``, known before they are fetched, fetched file by file.

What the package huggingface_hub knows, holds here too: ``HF_ENDPOINT`` says where the hub is, ``HF_HUB_CACHE`` or
``HF_HOME`` where its cache is, ``HF_TOKEN`` who asks, ``HF_HUB_OFFLINE`` that nobody may be asked. No torch in
here; but the package is slow to load, so import this where a name is to be looked up, not before.

:func:`look_up` fetches the small files, and of the weights only the headers, by range requests: a few kilobytes per
file say what is in it, and the hub names each file by the sha256 of its content. These descriptions are kept beside the
small files in the cache, so that the next look-up of the same commit asks nobody. A worker then lets
:meth:`Snapshot.fetch` bring the files that its layers are in.

Where a hub answers no range requests, or tells no sha256 of a file, that file is fetched whole at look-up.

A file is either whole or absent in the cache; processes that share a cache and want the same file wait for each other.
A connection that breaks is taken up again where it was; who gives up at last keeps the files that came whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import msgspec
from huggingface_hub import HfApi, ModelInfo, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub import try_to_load_from_cache as find_in_cache
from huggingface_hub.hf_api import RepoSibling

from swarm.errors import ModelError
from swarm.hub.errors import BROKEN_OFF, NOT_THERE, UNREACHABLE, Trouble, gigabytes
from swarm.hub.headers import INDEX, LENGTH_BYTES, MAX_HEADER_BYTES, SINGLE, Progress, RemoteFile, Report, remote_header
from swarm.hub.http import counting_bar, quiet, range_of

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"

# All that is ever read beside the weights. Named one by one: repositories hold the same weights in other formats, in
# folders of their own and as pickles, which nobody here shall even have on disk.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    INDEX,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

TIMEOUT_S = 20.0  # for the hub's first answer; a busy one takes a few seconds, and a person is waiting
TICK_S = 1.0  # between two words of progress while no byte comes: far below the patience of whoever watches us
FIRST_BYTES = 128 << 10  # of a file: nearly always the whole header, in one request
HEADERS_AT_A_TIME = 8
DESCRIPTIONS = "swarm"  # our folder in the model's cache; whoever deletes the model there deletes it too


def look_up(repository: str, revision: str | None = None, report: Report | None = None) -> Snapshot:
    """A model's small files, in the cache's folder, and descriptions of its weights.

    The cache comes first: if it holds all that, whichever weights are there, nobody is asked. ``report`` gets a line
    before each file of weights that must be fetched now. Raises ModelError.
    """
    return _LookUp(repository, revision, report or (lambda _: None)).snapshot()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model at one commit. Every file of weights is in the folder or described."""

    repository: str
    folder: Path
    described: Mapping[str, RemoteFile]

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.folder.name}"

    @property
    def files(self) -> list[str]:
        """All files of weights."""
        return shards_of(self.folder)

    def describe(self, file: str) -> RemoteFile | None:
        return self.described.get(file)

    def fetch(self, files: Collection[str], progress: Progress | None = None, report: Report | None = None) -> None:
        """Bring these files of weights, those that are not there, one after the other.

        ``progress`` is called once a second at least, with the bytes that came so far and those that shall come; waits
        end, because the package gives up when no byte comes. Raises ModelError: one sentence on what was tried, why it
        failed, what to do.
        """
        sizes = {file: described.num_bytes for file, described in self.described.items()}
        _Download(self.repository, self.folder, sizes, progress or (lambda *_: None), report or (lambda _: None)).run(
            files
        )


# --- finding out what there is ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LookUp:
    """One look-up. Everything that the package raises ends here, as a ModelError."""

    repository: str
    revision: str | None
    report: Report

    @property
    def trouble(self) -> Trouble:
        return Trouble(self.repository, self.revision)

    def snapshot(self) -> Snapshot:
        cached = self._cached()
        if cached is not None and _is_complete(cached.folder):
            return cached
        try:
            with quiet():
                return self._ask(self._files())
        except ModelError:
            if cached is not None:  # weights without a tokenizer: all that there is, as far as we can know
                return cached
            raise

    def _cached(self) -> Snapshot | None:
        """Return what the cache knows, if it knows every file."""
        try:
            config = find_in_cache(self.repository, CONFIG, revision=self.revision)
        except ValueError as error:  # the package is stricter about names
            raise self.trouble.no_name(error) from None
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        found = Snapshot(self.repository, folder, _remembered(folder))
        known = ((folder / file).is_file() or file in found.described for file in found.files)
        return found if all(known) else None

    def _files(self) -> dict[str, RepoSibling]:
        """The files of the repository. Refuses one that has nothing for us before a byte is loaded."""
        files = {file.rfilename: file for file in self._info().siblings or []}
        if CONFIG not in files:
            raise ModelError(f"{self.trouble.name} has no {CONFIG}; is it a language model in Hugging Face form?")
        if INDEX not in files and SINGLE not in files:
            raise ModelError(
                f"{self.trouble.name} has no {SINGLE} and no index of shards; weights in other formats can't be used: "
                "choose a repository that has safetensors, or convert it and name the local directory"
            )
        return files

    def _info(self) -> ModelInfo:
        with self.trouble.explained(UNREACHABLE):
            try:
                return HfApi().model_info(
                    self.repository, revision=self.revision, files_metadata=True, timeout=TIMEOUT_S
                )
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
                raise ModelError(f"what answers at {constants.ENDPOINT} is no model hub; correct HF_ENDPOINT") from None

    def _ask(self, files: dict[str, RepoSibling]) -> Snapshot:
        with self.trouble.explained(BROKEN_OFF):
            small = [file for file in SMALL_FILES if file in files]
            folder = Path(snapshot_download(self.repository, revision=self.revision, allow_patterns=small))
            absent = [file for file in shards_of(folder) if not (folder / file).is_file()]
            for file in absent:
                if file not in files:
                    raise self.trouble.no_shard(file)
            described = self._describe_all(folder, [files[file] for file in absent])
            _remember(folder, described)
        sizes = {file: files[file].size or 0 for file in absent}
        opaque = [file for file in absent if file not in described]
        _Download(self.repository, folder, sizes, lambda *_: None, self.report).run(opaque)
        return Snapshot(self.repository, folder, described)

    def _describe_all(self, folder: Path, files: list[RepoSibling]) -> dict[str, RemoteFile]:
        """Those files that can be described."""
        with ThreadPoolExecutor(HEADERS_AT_A_TIME) as pool:
            described = pool.map(lambda file: self._describe(folder, file), files)
            return {file.rfilename: found for file, found in zip(files, described, strict=True) if found is not None}

    def _describe(self, folder: Path, file: RepoSibling) -> RemoteFile | None:
        if file.lfs is None or not file.size:
            return None
        header = self._header(folder.name, file.rfilename)
        if header is None:
            return None
        found = RemoteFile(file.size, file.lfs.sha256, header)
        tuple(remote_header(folder / file.rfilename, found))  # a damaged one is refused now, not after the fetch
        return found

    def _header(self, commit: str, file: str) -> str | None:
        """The file's header; None if the hub gives no part of a file."""
        start = range_of(self.repository, commit, file, 0, FIRST_BYTES)
        if start is None:
            return None
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        stop = LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"{file} of {self.trouble.name} is no safetensors file: its header would have {length} B")
        if stop > len(start):
            rest = range_of(self.repository, commit, file, len(start), stop)
            if rest is None:
                return None
            start += rest
        return start[LENGTH_BYTES:stop].decode()


def shards_of(folder: Path) -> list[str]:
    """The model's files of weights, whether they are there or not; the index must be, if there is one."""
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} can't be read as an index of shards; remove it, and it is fetched again") from None
    strange = [name for name in names if not isinstance(name, str) or not name.endswith(".safetensors")]
    strange += [name for name in names if isinstance(name, str) and Path(name).name != name]
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}, which is not a safetensors file beside it")
    return sorted(names)


# --- descriptions in the cache ----------------------------------------------------------------------------------------


def _place_of(folder: Path) -> Path:
    """Not in the folder itself, which is the repository's; a commit never changes, so this is never out of date."""
    return folder.parent.parent / DESCRIPTIONS / f"{folder.name}.json"


def _is_complete(folder: Path) -> bool:
    """Are all small files here that the hub has? If we fetched them, or if there is more than a library would fetch
    that wants the weights alone."""
    return (folder / TOKENIZER).is_file() or _place_of(folder).is_file()


def _remembered(folder: Path) -> dict[str, RemoteFile]:
    try:
        return msgspec.json.decode(_place_of(folder).read_bytes(), type=dict[str, RemoteFile])
    except (OSError, msgspec.DecodeError):
        return {}  # the hub is asked again


def _remember(folder: Path, described: dict[str, RemoteFile]) -> None:
    """Whole or not at all: others may read at the same time."""
    place = _place_of(folder)
    place.parent.mkdir(exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(_remembered(folder) | described))
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)


# --- fetching ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Download:
    """Files of one commit, one after the other."""

    repository: str
    folder: Path
    sizes: Mapping[str, int]
    progress: Progress
    report: Report
    num_came: int = 0

    @property
    def trouble(self) -> Trouble:
        return Trouble(self.repository, self.folder.name)

    def run(self, files: Collection[str]) -> None:
        missing = [file for file in sorted(files) if not (self.folder / file).is_file()]
        total = sum(self.sizes.get(file, 0) for file in missing)
        with self.trouble.explained(NOT_THERE, ", ".join(missing)), quiet():
            self._check_room(total)
            for number, file in enumerate(missing, 1):
                size = gigabytes(self.sizes.get(file, 0))
                self.report(f"fetching {self.repository}: {file} ({number} of {len(missing)}, {size})")
                self._fetch(file, total)

    def _fetch(self, file: str, total: int) -> None:
        before = self.num_came

        def came(num_bytes: int) -> None:
            self.num_came = max(self.num_came, before + num_bytes)

        future = _in_background(
            lambda: hf_hub_download(
                self.repository,
                file,
                revision=self.folder.name,  # the commit that the small files are of: somebody may push another
                etag_timeout=TIMEOUT_S,
                tqdm_class=counting_bar(came),
            )
        )
        while not wait_for([future], TICK_S).done:
            self.progress(min(self.num_came, total), total)
        future.result()
        self.num_came = before + self.sizes.get(file, 0)  # another process may have brought it
        self.progress(min(self.num_came, total), total)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise self.trouble.no_room(num_bytes, free)


def _in_background(work: Callable[[], object]) -> Future[object]:
    """In a thread that does not keep the process from ending: it may wait for a slow hub."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except (OSError, errors.HTTPError, ValueError, RuntimeError) as error:
            future.set_exception(error)
        finally:
            if not future.done():
                future.set_exception(RuntimeError("the download ended in a way nobody expected"))

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future
