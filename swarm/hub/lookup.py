"""Models by name (``names``): described before they are downloaded, downloaded file by file, or by ranges of a file
(``gguf_lookup``).

The environment variables of huggingface_hub apply: ``HF_ENDPOINT`` (address of the hub), ``HF_HUB_CACHE`` or
``HF_HOME`` (location of the cache), ``HF_TOKEN`` (credentials), ``HF_HUB_OFFLINE`` (no requests). This module does not
import torch; but huggingface_hub is slow to import, so import this module only when a name must be looked up.

:func:`look_up` downloads the small files, and of the weights only the headers, by range requests: a few kilobytes
describe a file, and the hub reports the sha256 of its content. The descriptions are stored in the cache next to the
small files, so that the next lookup of the same commit needs no request. A worker then downloads the files with its
layers (:meth:`ModelSnapshot.fetch`).

If a hub does not support range requests, or reports no sha256 of a file, that file is downloaded whole at lookup.

A file in the cache is either complete or absent; processes that share a cache and want the same file wait for each
other. A broken connection is resumed; after a final failure, complete files are kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub import try_to_load_from_cache as find_in_cache
from huggingface_hub.hf_api import RepoSibling

from swarm.errors import ModelError
from swarm.hub.cache import TOKENIZER, is_complete, read_descriptions, store_descriptions
from swarm.hub.download import Download
from swarm.hub.errors import INTERRUPTED, HubErrors
from swarm.hub.gguf_choice import list_models
from swarm.hub.gguf_lookup import GgufLookup
from swarm.hub.gguf_snapshot import GgufSnapshot
from swarm.hub.headers import (
    INDEX,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SINGLE,
    Progress,
    RemoteFile,
    Report,
    StoredTensor,
    read_header,
    remote_header,
)
from swarm.hub.http import read_range, silence_package
from swarm.hub.listing import list_files
from swarm.hub.names import HubName

CONFIG = "config.json"

# All files that are ever read in addition to the weights. Listed by name, because repositories also hold the same
# weights in other formats, in subfolders and as pickles, which must never reach the disk.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    INDEX,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "quant_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "modules.json",
    "preprocessor_config.json",
    "1_Pooling/config.json",
)

FIRST_READ_BYTES = 128 << 10  # Of a file: nearly always the whole header, in one request.
MAX_PARALLEL_HEADERS = 8


def look_up(name: HubName, report: Report | None = None) -> ModelSnapshot | GgufSnapshot:
    """Return a model's small files, in the cache's folder, and descriptions of its weights; of a GGUF model its header.

    The cache has priority: if it has all of that, whichever weights are present, no request is made. ``report`` gets a
    line before each file of weights that must be downloaded now. Raises ModelError.
    """
    report = report or (lambda _: None)
    return GgufLookup(name, report).snapshot() if name.has_choice else _Lookup(name, report).snapshot()


def cached_snapshot(repository: str, revision: str | None = None) -> ModelSnapshot | None:
    """Return what the cache has of a repository's safetensors, without a request; None unless it covers every file.

    Raises ModelError.
    """
    return _Lookup(HubName(repository, revision), lambda _: None).read_cache()


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A model at one commit. Every file of weights is in the folder or described."""

    repository: str
    folder: Path
    descriptions: Mapping[str, RemoteFile]

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.folder.name}"

    @property
    def files(self) -> list[str]:
        """Return the names of all files of weights."""
        return shards_of(self.folder)

    def describe(self, file: str) -> RemoteFile | None:
        return self.descriptions.get(file)

    def missing(self, tensors: Collection[StoredTensor]) -> dict[str, int]:
        """Return the files that hold these tensors and are not here yet, with their sizes in bytes."""
        absent = sorted({tensor.path for tensor in tensors if not tensor.path.is_file()})
        for path in absent:
            if path.name not in self.descriptions:
                raise ModelError(f"{path} is missing; it was there before: start again, and it is downloaded again")
        return {path.name: self.descriptions[path.name].num_bytes for path in absent}

    def fetch_tensors(
        self, tensors: Collection[StoredTensor], progress: Progress | None = None, report: Report | None = None
    ) -> None:
        """Download the missing files that hold these tensors, and compare them with their descriptions."""
        files = self.missing(tensors)
        self.fetch(files, progress, report)
        described = {tensor.name: tensor for tensor in tensors}
        for tensor in (tensor for file in files for tensor in read_header(self.folder / file)):
            if described.get(tensor.name, tensor) != tensor:
                raise ModelError(f"{tensor.path} has another {tensor.name} than the hub describes; remove the file")

    def fetch(self, files: Collection[str], progress: Progress | None = None, report: Report | None = None) -> None:
        """Download the missing ones of these files of weights, one after the other.

        ``progress`` is called at least once a second with the bytes received so far and the total. The download ends
        even on a stalled connection, because huggingface_hub times out. Raises ModelError: one sentence with what was
        tried, why it failed, and what to do.
        """
        sizes = {file: described.num_bytes for file, described in self.descriptions.items()}
        Download(self.repository, self.folder, sizes, progress or (lambda *_: None), report or (lambda _: None)).run(
            files
        )


