"""Measures what happens beside what a plan predicted: each stage's computing time, and the time outside of stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.broker.planner.load import Shape, Speeds
from swarm.wire.messages import Hop, Row

# Predicting costs a few microseconds for each stage: with many stages, only some steps are looked at.
STAGES_PER_STEP = 16
# A worker's pace is known from so many steps on.
ENOUGH = 100
# Its recent pace is that of about so many last steps, and known from the second number on.
RECENT = 32
ENOUGH_RECENT = 16


@dataclass(slots=True)
class StageGauge:
    """``speeds`` None: the worker measured nothing, so nothing is predicted. ``weight``: its layers' work."""

    worker: str
    speeds: Speeds | None
    weight: float
    has_embedding: bool
    has_head: bool
    num_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_layers: int = 0
    recent_predicted_s: float = 0.0  # sums in which a step weighs the less the longer ago it was
    recent_measured_s: float = 0.0

    def took(self, predicted_s: float, measured_s: float) -> None:
        """Take the times of a step that came back."""
        self.num_steps += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.recent_predicted_s += predicted_s - self.recent_predicted_s / RECENT
        self.recent_measured_s += measured_s - self.recent_measured_s / RECENT

    def step_s(self, shape: Shape) -> float:
        """Predict what a step should take here; 0 if the worker measured nothing."""
        if self.speeds is None:
            return 0.0
        return self.speeds.step_s(shape, self.weight, has_head=self.has_head, has_embedding=self.has_embedding)

    @property
    def recent_pace(self) -> float | None:
        """The pace of the last steps alone."""
        known = self.num_steps >= ENOUGH_RECENT and self.recent_predicted_s > 0 and self.recent_measured_s > 0
        return self.recent_measured_s / self.recent_predicted_s if known else None

    @property
    def pace(self) -> float | None:
        """How many times longer its steps take than predicted; None if that isn't known yet."""
        known = self.num_steps >= ENOUGH and self.predicted_s > 0 and self.measured_s > 0
        return self.measured_s / self.predicted_s if known else None


@dataclass(slots=True)
class PlanGauge:
    """Measures the plan in force. Only steps of this plan may be told."""

    stages: dict[str, StageGauge] = field(default_factory=dict)
    num_steps: int = 0
    seconds: float = 0.0
    outside_s: float = 0.0
    _shapes: dict[int, Shape] = field(default_factory=dict)

    def begin(self, stages: Iterable[StageGauge]) -> None:
        """Begin with another plan: nothing of the one before counts."""
        self.stages = {stage.worker: stage for stage in stages}
        self.num_steps, self.seconds, self.outside_s = 0, 0.0, 0.0
        self._shapes.clear()

    def dispatched(self, step: int, rows: Iterable[Row]) -> None:
        """Note a step that goes out; if it never comes back, the next plan forgets it."""
        self._shapes[step] = Shape.of((row.start, row.count, row.sample) for row in rows)

    def in_hand_s(self, worker: str, more: Iterable[Shape] = ()) -> float:
        """Predict what the longest of the steps under way, and of ``more``, should take in a worker's stage; 0:
        unknown."""
        stage = self.stages.get(worker)
        if stage is None:
            return 0.0
        return max((stage.step_s(shape) for shape in (*self._shapes.values(), *more)), default=0.0)

    def finished(self, step: int, hops: Iterable[Hop], seconds: float) -> None:
        shape = self._shapes.pop(step, None)
        if shape is None or step % max(1, len(self.stages) // STAGES_PER_STEP):
            return
        held_s = 0.0
        for hop in hops:
            held_s += hop.whole_s
            stage = self.stages.get(hop.worker)
            if stage is not None and stage.speeds is not None:
                stage.took(stage.step_s(shape), hop.compute_s + (hop.sample_s if stage.has_head else 0.0))
        self.num_steps += 1
        self.seconds += seconds
        self.outside_s += max(0.0, seconds - held_s)
