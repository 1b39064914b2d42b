"""Proofs that were made already: in this process, and on disk for the next one.

What a probe shows holds for one processor, one torch and one environment; these are part of a proof's name. The files
lie in the user's cache folder. One that can't be read or written costs another probe, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from swarm.stage.products.probe import SIZES, Proof

_VERSION = 2  # of the probe: raise it when what it tries, or how kernels are called, changes
# What the user can say to the libraries about which kernels they take.
_PREFIXES = ("ONEDNN_", "DNNL_", "ATEN_", "MKL_", "OPENBLAS_", "OMP_", "KMP_")
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

Name = tuple[object, ...]
_known: dict[Name, Proof] = {}


def folder() -> Path:
    """``$SWARM_CACHE``, or ``swarm`` in the user's cache directory; in there, ``proofs``."""
    chosen = os.environ.get("SWARM_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm"
    return base / "proofs"


def recall(name: Name, make: Callable[[], Proof]) -> Proof:
    """The proof of this name; made if it is not there yet."""
    proof = _known.get(name)
    if proof is None:
        text = json.dumps([machine(), settings(), name])
        path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        proof = _read(path, text)
        if proof is None:
            proof = make()
            _write(path, text, proof)
        _known[name] = proof
    return proof


def forget() -> None:
    """Begin again with what is on disk."""
    _known.clear()
    machine.cache_clear()


@cache
def machine() -> tuple[object, ...]:
    """The processor as far as kernels are chosen by it, and torch."""
    return (_VERSION, torch.__version__, platform.machine(), _processor(), _cache_sizes(), os.cpu_count())


def make() -> str:
    """A short name for all that."""
    return hashlib.sha256(json.dumps(machine()).encode()).hexdigest()[:8]


def settings() -> tuple[object, ...]:
    """List what this process was told about kernels."""
    told = sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES))
    return (
        *told,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
    )


def _processor() -> tuple[str, ...]:
    """Name the processor and what it says that it can do."""
    try:
        first = _CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return (platform.processor(),)
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    lines = (line.partition(":") for line in first.splitlines())
    return tuple(f"{name.strip()}: {value.strip()}" for name, _, value in lines if name.strip() in wanted)


def _cache_sizes() -> tuple[str, ...]:
    """Libraries cut matrices by them."""
    try:
        return tuple((index / "size").read_text().strip() for index in sorted(_CACHES.glob("index*")))
    except OSError:
        return ()


def _read(path: Path, text: str) -> Proof | None:
    try:
        found = json.loads(path.read_bytes())
        if found["of"] != text:
            return None
        sizes, threads = (tuple(map(int, found[key])) for key in ("sizes", "threads"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    usable = set(sizes) <= set(SIZES) and list(sizes) == sorted(sizes) and min(threads, default=0) >= bool(sizes)
    return Proof(sizes, threads) if usable else None


def _write(path: Path, text: str, proof: Proof) -> None:
    content = json.dumps({"of": text, "sizes": proof.sizes, "threads": proof.threads})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # others may write it now
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return
