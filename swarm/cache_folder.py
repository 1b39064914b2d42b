"""Location of what this machine caches: tokenizers, proofs of kernels, packed matrices, folders of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of this name in ``$SWARM_CACHE``, or in ``swarm`` in the user's cache directory."""
    chosen = os.environ.get("SWARM_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm"
    return base / name
