"""Makes a worker's crash visible within milliseconds, however much memory it has.

When a process is killed, the kernel frees its memory before it closes its sockets, by which the broker notices the end:
a tenth of a second per GiB. A *keeper* is a task that shares the process's memory, does nothing, and ends after the
process; then the sockets are closed first. Linux on x86-64 and aarch64, where Swarm's C is built; elsewhere a crash is
noticed later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from swarm.log import get_logger
from swarm.stage import native

NAME = "swarm-keeper"  # the name that ps shows
_WAIT_ALL = 0x40000000  # __WALL: wait also for children that send no signal at their end

log = get_logger(__name__)


@contextmanager
def keep_memory() -> Iterator[int | None]:
    """Run a keeper task; yields its process number, or None where there can be none.

    The keeper ends with the context, and soon after this process if the process ends first.
    """
    pid = _start()
    try:
        yield pid
    finally:
        if pid is not None:
            _end(pid)


def _start() -> int | None:
    library, why_not = native.open_library()
    if library is not None:
        pid = int(library.swarm_keeper_start())
        if pid > 0:
            return pid
        why_not = os.strerror(-pid)
    log.debug("no_keeper", reason=why_not, note="with more memory, a crash is noticed later")
    return None


def _end(pid: int) -> None:
    """Kill the keeper and reap it.

    The number can't have been reused: a child that sends no signal at its end is reaped only by a wait with __WALL or
    __WCLONE, not by a wait for any child nor by ignoring SIGCHLD, and this is the only such wait.
    """
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, _WAIT_ALL)
