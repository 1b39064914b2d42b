"""OpenMP settings of a worker's threads. This module must not import torch, because the settings must precede that
import."""

from __future__ import annotations

import os

# Several workers share one machine's cores, and OpenMP's threads spin by default while they wait for one another: with
# more threads than cores, each one uses up its time slice spinning. Measured on two busy cores: 0.9 ms passive, 56 ms
# not.
PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}


def use_passive_waiting() -> None:
    """Make OpenMP's threads sleep while they wait, unless the environment sets something else."""
    for name, value in PASSIVE_WAITING.items():
        os.environ.setdefault(name, value)


def configure_openmp(threads: int = 0) -> None:
    """Set the variables that OpenMP and oneDNN read once, when torch is loaded. ``threads``: 0 leaves their number
    open."""
    use_passive_waiting()
    # oneDNN caches the kernels that it compiles, one per size, a quarter of a MiB or more each. Its default bound of
    # 1,024 would far exceed a worker's memory budget. Few sizes occur, since its kernels are called in tiles.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
