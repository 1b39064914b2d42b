"""Devices of the workers that ``swarm up`` starts: what ``auto`` stands for, this machine's GPUs, and each worker's
part of the memory, which workers can't divide themselves: each sees all of it as free."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import Settings

PROBE_TIMEOUT_S: Final = 60.0  # for a process that imports torch and looks for GPUs
MEMORY_SHARE: Final = 0.8  # of the available memory; the rest is for the broker, the clients and the system
GPU_SHARE: Final = 0.9  # of a GPU's free memory; the rest is for the driver's part of each process


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine."""

    device: str  # as in ``worker.device``
    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """What a probe found. ``auto``: the device that ``worker.device = auto`` stands for."""

    auto: str
    gpus: tuple[Gpu, ...]


@functools.cache
def find_devices(bits: str) -> FoundDevices:
    """Find this machine's devices in another process: torch takes seconds, and its memory. Raises ConfigError."""
    code = f"from swarm.stage.engine.device import print_devices; print_devices({bits!r})"
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"the device can't be found out ({error}): set worker.device to cpu or cuda") from None
    return FoundDevices(found["auto"], tuple(Gpu(**gpu) for gpu in found["gpus"]))


def with_device(settings: Settings) -> Settings:
    """Return the settings with the device that ``auto`` stands for. Raises ConfigError if it can't be found out."""
    worker = settings.worker
    return _with_device(settings, find_devices(worker.bits).auto) if worker.device == "auto" else settings


def with_gpus(settings: Settings) -> tuple[Settings, tuple[Gpu, ...]]:
    """Return the settings for workers on GPUs, and this machine's GPUs. Raises ConfigError if there is none."""
    gpus = find_devices(settings.worker.bits).gpus
    if not gpus:
        raise ConfigError(
            "--gpu starts a worker on each GPU, and torch finds none on this machine; swarm doctor shows why, and "
            "without --gpu the workers compute on the CPU"
        )
    return _with_device(settings, "cuda"), gpus


def _with_device(settings: Settings, device: str) -> Settings:
    worker = settings.worker.model_copy(update={"device": device})
    return settings.model_copy(update={"worker": worker})


def worker_memory_share(settings: Settings, num_workers: int, num_swarms: int = 1) -> int | None:
    """Return the bytes for each worker: of its process, or of the GPU that all of them share. None if it need not share
    or the device is of another kind: then it takes what is free. ``num_swarms``: how many swarms divide each share."""
    device = settings.worker.device
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().available * MEMORY_SHARE / max(1, num_workers))
    if not device.startswith("cuda") or num_workers * num_swarms <= 1:
        return None
    gpus = find_devices(settings.worker.bits).gpus
    index = int(device.partition(":")[2] or 0)
    return int(gpus[index].free_bytes * GPU_SHARE / num_workers) if index < len(gpus) else None


def gpu_memory_share(gpus: Sequence[Gpu], num_swarms: int) -> int | None:
    """Return the bytes of each GPU that the workers there divide; None if there is one worker on each GPU, which takes
    what is free."""
    return int(min(gpu.free_bytes for gpu in gpus) * GPU_SHARE) if num_swarms > 1 else None
