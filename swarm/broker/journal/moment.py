"""Tells how old something in the journal is, whatever happens to clocks.

Age is counted on the boot clock, which nobody sets. Over a reboot there is only the wall clock, and that may be wrong
when a machine starts: what is of an earlier boot is let go no sooner than ``SETTLED_S`` after the start, by when the
clock has been set if anybody sets it, and counts as no older than the clock says then.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path

SETTLED_S = 3600.0  # after its start a machine's clock is right, if anybody sets it: that takes a network, and minutes

_EPOCH = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, by both clocks. ``boot`` tells one run of the machine's monotonic clock from another. ``wall`` is read once
    per process and goes on with the monotonic clock: whoever sets the machine's clock makes nothing older. What
    that clock says by now, if it may have been set since, is ``set_wall``."""

    wall: float
    tick: float
    boot: str
    set_wall: float = math.inf

    @classmethod
    def now(cls) -> Moment:
        tick = time.monotonic()
        return cls(_EPOCH + tick, tick, boot_id(), time.time())

    @property
    def least_wall(self) -> float:
        """The earlier of the two wall clocks: what is in doubt is no older than by that."""
        return min(self.wall, self.set_wall)

    @property
    def knows_the_time(self) -> bool:
        """Whether the age of something from an earlier boot may be judged."""
        return not self.boot or self.tick >= SETTLED_S

    def age_s(self, wall: float, tick: float | None, boot: str) -> float:
        """Age of something that was at this moment; ``tick`` is of that boot's clock, None: not known."""
        if tick is None or not boot or boot != self.boot:
            return max(0.0, self.wall - wall)
        return max(0.0, self.tick - tick)


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # elsewhere than on Linux the wall clock must do


def old(now: Moment, keep_s: float) -> dict[str, object]:
    """Find the limits, by each clock, beyond which something is older than that."""
    return {
        "wall": now.wall,
        "wall_limit": now.least_wall - keep_s,
        "tick_limit": now.tick - keep_s,
        "boot": now.boot or None,
        "knows": now.knows_the_time,
    }