# --- lookup -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One lookup. All exceptions of huggingface_hub become ModelErrors here."""

    hub_name: HubName
    report: Report

    @property
    def repository(self) -> str:
        return self.hub_name.repository

    @property
    def revision(self) -> str | None:
        return self.hub_name.revision

    @property
    def errors(self) -> HubErrors:
        return HubErrors(self.repository, self.revision)

    def snapshot(self) -> ModelSnapshot | GgufSnapshot:
        cached = self.read_cache()
        if cached is not None and is_complete(cached.folder):
            return cached
        gguf = GgufLookup(self.hub_name, self.report)
        if cached is None and (cached_gguf := gguf.cached()) is not None:
            return cached_gguf
        try:
            with silence_package():
                listing = list_files(self.repository, self.revision)
                if INDEX not in listing.files and SINGLE not in listing.files and list_models(listing.files):
                    return gguf.listed(listing)
                self._check_usable(listing.files)
                return self._query_hub(listing.files)
        except ModelError:
            # Weights without a tokenizer: use them, because the hub can't be asked whether there is one.
            if cached is not None:
                return cached
            raise

    def read_cache(self) -> ModelSnapshot | None:
        """Return the cached description, if it covers every file."""
        try:
            config = find_in_cache(self.repository, CONFIG, revision=self.revision)
        except ValueError as error:  # huggingface_hub accepts fewer names than our own check.
            raise self.errors.invalid_name(error) from None
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        snapshot = ModelSnapshot(self.repository, folder, read_descriptions(folder))
        known = ((folder / file).is_file() or file in snapshot.descriptions for file in snapshot.files)
        return snapshot if all(known) else None

    def _check_usable(self, files: Collection[str]) -> None:
        """Reject an unusable repository before anything is downloaded."""
        if CONFIG not in files:
            raise ModelError(f"{self.errors.name} has no {CONFIG}; is it a language model in Hugging Face form?")
        if INDEX not in files and SINGLE not in files:
            raise ModelError(
                f"{self.errors.name} has no {SINGLE} and no index of shards; weights in other formats can't be used: "
                "choose a repository that has safetensors or GGUF files, or convert it and name the local directory"
            )

    def _query_hub(self, files: dict[str, RepoSibling]) -> ModelSnapshot:
        with self.errors.converted(INTERRUPTED):
            small_files = [file for file in SMALL_FILES if file in files]
            folder = Path(snapshot_download(self.repository, revision=self.revision, allow_patterns=small_files))
            missing = [file for file in shards_of(folder) if not (folder / file).is_file()]
            for file in missing:
                if file not in files:
                    raise self.errors.missing_shard(file)
            described = self._describe_all(folder, [files[file] for file in missing])
            store_descriptions(folder, described)
        sizes = {file: files[file].size or 0 for file in missing}
        opaque = [file for file in missing if file not in described]
        Download(self.repository, folder, sizes, lambda *_: None, self.report).run(opaque)
        return ModelSnapshot(self.repository, folder, described)

    def _describe_all(self, folder: Path, files: list[RepoSibling]) -> dict[str, RemoteFile]:
        """Return descriptions of the files that can be described."""
        with ThreadPoolExecutor(MAX_PARALLEL_HEADERS) as pool:
            described = pool.map(lambda file: self._describe(folder, file), files)
            return {file.rfilename: found for file, found in zip(files, described, strict=True) if found is not None}

    def _describe(self, folder: Path, file: RepoSibling) -> RemoteFile | None:
        if file.lfs is None or not file.size:
            return None
        header = self._read_header(folder.name, file.rfilename)
        if header is None:
            return None
        described = RemoteFile(file.size, file.lfs.sha256, header)
        tuple(remote_header(folder / file.rfilename, described))  # Reject a damaged header now, not after the download.
        return described

    def _read_header(self, commit: str, file: str) -> str | None:
        """Return the file's header; None if the hub does not support range requests."""
        start = read_range(self.repository, commit, file, 0, FIRST_READ_BYTES)
        if start is None:
            return None
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        stop = LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"{file} of {self.errors.name} is no safetensors file: its header would have {length} B")
        if stop > len(start):
            rest = read_range(self.repository, commit, file, len(start), stop)
            if rest is None:
                return None
            start += rest
        return start[LENGTH_BYTES:stop].decode()


def shards_of(folder: Path) -> list[str]:
    """Return the names of the model's files of weights, present or not. If the model has an index, it must be here."""
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} can't be read as an index of shards; remove it, and it is fetched again") from None
    invalid = [name for name in names if not isinstance(name, str) or not name.endswith(".safetensors")]
    invalid += [name for name in names if isinstance(name, str) and Path(name).name != name]
    if invalid:
        raise ModelError(f"{index} names {invalid[0]!r}, which is not a safetensors file in the same folder")
    return sorted(names)
