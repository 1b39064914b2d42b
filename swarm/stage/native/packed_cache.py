"""Cache of packed matrices on disk, so that a worker's next start neither quantizes nor packs.

Matrices from the cache are mapped, not read. On the machine of the measurements a mapped matrix was multiplied as fast
as one in large pages (13 GB/s on two cores, both), 390 MB were ready in 0.03 s instead of 0.15 s or more, and workers
that hold the same layers, as standby does, share the memory. What is mapped counts as resident memory of each worker.

A cache that can't be used (a full or read-only disk, no home directory) costs only the time to pack.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from swarm.cache_folder import cache_folder
from swarm.log import get_logger
from swarm.stage import native
from swarm.stage.native.packed_files import FIRST_NUMBER, PackedFiles

log = get_logger(__name__)

# Matrices in use in this process. A table that is both embedding and head exists once.
_in_use: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

_files: PackedFiles | None = None  # None: packed matrices stay in memory
_warned: set[str] = set()  # problems that were logged already: once per process is enough


def configure(limit_bytes: int) -> None:
    """Keep packed matrices on disk from now on, up to this total; 0 keeps none. Without a call, none are kept."""
    global _files  # noqa: PLW0603 (one cache for the process, as for the kernels)
    _files = PackedFiles(folder(), limit_bytes) if limit_bytes else None


def folder() -> Path:
    """Return the cache's folder: ``packed`` in ``$SWARM_CACHE``, or in ``swarm`` in the user's cache directory."""
    return cache_folder("packed")


def load_or_pack(key: str, num_bytes: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the packed matrix with this key: from this process, from the cache, or filled by ``pack``.

    A matrix with an empty key is not cached.
    """
    if not key:
        return _pack(num_bytes, pack)
    packed = _in_use.get(key)
    if packed is None:
        name = _file_name(key)
        packed = _map(name, num_bytes)
        if packed is None:
            packed = _store(name, _pack(num_bytes, pack))
        _in_use[key] = packed
    return packed


def _pack(num_bytes: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
    packed = native.allocate_weights(num_bytes, torch.uint8)
    pack(packed)
    return packed


def _map(name: str, num_bytes: int) -> torch.Tensor | None:
    """Return the matrix in this file of the cache; None if it has none."""
    if _files is None:
        return None
    try:
        mapping = _files.map(name, num_bytes)
    except OSError as error:
        why = str(error)
        _warn_once("unread", lambda: log.warning("packed_cache_unread", folder=str(folder()), why=why))
        return None
    return None if mapping is None else torch.from_numpy(np.frombuffer(mapping, np.uint8, num_bytes, FIRST_NUMBER))


def _store(name: str, packed: torch.Tensor) -> torch.Tensor:
    """Write a matrix to the cache. Return it from there, so that workers share its memory; or as it is, if that
    fails."""
    if _files is None:
        return packed
    try:
        if not _files.write(name, memoryview(packed.numpy())):  # type: ignore[arg-type]
            why = "raise worker.packed_cache_bytes, or free disk space"
            _warn_once("full", lambda: log.warning("packed_cache_full", folder=str(folder()), why=why))
            return packed
    except OSError as error:
        why = str(error)
        _warn_once("unwritten", lambda: log.warning("packed_cache_unwritten", folder=str(folder()), why=why))
        return packed
    stored = _map(name, len(packed))
    return packed if stored is None else stored


def _warn_once(problem: str, warn: Callable[[], None]) -> None:
    """Log a problem of the cache, unless this process has logged it already."""
    if problem not in _warned:
        _warned.add(problem)
        warn()


def _file_name(key: str) -> str:
    return hashlib.sha256(f"{_layout()} {key}".encode()).hexdigest()[:40]


@cache
def _layout() -> str:
    """Return what identifies the packed layout: the sources of the library that packs."""
    opened, reason = native.open_library()
    assert opened is not None, reason
    sources: str = opened.swarm_native_sources().decode()
    return sources
