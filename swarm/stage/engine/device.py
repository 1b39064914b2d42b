"""Devices: which ones exist, the time on a device's own clock, and its memory.

A GPU computes asynchronously, so the host's clock would measure only how long the request took. On a GPU, moments are
therefore events in the device's own queue; on other devices, they are readings of the host's clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil
import torch

from swarm.errors import ModelError
from swarm.stage.engine.gpu_load import gpu_utilization


def resolve_device(name: str, bits: str = "auto") -> str:
    """Return the device that ``auto`` stands for: cuda if there is one, and the bits need not be portable; else cpu.
    Another name is returned as it is."""
    if name != "auto":
        return name
    return "cuda" if bits != "portable" and torch.cuda.is_available() else "cpu"


def parse_device(name: str) -> torch.device:
    """Return the device with this name; for cuda without a number, the first GPU. Raises ``ModelError`` if this machine
    has no such device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no kind of device {name!r}; use cpu, cuda or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was requested, but torch finds none here; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device mps was requested, but torch finds none here; use cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device {name!r} is not supported; use cpu, cuda or mps")
    if device.type != "cuda":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ModelError(f"device {name} was requested, but this machine has {_list_gpus(count)}")
    return torch.device("cuda", index)


def _list_gpus(count: int) -> str:
    return "cuda:0 only" if count == 1 else f"cuda:0 to cuda:{count - 1}"


def enter_device(device: torch.device) -> None:
    """Make a GPU the calling thread's device: CUDA has one per thread, and kernels are launched there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """Let this process allocate only this much of a GPU's memory: beyond it, it runs out of memory itself instead of
    taking the memory of other workers there."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work submitted until now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def print_devices(bits: str) -> None:
    """Print, as JSON, this machine's GPUs and the device that ``auto`` stands for."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        {
            "device": f"cuda:{index}",
            "name": torch.cuda.get_device_name(index),
            "free_bytes": torch.cuda.mem_get_info(index)[0],
        }
        for index in range(count)
    ]
    print(json.dumps({"auto": resolve_device("auto", bits), "gpus": gpus}))


class DeviceClock(Protocol):
    """Clock whose moments are points in the sequence of a device's work."""

    def mark(self) -> Any:
        """Return the moment at which the device will have finished all work submitted until now."""

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Return the seconds from one moment to another. Waits until the device has reached the second one."""


class HostClock:
    """Clock of devices whose work is done when the call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def elapsed_s(self, first: float, last: float) -> float:
        return last - first


class CudaClock:
    """Clock of a CUDA device: moments are events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000.0  # torch reports milliseconds


def make_clock(device: torch.device) -> DeviceClock:
    return CudaClock() if device.type == "cuda" else HostClock()


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated: of the device's own memory, or of the machine's where the device
    uses that."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def release_cached(device: torch.device) -> None:
    """Return memory that torch caches and does not use to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def memory_stats(device: torch.device) -> dict[str, float]:
    """Return bytes of the device's memory: used by this process, its peak where torch tracks it, and the total.

    For the CPU, these are the process's resident memory and the machine's memory.
    """
    if device.type == "cuda":
        return {
            **gpu_utilization(device),
            "device_memory_bytes": torch.cuda.memory_allocated(device),
            "device_memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "device_memory_peak_bytes": torch.cuda.max_memory_allocated(device),
            "device_memory_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
    if device.type == "mps":
        return {
            "device_memory_bytes": torch.mps.current_allocated_memory(),
            "device_memory_reserved_bytes": torch.mps.driver_allocated_memory(),
            "device_memory_total_bytes": torch.mps.recommended_max_memory(),
        }
    return {
        "device_memory_bytes": psutil.Process().memory_info().rss,
        "device_memory_total_bytes": psutil.virtual_memory().total,
    }
