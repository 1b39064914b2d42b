"""How often a nursery that has ended is made anew. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.cli.up.supervisor import HEALTHY_S

MOST_SHORT_LIVES = 3  # in a row: each costs a core some seconds of imports


@dataclass(slots=True)
class Renewals:
    """One that lived for ``HEALTHY_S`` is made anew whenever it ends, a few others too, and then no more."""

    began_at: float = 0.0
    num_short: int = 0

    def begun(self, now: float) -> None:
        """Note that one was started."""
        self.began_at = now

    def allow(self, now: float) -> bool:
        """It has ended now: whether another one is of use."""
        self.num_short = 0 if now - self.began_at >= HEALTHY_S else self.num_short + 1
        return self.num_short <= MOST_SHORT_LIVES
