"""The order of steps, and the step whose turn it is.

Those of an epoch are numbered without a gap: an earlier number is a duplicate, a later one waits for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from swarm.stage.actions import SendDone, SendStep
from swarm.stage.events import StepArrived
from swarm.stage.executor import Forwarded
from swarm.wire.messages import Hop, LayerRange, SequencePosition, StepDone

MAX_EARLY = 64  # steps that may wait for an earlier one; more are never in flight
GAP_PATIENCE_S = 1.0

Timed = tuple[StepArrived, float]  # a step and when it arrived


@dataclass(slots=True)
class StepOrder:
    """Steps on their way to being computed: ``ready`` ones have all those before them."""

    next_step: int = 0
    early: dict[int, Timed] = field(default_factory=dict)
    ready: deque[Timed] = field(default_factory=deque)
    gap_since: float | None = None

    def begin(self, first_step: int) -> None:
        """A new epoch, whose steps are numbered from here on."""
        self.clear()
        self.next_step = first_step

    def clear(self) -> None:
        self.early.clear()
        self.ready.clear()
        self.gap_since = None

    def take(self, arrived: StepArrived, now: float) -> str | None:
        """Put a step in its place, or return why it is dropped, as the counter's name."""
        number = arrived.step.step
        if number < self.next_step or number in self.early:
            return "duplicate_steps"
        if len(self.early) >= MAX_EARLY and number != self.next_step:
            return "dropped_steps"
        self.early[number] = (arrived, now)
        while (found := self.early.pop(self.next_step, None)) is not None:
            self.ready.append(found)
            self.next_step += 1
            self.gap_since = None  # if steps are still missing, these are others
        if self.early and self.gap_since is None:
            self.gap_since = now
        return None

    def missing(self, now: float) -> str | None:
        """Say, once, which step did not come in time."""
        if self.gap_since is None or now - self.gap_since <= GAP_PATIENCE_S:
            return None
        self.gap_since = None
        return f"step {self.next_step} is missing, later ones are here: {sorted(self.early)}"


@dataclass(slots=True)
class Work:
    """``idle_s``: how long the stage had nothing to do before it came; ``num_waiting``: steps behind it."""

    arrived: StepArrived
    arrived_at: float
    started_at: float
    idle_s: float
    num_waiting: int = 0

    def hop(self, name: str, layers: LayerRange, forwarded: Forwarded, now: float) -> Hop:
        """Sum up this stage's share of the step."""
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

    def passed_on(self, hop: Hop, forwarded: Forwarded, *, is_last: bool) -> SendStep | SendDone:
        """Send the step to the next stage; the last one tells the broker that it is done."""
        step = self.arrived.step
        hops = (*step.hops, hop)
        if not is_last:
            return SendStep(msgspec.structs.replace(step, hops=hops, tensor=None), forwarded.hidden)
        done = StepDone(
            epoch=step.epoch,
            step=step.step,
            kv=tuple(SequencePosition(row.sequence, row.start + row.count) for row in step.rows),
            sampled=forwarded.sampled,
            failed=forwarded.failed,
            late=forwarded.late,
            hops=hops,
            cause=step.cause,
            lineage=step.lineage,
        )
        return SendDone(done)

    def amounts(self, forwarded: Forwarded) -> Iterator[tuple[str, float]]:
        """Name the stage's counters and what each grows by."""
        step = self.arrived.step
        yield "steps", 1
        yield "rows", len(step.rows)
        yield "positions", len(step.tokens)
        yield "wire_bytes_in", self.arrived.num_bytes
        yield "compute_s", forwarded.compute_s
        yield "sample_s", forwarded.sample_s
        yield "idle_s", self.idle_s
