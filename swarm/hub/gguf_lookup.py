"""Lookup of GGUF models: which of a repository's files are meant, and their headers.

A list of the commit's GGUF files is stored in the cache, so that the next lookup needs no request. Without that list,
because another program filled the cache, its whole files can be chosen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.errors import ModelError
from swarm.hub.cache import OUR_FOLDER, add_snapshot, find_snapshot, write_atomically
from swarm.hub.errors import HubErrors
from swarm.hub.gguf_choice import GgufChoice, choose_model, list_models
from swarm.hub.gguf_snapshot import GgufSnapshot
from swarm.hub.headers import INDEX, SINGLE, Report
from swarm.hub.http import HubFile
from swarm.hub.listing import Listing, list_files
from swarm.hub.names import HubName

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _File(msgspec.Struct, frozen=True, array_like=True):
    num_bytes: int
    sha256: str  # empty if the hub reports none


class _Catalogue(msgspec.Struct, frozen=True):
    """The GGUF files of a commit, by their paths in the repository."""

    files: dict[str, _File]
    has_safetensors: bool


@dataclass(frozen=True, slots=True)
class GgufLookup:
    """One lookup of a GGUF model."""

    name: HubName
    report: Report

    def snapshot(self) -> GgufSnapshot:
        """Return the model with its headers, from the cache if possible. Raises ModelError."""
        return self.cached() or self.listed(list_files(self.name.repository, self.name.revision))

    def cached(self) -> GgufSnapshot | None:
        """Return the model if the cache has all of its headers, and certainly the name means this model."""
        try:
            folder = find_snapshot(self.name.repository, self.name.revision)
        except ValueError as error:  # huggingface_hub accepts fewer names than our own check.
            raise HubErrors(self.name.repository, self.name.revision).invalid_name(error) from None
        if folder is None:
            return None
        catalogue = _read_catalogue(folder)
        if not self.name.has_choice and (catalogue is None or catalogue.has_safetensors):
            return None
        try:
            snapshot = self._choose(folder, (catalogue or _catalogue_whole_files(folder)).files)
        except ModelError:
            return None  # The hub's newest commit may have it.
        return snapshot if snapshot.is_described else None

    def listed(self, listing: Listing) -> GgufSnapshot:
        """Return the model from the hub's list of files. Raises ModelError."""
        errors = HubErrors(self.name.repository, self.name.revision)
        catalogue = _catalogue(listing)
        choose_model(self.name, list_models(catalogue.files))  # Before anything is written.
        if not _COMMIT.fullmatch(listing.commit):
            raise errors.no_commit(listing.commit)
        with errors.converted("the cache {cache} can't be used for {name}: {reason}"):
            folder = add_snapshot(self.name.repository, self.name.revision, listing.commit)
            path = _catalogue_path(folder)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, msgspec.json.encode(catalogue))
        snapshot = self._choose(folder, catalogue.files)
        snapshot.prepare(self.report)
        return snapshot

    def _choose(self, folder: Path, files: dict[str, _File]) -> GgufSnapshot:
        return _make_snapshot(self.name.repository, folder, files, choose_model(self.name, list_models(files)))


def list_cached(repository: str, revision: str | None = None) -> list[GgufSnapshot]:
    """Return a commit's GGUF models of which the cache has the headers, by their names in the repository."""
    folder = find_snapshot(repository, revision)
    if folder is None:
        return []
    files = (_read_catalogue(folder) or _catalogue_whole_files(folder)).files
    snapshots = [_make_snapshot(repository, folder, files, choice) for choice in list_models(files)]
    return [snapshot for snapshot in snapshots if snapshot.is_described]


def _make_snapshot(repository: str, folder: Path, files: dict[str, _File], choice: GgufChoice) -> GgufSnapshot:
    hub_files = [
        HubFile(repository, folder.name, path, files[path].num_bytes, files[path].sha256) for path in choice.files
    ]
    return GgufSnapshot(repository, folder.name, tuple(hub_files))


def _catalogue(listing: Listing) -> _Catalogue:
    files: dict[str, _File] = {}
    for path, file in listing.files.items():
        if path.lower().endswith(".gguf"):
            sha256 = file.lfs.sha256 if file.lfs is not None else ""
            files[path] = _File(file.size or 0, sha256 if _SHA256.fullmatch(sha256) and file.size else "")
    return _Catalogue(files, INDEX in listing.files or SINGLE in listing.files)


def _catalogue_whole_files(folder: Path) -> _Catalogue:
    """Return the whole GGUF files in a commit's folder."""
    files: dict[str, _File] = {}
    for path in folder.rglob("*.gguf"):
        if path.is_file():
            blob = path.resolve().name
            files[path.relative_to(folder).as_posix()] = _File(
                path.stat().st_size, blob if _SHA256.fullmatch(blob) else ""
            )
    return _Catalogue(files, has_safetensors=False)


def _catalogue_path(folder: Path) -> Path:
    return folder.parent.parent / OUR_FOLDER / f"{folder.name}.gguf.json"


def _read_catalogue(folder: Path) -> _Catalogue | None:
    try:
        return msgspec.json.decode(_catalogue_path(folder).read_bytes(), type=_Catalogue)
    except (OSError, msgspec.DecodeError):
        return None  # The hub is asked again.
