"""Age of records in the journal, robust against reboots and clock changes.

Age is measured with the monotonic clock of the boot, which cannot be set. Across a reboot there is only the wall clock,
which may be wrong when a machine starts. Records of an earlier boot are therefore deleted only ``SETTLED_S`` after the
start, when the clock has been set if it is set at all. Such a record counts as no older than the clock then indicates.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path

# seconds after the start by which the wall clock has been corrected; that takes a network, and minutes
SETTLED_S = 3600.0

_EPOCH = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class Timestamp:
    """The current time by both clocks.

    ``boot`` identifies the run of the machine to which the monotonic clock belongs. ``wall`` is read once per process
    and then advances with the monotonic clock, so that setting the machine's clock makes no record older.
    """

    wall: float
    tick: float  # monotonic clock
    boot: str
    machine_wall: float = math.inf  # the machine's clock now, which may have been set since ``wall`` was read

    @classmethod
    def now(cls) -> Timestamp:
        tick = time.monotonic()
        return cls(_EPOCH + tick, tick, boot_id(), time.time())

    @property
    def earliest_wall(self) -> float:
        """The earlier of the two wall clocks; in doubt, records are assumed to be younger."""
        return min(self.wall, self.machine_wall)

    @property
    def is_wall_clock_trusted(self) -> bool:
        """Whether the wall clock can be trusted for records of an earlier boot."""
        return not self.boot or self.tick >= SETTLED_S

    def age_s(self, wall: float, tick: float | None, boot: str) -> float:
        """Return the age of a record. ``tick`` is the monotonic clock of its boot; None: unknown."""
        if tick is None or not boot or boot != self.boot:
            return max(0.0, self.wall - wall)
        return max(0.0, self.tick - tick)


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not on Linux: only the wall clock is available


def age_limits(now: Timestamp, keep_s: float) -> dict[str, object]:
    """Return the limits on each clock beyond which a record is older than ``keep_s``, as SQL parameters."""
    return {
        "wall": now.wall,
        "wall_limit": now.earliest_wall - keep_s,
        "tick_limit": now.tick - keep_s,
        "boot": now.boot or None,
        "knows": now.is_wall_clock_trusted,
    }
