"""Differences of a worker's sequences or memory from the plan, reported by the worker instead of a step.

Its keys and values need more memory than the plan counts (``DataPathError.kv_overfull``), or a step does not begin
where the worker's sequences end (``DataPathError.misplaced``). No request can cause either, so none is to blame,
however often it happens. The next epoch removes the difference if it was an accident: every stage reports anew what it
holds, and whether it can share prefixes. A worker that reports ``MAX_DIFFERENCES`` of them within ``WINDOW_S`` is put
out with the verdict ``differs``: it drops what it holds, and comes back immediately the first time, later after a pause
that doubles. A difference does not show that anything was computed wrongly: what the worker computes from then on
counts like any other worker's.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.members.integrity import FaultRuling, call_pause_s
from swarm.broker.state import State, Worker
from swarm.broker.state.evidence import KEEP_S

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
        num_before = worker.num_removals if now - worker.call_after <= KEEP_S else 0
        worker.num_removals, worker.call_after = num_before + 1, now + call_pause_s(num_before)
        evidence = (
            f"its sequences or memory differed from the plan {num_recent} times within {WINDOW_S:.0f} s, "
            f"the last time: {reason}"
        )
        return FaultRuling(worker, evidence, ())
