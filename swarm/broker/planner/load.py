"""Time of a step, computed from workers' measurements at join: for the load that is planned for, or for a real step.
And gauges that measure the actual times (``PlanGauge``): each stage's computing time, and the time outside of stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec import structs

from swarm.wire.messages import Hop, LayerCost, ProposedTail, Row

# Bounds of a plausible measurement: clocks do not resolve less, and no caller waits longer for a layer. Values outside
# (zero, infinity) would make sums and quotients meaningless.
MIN_S = 1e-9
MAX_S = 1e6
CHUNK = 256  # positions of a prompt in one step, approximately as the scheduler cuts them

_Points = tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Load that a plan is made for: ``rows`` sequences that decode together, each with ``context`` positions, and
    ``prompt`` positions of prompts for every token that is generated."""

    rows: int = 8
    context: int = 512
    prompt: float = 1.0

    @property
    def positions(self) -> float:
        """Prompt positions that arrive in the time of one decoding step."""
        return self.rows * self.prompt


@dataclass(frozen=True, slots=True)
class StepShape:
    """Size of one real step: the number of decoding sequences and their positions in total; the number of prompt
    positions, and the sum of the positions before each of them; the number of rows that went through the head."""

    decodes: int
    decode_context: int
    positions: int
    position_context: int
    heads: int

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, bool]]) -> StepShape:
        """Add up a step's rows, each a (start, count, sample)."""
        decodes = context = positions = before = heads = 0
        for start, count, sample in rows:
            heads += sample
            if count == 1:
                decodes, context = decodes + 1, context + start
            else:
                positions, before = positions + count, before + count * start + count * count // 2
        return cls(decodes, context, positions, before, heads)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured times of one worker, as functions of a step's size: interpolated between measured sizes, and
    extrapolated beyond the largest."""

    decode: _Points
    decode_slope: float  # seconds for each position before, of each sequence
    prefill: _Points
    prefill_slope: float
    stage: _Points
    head: _Points
    embed: _Points

    @classmethod
    def from_costs(cls, costs: Sequence[LayerCost], *, alone: bool) -> Speeds | None:
        """Build a worker's times from its measurements; None if there are none.

        ``alone``: use measurements with all cores of the host, where available. All times are finite, and a layer's
        times are positive, whatever was measured.
        """
        return _speeds(tuple(costs), alone)

    def layer_s(self, load: PlannedLoad) -> float:
        """Return one layer's time in a step of the load: its decodes, and its share of a chunk of prompt."""
        decode = _interpolate(self.decode, load.rows) + self.decode_slope * load.rows * load.context
        chunk = _interpolate(self.prefill, CHUNK) + self.prefill_slope * CHUNK * load.context / 2
        return decode + load.positions * chunk / CHUNK

    def replay_s(self, context: int = 0) -> float:
        """Return one layer's time for one position of a replayed chunk, with ``context`` positions before it."""
        return _interpolate(self.prefill, CHUNK) / CHUNK + self.prefill_slope * context

    def stage_s(self, load: PlannedLoad) -> float:
        return _interpolate(self.stage, load.rows) + load.positions / CHUNK * _interpolate(self.stage, CHUNK)

    def head_s(self, load: PlannedLoad) -> float:
        return _interpolate(self.head, load.rows)

    def embed_s(self, load: PlannedLoad) -> float:
        return _interpolate(self.embed, load.rows) + load.positions / CHUNK * _interpolate(self.embed, CHUNK)

    def step_s(self, shape: StepShape, layer_weight: float, *, has_head: bool, has_embedding: bool) -> float:
        """Return the time of a real step in a stage whose layers have this total weight. Where decodes and prompts are
        mixed, the weights are read once for both."""
        layer = 0.0
        if shape.positions:
            layer = _interpolate(self.prefill, shape.positions) + self.prefill_slope * shape.position_context
        if shape.decodes:
            decode = _interpolate(self.decode, shape.decodes) + self.decode_slope * shape.decode_context
            layer += max(0.0, decode - _interpolate(self.decode, 1)) if shape.positions else decode
        num = shape.decodes + shape.positions
        total = _interpolate(self.stage, num) + layer_weight * layer
        total += _interpolate(self.head, shape.heads) if has_head and shape.heads else 0.0
        return total + (_interpolate(self.embed, num) if has_embedding else 0.0)


