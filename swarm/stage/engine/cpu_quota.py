"""Processor limit of a container: the number of cores' worth of time that this process may use.

Such a limit lets a process run at full speed for a moment and then stops it, so a short measurement does not show it.
It can be read from the control groups, though.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def read_cpu_limit(listing: Path = CGROUPS, mount: Path = MOUNT) -> float | None:
    """Return the smallest limit of this process's control groups (version 1 or 2) and of their parents, in cores.

    None if there is no limit, or if this system has no control groups.
    """
    try:
        lines = listing.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    return min(
        (limit for line in lines for folder in _folders(line, mount) if (limit := _read_limit(folder))), default=None
    )


def _folders(line: str, mount: Path) -> Iterator[Path]:
    """Yield the folders with the limits of a line such as ``0::/a/b`` or ``4:cpu,cpuacct:/a/b``: from the group up to
    the root."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    names = controllers.split(",")
    if controllers and "cpu" not in names:
        return
    roots = [mount] if not controllers else [mount / controllers, mount / "cpu"]
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for root in roots:
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def _read_limit(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text("ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text("ascii"))
        period_us = int((folder / "cpu.cfs_period_us").read_text("ascii"))
        return quota_us / period_us if quota_us > 0 else None
    return None
