"""A worker's end shows at once, however much memory it has.

The kernel gives back a killed process's memory before it closes its sockets, by which the broker knows: a tenth of a
second for each GiB. A *keeper* is a task that uses the same memory, does nothing, and ends after the process; then the
sockets come first. Linux on x86-64 and aarch64, where Swarm's C was built; elsewhere a death is noticed later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from swarm.log import get_logger
from swarm.stage import native

NAME = "swarm-keeper"  # as ps shows it
_WALL = 0x40000000  # __WALL: children that send no signal at their end, too

log = get_logger(__name__)


@contextmanager
def kept() -> Iterator[int | None]:
    """The keeper's process number; None where there can be none. It is gone afterwards, and soon after this process
    if that ends in between."""
    pid = _start()
    try:
        yield pid
    finally:
        if pid is not None:
            _end(pid)


def _start() -> int | None:
    library, why_not = native.built()
    if library is not None:
        pid = int(library.swarm_keeper_start())
        if pid > 0:
            return pid
        why_not = os.strerror(-pid)
    log.debug("no_keeper", reason=why_not, note="the more memory, the later a crash is noticed")
    return None


def _end(pid: int) -> None:
    """The number is still its own, dead or alive: a child that sends no signal at its end is not given away by a wait
    for any child, nor by ignoring SIGCHLD, but only by a wait with __WALL or __WCLONE, and this is the only one."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, _WALL)
