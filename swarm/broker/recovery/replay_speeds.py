"""Measurement of replays: how long chunks take, compared with the benchmarks of the workers that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.broker.planner.load import StageGauge, StepShape
from swarm.broker.planner.problem import ModelSizes
from swarm.broker.planner.takeover import CHUNK_S, FIRST_CHUNK_S
from swarm.broker.state import Plan, Rebuild, State
from swarm.wire.messages import LayerRange

MIN_COMPUTED = 0.1  # least fraction of a chunk's time that counts as computing


@dataclass(frozen=True, slots=True)
class _OrderedChunk:
    """Chunk that a stage computes now. ``next_step``: number of the next step when the chunk was ordered."""

    ordered_at: float
    next_step: int
    was_alone: bool  # no step was in flight


@dataclass(slots=True)
class ReplaySpeeds:
    """Feeds ``Worker.chunk_ratio`` with the time of every chunk beside which no step ran."""

    state: State
    _ordered: dict[int, _OrderedChunk] = field(default_factory=dict)  # by ``Rebuild.group``
    _done_at: float | None = None  # time at which the last chunk was done; None: no chunk of this plan was done

    def reset(self) -> None:
        """Forget the chunks of an earlier plan."""
        self._ordered.clear()
        self._done_at = None

    def on_ordered(self, group: int, now: float) -> None:
        """Note the time of an order."""
        self._ordered[group] = _OrderedChunk(now, self.state.next_step, not self.state.in_flight)

    def on_done(self, runs: Sequence[Rebuild], now: float) -> None:
        """Record the time of a chunk, for the workers of its layers. ``runs``: those of one group, each computed from
        ``done`` up to ``ordered``.

        Where several chunks are in flight, one waits for another in the stage that both go through: the time from the
        end of the one before counts.
        """
        if not runs:
            return
        chunk, done_at, self._done_at = self._ordered.pop(runs[0].group, None), self._done_at, now
        plan = self.state.plans.current
        if chunk is None or plan is None or not chunk.was_alone or chunk.next_step != self.state.next_step:
            return
        began_at, besides_s = (chunk.ordered_at, CHUNK_S + FIRST_CHUNK_S) if done_at is None else (done_at, CHUNK_S)
        taken_s = now - max(chunk.ordered_at, began_at)
        computed_s = max(taken_s - besides_s, MIN_COMPUTED * taken_s)
        shape = StepShape.from_rows((run.done, run.ordered - run.done, False) for run in runs)
        by_benchmark = self._benchmark(plan, runs[0].through, shape)
        total_s = sum(seconds * (gauge.chunks.value or 1.0) for gauge, seconds in by_benchmark)
        for gauge, seconds in by_benchmark if total_s > 0 else ():
            part = seconds * (gauge.chunks.value or 1.0) / total_s
            gauge.chunks.record(seconds, part * computed_s)

    def _benchmark(self, plan: Plan, through: LayerRange, shape: StepShape) -> list[tuple[StageGauge, float]]:
        """Return the stages with these layers, and the time of a chunk in each by its worker's benchmark. Empty if a
        worker has measured nothing."""
        assert self.state.manifest is not None
        weights = ModelSizes.from_manifest(self.state.manifest).layer_weights
        times: list[tuple[StageGauge, float]] = []
        for stage in plan.stages:
            first, stop = max(stage.layers.first, through.first), min(stage.layers.stop, through.stop)
            gauge = self.state.plans.gauge.stages.get(stage.name)
            if first >= stop:
                continue
            if gauge is None or gauge.speeds is None:
                return []
            weight = sum(weights[first:stop])
            times.append((gauge, gauge.speeds.step_s(shape, weight, has_head=False, has_embedding=first == 0)))
        return times
