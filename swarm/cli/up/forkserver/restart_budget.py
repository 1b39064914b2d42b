"""Limit of restarts of the fork server. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.cli.up.supervisor import HEALTHY_S

MAX_SHORT_RUNS = 3  # in a row: each costs a core some seconds of imports


@dataclass(slots=True)
class RestartBudget:
    """Restart budget: unlimited for a fork server that ran for ``HEALTHY_S``, else a few in a row."""

    began_at: float = 0.0
    num_short: int = 0  # restarts in a row after a short run

    def record_start(self, now: float) -> None:
        """Record the start of a fork server."""
        self.began_at = now

    def record_end(self, now: float) -> bool:
        """Record its end; return whether another one may be started."""
        self.num_short = 0 if now - self.began_at >= HEALTHY_S else self.num_short + 1
        return self.num_short <= MAX_SHORT_RUNS