@lru_cache(maxsize=1024)  # a plan asks for every worker's speeds repeatedly
def _speeds(costs: tuple[LayerCost, ...], alone: bool) -> Speeds | None:
    chosen = [_clamp(cost) for cost in costs if cost.alone is alone] or [_clamp(cost) for cost in costs]
    kinds = {cost.kind for cost in chosen}
    if not kinds & {"decode", "prefill"}:
        return None
    decode, prefill = _select_kind(chosen, "decode"), _select_kind(chosen, "prefill")
    if not decode or not prefill:
        decode = prefill = decode or prefill
    # A worker that is so slow that it measured decodes of one sequence only: prompts show its speed, since the same
    # number of rows is the same work.
    is_one_size = len({cost.rows for cost in decode}) == 1
    return Speeds(
        decode=_min_context_times([*decode, *prefill] if is_one_size else decode),
        decode_slope=_context_slope(decode),
        prefill=_min_context_times(prefill),
        prefill_slope=_context_slope(prefill),
        stage=_min_context_times(_select_kind(chosen, "stage")),
        head=_min_context_times(_select_kind(chosen, "head")),
        embed=_min_context_times(_select_kind(chosen, "embed")),
    )


def _clamp(cost: LayerCost) -> LayerCost:
    if MIN_S <= cost.seconds <= MAX_S:
        return cost
    return structs.replace(cost, seconds=MIN_S if cost.seconds < MIN_S else MAX_S)


def _select_kind(costs: Iterable[LayerCost], kind: str) -> list[LayerCost]:
    return [cost for cost in costs if cost.kind == kind]


def _min_context_times(costs: Sequence[LayerCost]) -> _Points:
    """Return for each number of rows the time with the least context; never less for more rows, which is noise."""
    least = min((cost.context for cost in costs), default=0)
    best_times: dict[int, float] = {}
    for cost in costs:
        if cost.context <= max(least, 64):
            best_times[cost.rows] = min(cost.seconds, best_times.get(cost.rows, cost.seconds))
    rows = sorted(best_times)
    return tuple((n, min(best_times[m] for m in rows if m >= n)) for n in rows)


def _context_slope(costs: Sequence[LayerCost]) -> float:
    """Return the cost of one more preceding position per row: the mean over pairs of measurements that differ only in
    context."""
    slopes = []
    for cost in costs:
        for other in costs:
            if other.rows == cost.rows and other.context > cost.context:
                slopes.append((other.seconds - cost.seconds) / (cost.rows * (other.context - cost.context)))
    return max(0.0, sum(slopes) / len(slopes)) if slopes else 0.0


def _interpolate(points: _Points, rows: float) -> float:
    if not points:
        return 0.0
    sizes = [size for size, _ in points]
    place = min(max(1, bisect_left(sizes, rows)), len(points) - 1)
    if len(points) == 1:
        return points[0][1] * max(1.0, rows / points[0][0])  # proportional beyond a single measured size
    (low, low_s), (high, high_s) = points[place - 1], points[place]
    if rows <= sizes[0]:
        return points[0][1]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


# --- measured times against predicted ones ---------------------------------------------------------------------------

# A prediction costs a few microseconds for each stage: with many stages, only some steps are measured.
STAGES_PER_STEP = 16
# Number of steps from which on a worker's pace is reliable.
MIN_STEPS = 100
# Number of latest steps that the recent pace covers, roughly, and the number from which on it is reliable.
RECENT_STEPS = 32
MIN_RECENT_STEPS = 16
# Number of latest chunks of prompts or replays that their ratio covers, roughly, and from which on it is reliable.
RECENT_CHUNKS = 16
MIN_CHUNKS = 2


@dataclass(slots=True)
class ChunkRatio:
    """Ratio of the measured time of a worker's latest chunks of prompts and replays to the time by its benchmark."""

    num: int = 0
    predicted_s: float = 0.0  # exponentially decaying sums
    measured_s: float = 0.0

    def record(self, predicted_s: float, measured_s: float) -> None:
        """Add the times of a finished chunk."""
        if predicted_s > 0 and measured_s > 0:
            self.num += 1
            self.predicted_s += predicted_s - self.predicted_s / RECENT_CHUNKS
            self.measured_s += measured_s - self.measured_s / RECENT_CHUNKS

    @property
    def value(self) -> float | None:
        """The ratio; None if there are too few chunks."""
        return self.measured_s / self.predicted_s if self.num >= MIN_CHUNKS else None


