"""Folder with the files that a GGUF model lacks: configuration and tokenizer, derived from its header.

The folder is in the user's cache directory, under a hash of everything that its contents are made of, and is written
once. Its files are those of a usual model folder, so that workers and clients treat both in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swarm.cache_folder import cache_folder
from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel
from swarm.stage.model.gguf_config import make_config
from swarm.stage.model.gguf_metadata import GgufMetadata
from swarm.stage.model.gguf_tokenizer import end_tokens, make_tokenizer

_VERSION = 2  # increase it when the derived files change
_LIST = "derived.json"  # names and sizes of the derived files, by which an incomplete folder is recognized
_PARTIAL = "partial-"  # beginning of the name of a folder that is being written, or is given up
_LEFTOVER_S = 3600.0  # age at which such a folder belongs to a process that has ended


def derived_folders() -> Path:
    """Return the folder of all derived files: ``gguf`` in ``$SWARM_CACHE`` or the user's cache directory."""
    return cache_folder("gguf")


def derive_folder(model: GgufModel) -> Path:
    """Return the folder with this model's configuration and tokenizer; write it if it is not there yet.

    Raises ``ModelError``.
    """
    path = derived_folders() / f"v{_VERSION}-{_header_digest(model)}"
    if _is_complete(path):
        return path
    files = _make_files(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        _write_folder(path, files)
    except OSError as error:
        if not _is_complete(path):
            raise ModelError(f"{path} can't be written ({error}); name a writable directory in SWARM_CACHE") from None
    return path


def _is_complete(path: Path) -> bool:
    """Whether a folder has all its files: a cleaner of temporary files may have removed some."""
    try:
        sizes = json.loads((path / _LIST).read_text("utf-8"))
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write_folder(path: Path, files: dict[str, str]) -> None:
    """Write a folder under another name, and rename it. Raises ``OSError``."""
    content = {name: text.encode() for name, text in files.items()}
    content[_LIST] = _as_json({name: len(data) for name, data in content.items()}).encode()
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=_PARTIAL))
    try:
        for name, data in content.items():
            with (partial / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)
        try:
            partial.rename(path)
        except OSError:
            if _is_complete(path):
                return  # another process was faster
            incomplete = path.rename(Path(tempfile.mkdtemp(dir=path.parent, prefix=_PARTIAL)))
            partial.rename(path)
            shutil.rmtree(incomplete, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Remove what processes that have ended left behind."""
    for path in parent.glob(f"{_PARTIAL}*"):
        if path.stat().st_mtime < time.time() - _LEFTOVER_S:
            shutil.rmtree(path, ignore_errors=True)


def _header_digest(model: GgufModel) -> str:
    """Return a hash of everything that the derived files depend on."""
    tensors = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in model.tensors.values())
    made_by = [_version_of(name) for name in ("tokenizers",)]
    digest = hashlib.sha256(json.dumps([made_by, model.metadata, tensors], sort_keys=True).encode())
    digest.update(model.rope_divisors)
    return digest.hexdigest()[:32]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _make_files(model: GgufModel) -> dict[str, str]:
    config = make_config(model)
    metadata, vocab_size = GgufMetadata(model), config["vocab_size"]
    files = make_tokenizer(metadata, vocab_size)
    ends = end_tokens(metadata, vocab_size)
    if ends:
        files["generation_config.json"] = _as_json({"eos_token_id": ends})
    return files | {"config.json": _as_json(config)}


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
