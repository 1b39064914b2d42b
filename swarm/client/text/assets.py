"""Cache of models' tokenizer files on this machine. Files are named by their digests, so a changed file is a different
file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import xxhash

from swarm.cache_folder import cache_folder
from swarm.wire.messages import Asset

_DIGEST = re.compile(r"[0-9a-f]{32}")


def cache_directory() -> Path:
    """Return ``assets`` in ``$SWARM_CACHE``, or ``swarm/assets`` in the user's cache directory."""
    return cache_folder("assets")


def is_genuine(content: bytes, asset: Asset) -> bool:
    """Whether the bytes have the asset's size and digest."""
    return len(content) == asset.num_bytes and xxhash.xxh3_128_hexdigest(content) == asset.digest


def read_cached(asset: Asset, directory: Path) -> bytes | None:
    """Return the asset's bytes if they are cached and genuine."""
    if not _DIGEST.fullmatch(asset.digest):  # the digest becomes a file name
        return None
    try:
        content = (directory / asset.digest).read_bytes()
    except OSError:
        return None
    return content if is_genuine(content, asset) else None


def write_cached(asset: Asset, content: bytes, directory: Path) -> bool:
    """Cache the bytes. Returns False if they cannot be written, which is harmless: the next client downloads them
    again."""
    if not _DIGEST.fullmatch(asset.digest):
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # other processes may write the same file now
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(content)
        os.replace(file.name, directory / asset.digest)
    except OSError:
        return False
    return True