@dataclass(slots=True)
class StageGauge:
    """Predicted and measured times of one stage. ``speeds`` None: the worker measured nothing, so nothing is predicted.
    ``weight``: total weight of its layers. ``chunks``: the worker's ratio, to which prompts are added."""

    worker: str
    speeds: Speeds | None
    weight: float
    has_embedding: bool
    has_head: bool
    num_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_layers: int = 0
    recent_predicted_s: float = 0.0  # exponentially decaying sums over the latest steps
    recent_measured_s: float = 0.0
    chunks: ChunkRatio = field(default_factory=ChunkRatio)

    def record(self, shape: StepShape, measured_s: float) -> None:
        """Add the measured time of a finished step."""
        predicted_s = self.step_s(shape)
        if shape.positions and not shape.decodes:
            self.chunks.record(predicted_s, measured_s)
        self.num_steps += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.recent_predicted_s += predicted_s - self.recent_predicted_s / RECENT_STEPS
        self.recent_measured_s += measured_s - self.recent_measured_s / RECENT_STEPS

    def step_s(self, shape: StepShape) -> float:
        """Predict the time of a step in this stage; 0 if the worker measured nothing."""
        if self.speeds is None:
            return 0.0
        return self.speeds.step_s(shape, self.weight, has_head=self.has_head, has_embedding=self.has_embedding)

    @property
    def recent_pace(self) -> float | None:
        """Pace over the latest steps alone; None if there are too few."""
        is_known = self.num_steps >= MIN_RECENT_STEPS and self.recent_predicted_s > 0 and self.recent_measured_s > 0
        return self.recent_measured_s / self.recent_predicted_s if is_known else None

    @property
    def pace(self) -> float | None:
        """Ratio of the measured to the predicted time of its steps; None if there are too few."""
        is_known = self.num_steps >= MIN_STEPS and self.predicted_s > 0 and self.measured_s > 0
        return self.measured_s / self.predicted_s if is_known else None


@dataclass(slots=True)
class PlanGauge:
    """Measurements of the active plan. Only steps of this plan may be recorded."""

    stages: dict[str, StageGauge] = field(default_factory=dict)
    num_steps: int = 0
    seconds: float = 0.0  # total time of finished steps
    outside_s: float = 0.0  # the part of it outside of stages: links, queues, the broker
    _shapes: dict[int, StepShape] = field(default_factory=dict)  # by step: the steps in flight

    def reset(self, stages: Iterable[StageGauge]) -> None:
        """Start measuring another plan; the measurements of the one before are dropped."""
        self.stages = {stage.worker: stage for stage in stages}
        self.num_steps, self.seconds, self.outside_s = 0, 0.0, 0.0
        self._shapes.clear()

    def on_dispatched(self, step: int, rows: Iterable[Row], tails: Iterable[ProposedTail] = ()) -> None:
        """Record a dispatched step. If its result never arrives, the next plan drops the record. A row with proposed
        tokens costs as much as that many more decodes."""
        proposed = {tail.sequence for tail in tails}
        self._shapes[step] = StepShape.from_rows(
            part
            for row in rows
            for part in (
                ((row.start + n, 1, row.sample) for n in range(row.count))
                if row.sequence in proposed
                else ((row.start, row.count, row.sample),)
            )
        )

    def longest_in_flight_s(self, worker: str, more: Iterable[StepShape] = ()) -> float:
        """Predict the longest time in a worker's stage among the steps in flight and ``more``; 0: unknown."""
        stage = self.stages.get(worker)
        if stage is None:
            return 0.0
        return max((stage.step_s(shape) for shape in (*self._shapes.values(), *more)), default=0.0)

    def on_finished(self, step: int, hops: Iterable[Hop], seconds: float) -> None:
        shape = self._shapes.pop(step, None)
        if shape is None or step % max(1, len(self.stages) // STAGES_PER_STEP):
            return
        held_s = 0.0
        for hop in hops:
            held_s += hop.whole_s
            stage = self.stages.get(hop.worker)
            if stage is not None and stage.speeds is not None:
                stage.record(shape, hop.compute_s + (hop.sample_s if stage.has_head else 0.0))
        self.num_steps += 1
        self.seconds += seconds
        self.outside_s += max(0.0, seconds - held_s)
