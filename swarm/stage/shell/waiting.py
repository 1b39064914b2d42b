"""How a worker's threads wait for work. No torch in here: it must be applied before torch is imported."""

from __future__ import annotations

import os

# Several workers share one machine's cores, and OpenMP's threads spin by default while they wait for one another: with
# more threads than cores, each waits out its share of the clock. Measured on two busy cores: 0.9 ms passive, 56 ms not.
PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}


def wait_passively() -> None:
    """Make OpenMP's threads sleep while they wait, unless the environment says otherwise."""
    for name, value in PASSIVE_WAITING.items():
        os.environ.setdefault(name, value)


def prepare_openmp(threads: int = 0) -> None:
    """Say what OpenMP and oneDNN read once, when torch is loaded. ``threads``: 0 leaves that to be said later."""
    wait_passively()
    # oneDNN keeps the kernels that it compiles, one for each size that came, a quarter of a MiB or more each. Its own
    # bound of 1,024 is far beyond what a worker says that it takes; sizes here are few, since its kernels are called in
    # tiles.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
