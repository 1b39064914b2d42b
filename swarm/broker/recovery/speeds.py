"""Comparison of the predicted and the measured speed of a plan's stages."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.broker.planner.load import Speeds, StageGauge
from swarm.broker.planner.problem import ModelSizes
from swarm.broker.state import Plan, State, Worker

# Relative change of a worker's measured pace from which on it is adopted: a new plan for every fluctuation of a machine
# would move layers for nothing.
PACE_DIFFERS = 0.15
MIN_PACE, MAX_PACE = 0.2, 20.0  # bounds of an adopted pace


class SpeedTracker:
    """Compares workers' measured step times with the predicted ones."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._updated_at = 0.0

    def update(self, now: float, cooldown_s: float) -> list[Worker]:
        """Adopt measured paces that differ much from the present ones. Returns the corrected workers."""
        if now - self._updated_at < cooldown_s:
            return []
        self._updated_at = now
        corrected = []
        current = self._state.plans.current
        for stage in current.stages if current is not None else ():
            worker, gauge = self._state.workers[stage.incarnation], self._state.plans.gauge.stages.get(stage.name)
            pace = None if gauge is None else gauge.pace
            if pace is not None and not 1 - PACE_DIFFERS < pace / worker.pace < 1 + PACE_DIFFERS:
                worker.pace = min(MAX_PACE, max(MIN_PACE, pace))
                corrected.append(worker)
        return corrected


def make_gauges(state: State, mode: str, plan: Plan) -> Iterable[StageGauge]:
    """Return the gauges that measure the stages of a plan that starts to serve."""
    manifest = state.manifest
    assert manifest is not None
    alone = mode == "batch" or (mode == "auto" and plan.shares_cores) or len(plan.stages) == 1
    weights = ModelSizes.from_manifest(manifest).layer_weights
    for stage in plan.stages:
        layers = stage.layers
        yield StageGauge(
            worker=stage.name,
            speeds=Speeds.from_costs(state.workers[stage.incarnation].hello.costs, alone=alone),
            weight=sum(weights[layers.first : layers.stop]),
            has_embedding=layers.first == 0,
            has_head=layers.stop == manifest.num_layers,
            num_layers=len(layers),
            chunks=state.workers[stage.incarnation].chunk_ratio,
        )
