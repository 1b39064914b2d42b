"""Differences between what a worker holds and what the broker counts, reported by the worker instead of a step.

Its keys and values need more memory than the plan counts (``DataPathError.kv_overfull``), or a step does not begin
where the worker's sequences end (``DataPathError.misplaced``). No request can cause either, so none is to blame,
however often it happens. The next epoch removes the difference if it was an accident: every stage reports anew what it
holds, and whether it can share prefixes. A worker that reports ``MAX_DIFFERENCES`` of them within ``WINDOW_S`` is put
out with the verdict ``failed``: it drops what it holds, and comes back after a pause that doubles.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.members.blame import delay_call
from swarm.broker.members.integrity import FaultRuling
from swarm.broker.state import State, Worker

MAX_DIFFERENCES = 3
WINDOW_S = 60.0


@dataclass(slots=True)
class DifferenceJudge:
    """Decision about a worker that reports a difference (see the module)."""

    state: State

    def judge(self, worker: Worker, reason: str) -> FaultRuling:
        """Count a difference, and decide whether the worker must go."""
        now = self.state.now
        self.state.count("differences")
        num_recent = worker.record_difference(now, WINDOW_S)
        if num_recent < MAX_DIFFERENCES:
            return FaultRuling(None, "", ())
        delay_call(worker, now)
        evidence = (
            f"what it holds differed from what the plan counts {num_recent} times within {WINDOW_S:.0f} s, "
            f"the last time: {reason}"
        )
        return FaultRuling(worker, evidence, ())
