"""Resources that the broker's process uses on its machine."""

from __future__ import annotations

import asyncio
import os
import resource

import psutil


def descriptor_limit() -> int:
    """Return the present limit: it can be changed from outside."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def process_figures(process: psutil.Process) -> dict[str, float]:
    return {
        "resident_bytes": process.memory_info().rss,
        "cpu_s": _cpu_s(process),
        "descriptors": num_descriptors(),
        "descriptor_limit": descriptor_limit(),
        "threads": process.num_threads(),
        "tasks": len(asyncio.all_tasks()),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def num_descriptors() -> int:
    """Return the number of open file descriptors. Newer kernels report it without listing them."""
    try:
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError:  # listing takes a descriptor itself, so none is left
        return descriptor_limit()
