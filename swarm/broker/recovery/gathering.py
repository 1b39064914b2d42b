"""Whether a plan is to be made yet, or more workers are waited for first."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.recovery.restart import Restart
from swarm.broker.state import State, WorkerState


@dataclass(slots=True)
class Gathering:
    """A swarm that starts with several workers makes its first plan with all of them; a broker that starts again, with
    those of its last plan."""

    state: State
    restart: Restart
    min_workers: int
    gather_s: float  # how long the first plan waits for ``min_workers`` once one has joined

    def goes_on(self, now: float) -> bool:
        """Is somebody waited for? ``state.book.waits_for`` says who."""
        awaited = self.restart.waits_for(now)
        if awaited is not None:
            self.state.book.waits_for = awaited
            return True
        joined, wanted = self._joined(), self.min_workers
        if self.state.book.epoch or len(joined) >= wanted or (joined and now - min(joined) > self.gather_s):
            return False
        self.state.book.waits_for = f"{wanted - len(joined)} more of {wanted} workers"
        return True

    @property
    def is_complete(self) -> bool:
        """All who were waited for are there: those of before a restart, or as many as were asked for, if several."""
        return self.restart.is_complete or (not self.state.book.epoch and 1 < self.min_workers <= len(self._joined()))

    def _joined(self) -> list[float]:
        return [w.joined_at for w in self.state.workers.values() if w.state is WorkerState.MEMBER]
