"""Cache of proofs: in memory for this process, and on disk for the next one.

A proof holds for one processor or device, one torch version and one environment, which are part of its key. The files
are in the user's cache directory. A file that cannot be read or written only costs another probe.
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

from swarm.cache_folder import cache_folder
from swarm.stage.matmul.probe import HEIGHTS, SIZES, Proof

_VERSION = 2  # version of the probe: increase it when its trials, or the way kernels are called, change
# Environment variables by which a user can change the kernels that libraries choose.
_PREFIXES = ("ONEDNN_", "DNNL_", "ATEN_", "MKL_", "OPENBLAS_", "OMP_", "KMP_")
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

ProofKey = tuple[object, ...]
_CPU = torch.device("cpu")
_cache: dict[ProofKey, Proof] = {}  # proofs of this process, by key


def folder() -> Path:
    """Return the proofs' folder: ``proofs`` in ``$SWARM_CACHE``, or in ``swarm`` in the user's cache directory."""
    return cache_folder("proofs")


def get_proof(key: ProofKey, make: Callable[[], Proof]) -> Proof:
    """Return the proof with this key from memory or disk; call ``make`` and store the result if there is none."""
    proof = _cache.get(key)
    if proof is None:
        text = json.dumps([machine(), settings(), key])
        path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        proof = _read(path, text)
        if proof is None:
            proof = make()
            _write(path, text, proof)
        _cache[key] = proof
    return proof


def clear() -> None:
    """Drop the proofs in memory; the next calls read them from disk again."""
    _cache.clear()
    machine.cache_clear()


@cache
def machine() -> tuple[object, ...]:
    """Return the properties of the processor by which libraries choose kernels, and torch's version."""
    return (_VERSION, torch.__version__, platform.machine(), _processor(), _cache_sizes(), os.cpu_count())


def machine_id(device: torch.device = _CPU) -> str:
    """Return a short hash of this machine's processor, the device if it is another one, and torch's version."""
    return hashlib.sha256(json.dumps([*machine(), *device_key(device)]).encode()).hexdigest()[:8]


def device_key(device: torch.device) -> tuple[object, ...]:
    """Return the properties of a device by which its kernels are chosen; nothing for a CPU, whose are the machine's."""
    if device.type != "cuda":
        return () if device.type == "cpu" else (device.type,)
    about = torch.cuda.get_device_properties(device)
    flags = torch.backends.cuda.matmul
    return (
        *("cuda", about.name, about.major, about.minor, about.multi_processor_count, torch.version.cuda),
        *(flags.allow_tf32, flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction),
    )


def settings() -> tuple[object, ...]:
    """Return this process's settings that change the choice of kernels: environment variables and torch's flags."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES))
    return (
        *variables,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
    )


def _processor() -> tuple[str, ...]:
    """Return the processor's name and its features."""
    try:
        first = _CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return (platform.processor(),)
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    lines = (line.partition(":") for line in first.splitlines())
    return tuple(f"{name.strip()}: {value.strip()}" for name, _, value in lines if name.strip() in wanted)


def _cache_sizes() -> tuple[str, ...]:
    """Return the sizes of the processor's caches, because libraries choose their block sizes by them."""
    try:
        return tuple((index / "size").read_text().strip() for index in sorted(_CACHES.glob("index*")))
    except OSError:
        return ()


def _read(path: Path, text: str) -> Proof | None:
    try:
        stored = json.loads(path.read_bytes())
        if stored["of"] != text:
            return None
        sizes, threads = (tuple(map(int, stored[key])) for key in ("sizes", "threads"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    usable = (
        set(sizes) <= {*SIZES, *HEIGHTS} and list(sizes) == sorted(sizes) and min(threads, default=0) >= bool(sizes)
    )
    return Proof(sizes, threads) if usable else None


def _write(path: Path, text: str, proof: Proof) -> None:
    content = json.dumps({"of": text, "sizes": proof.sizes, "threads": proof.threads})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process may write the same file now
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return
