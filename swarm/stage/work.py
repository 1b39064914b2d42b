"""The step whose turn it is, and what is told of it when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.stage.events import StepArrived
from swarm.stage.executor import Forwarded
from swarm.wire.messages import Hop, LayerRange


@dataclass(slots=True)
class Work:
    """``idle_s``: how long the stage had nothing to do before it came; ``num_waiting``: steps behind it."""

    arrived: StepArrived
    arrived_at: float
    started_at: float
    idle_s: float
    num_waiting: int = 0

    def hop(self, name: str, layers: LayerRange, forwarded: Forwarded, now: float) -> Hop:
        """This stage's share of the step."""
        return Hop(
            name,
            layers,
            max(0.0, self.started_at - self.arrived_at),
            forwarded.compute_s,
            forwarded.sample_s,
            self.idle_s,
            self.arrived.num_bytes,
            max(0.0, now - self.arrived_at),
        )

    def amounts(self, forwarded: Forwarded) -> Iterator[tuple[str, float]]:
        """What the stage's counters grow by."""
        step = self.arrived.step
        yield "steps", 1
        yield "rows", len(step.rows)
        yield "positions", len(step.tokens)
        yield "wire_bytes_in", self.arrived.num_bytes
        yield "compute_s", forwarded.compute_s
        yield "sample_s", forwarded.sample_s
        yield "idle_s", self.idle_s
