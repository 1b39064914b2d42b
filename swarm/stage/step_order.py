"""Order of an epoch's steps, and the step that is being computed.

The steps of an epoch are numbered without gaps. A step with a smaller number than expected is a duplicate; a step with
a larger number waits until the steps before it have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from swarm.stage.actions import Action, Compute, SendDone, SendStep, WriteStageLog
from swarm.stage.events import StepArrived
from swarm.stage.executor import ForwardResult
from swarm.stage.proposals import certain_rows, proposal_error, proposed_counts
from swarm.stage.sequences import SequenceStore, row_error
from swarm.stage.statistics import StageStatistics
from swarm.wire.messages import Hop, LayerRange, SequencePosition, Step, StepDone

MAX_EARLY = 64  # steps that may wait for a missing one; more are never in flight
GAP_PATIENCE_S = 1.0  # how long a missing step is waited for before it is reported

TimedStep = tuple[StepArrived, float]  # a step and the time of its arrival


@dataclass(slots=True)
class StepOrder:
    """Steps that wait to be computed, put into the order of their numbers."""

    next_step: int = 0  # number of the next step to become ready
    early: dict[int, TimedStep] = field(default_factory=dict)  # steps that wait for a missing one, by number
    ready: deque[TimedStep] = field(default_factory=deque)  # steps with no step missing before them
    gap_since: float | None = None  # since when a step has been missing; None: none is, or it has been reported

    def start_epoch(self, first_step: int) -> None:
        """Start an epoch, whose steps are numbered from ``first_step`` on."""
        self.clear()
        self.next_step = first_step

    def clear(self) -> None:
        self.early.clear()
        self.ready.clear()
        self.gap_since = None

    def add(self, arrived: StepArrived, now: float) -> str | None:
        """Queue a step by its number; return None, or the name of the counter for a dropped one."""
        number = arrived.step.step
        if number < self.next_step or number in self.early:
            return "duplicate_steps"
        if len(self.early) >= MAX_EARLY and number != self.next_step:
            return "dropped_steps"
        self.early[number] = (arrived, now)
        while (step := self.early.pop(self.next_step, None)) is not None:
            self.ready.append(step)
            self.next_step += 1
            self.gap_since = None  # a step that is still missing is another one
        if self.early and self.gap_since is None:
            self.gap_since = now
        return None

    def report_gap(self, now: float) -> str | None:
        """Return an error text if a step has been missing for too long. Reports each gap once."""
        if self.gap_since is None or now - self.gap_since <= GAP_PATIENCE_S:
            return None
        self.gap_since = None
        return f"step {self.next_step} is missing, later ones are here: {sorted(self.early)}"


@dataclass(slots=True)
class RunningStep:
    """The step that is being computed, with its times."""

    arrived: StepArrived
    arrived_at: float
    started_at: float
    idle_s: float  # how long the stage had nothing to do before the step arrived
    num_waiting: int = 0  # steps queued behind it

    def make_hop(self, name: str, layers: LayerRange, forwarded: ForwardResult, now: float) -> Hop:
        """Return this stage's share of the step: times and bytes."""
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

    def outgoing_action(self, hop: Hop, forwarded: ForwardResult, *, is_last: bool) -> SendStep | SendDone:
        """Return the action that sends the step on: to the next stage, or from the last stage to the broker."""
        step = self.arrived.step
        hops = (*step.hops, hop)
        if not is_last:
            onward = msgspec.structs.replace(
                step, hops=hops, tensor=None, pixels=msgspec.UNSET, image_parts=msgspec.UNSET
            )
            return SendStep(onward, forwarded.hidden)
        done = StepDone(
            epoch=step.epoch,
            step=step.step,
            kv=self._certain_positions(forwarded),
            sampled=forwarded.sampled,
            failed=forwarded.failed,
            late=forwarded.late,
            forced=forwarded.forced or msgspec.UNSET,
            vectors=forwarded.vectors or msgspec.UNSET,
            prompt_logprobs=forwarded.prompt_logprobs or msgspec.UNSET,
            hops=hops,
            cause=step.cause,
            lineage=step.lineage,
        )
        return SendDone(done)

    def _certain_positions(self, forwarded: ForwardResult) -> tuple[SequencePosition, ...]:
        """Return the position up to which each row's tokens are certain."""
        certain = {item.sequence: item.position for item in forwarded.certain}
        return tuple(
            SequencePosition(row.sequence, certain.get(row.sequence, row.start + row.count))
            for row in certain_rows(self.arrived.step)
        )

    def counter_increments(self, forwarded: ForwardResult) -> Iterator[tuple[str, float]]:
        """Yield the names of the stage's counters and their increments."""
        step = self.arrived.step
        yield "steps", 1
        yield "rows", len(step.rows)
        yield "positions", len(step.tokens)
        yield "wire_bytes_in", self.arrived.num_bytes
        yield "compute_s", forwarded.compute_s
        yield "sample_s", forwarded.sample_s
        yield "idle_s", self.idle_s


@dataclass(slots=True)
class StepRunner:
    """Runner of one step at a time.

    It applies the step's changes to sequences, has its rows computed, then logs and sends the output. Appends to
    ``actions``.
    """

    name: str  # of this worker
    num_layers: int  # of the model
    profile_every: int  # log a profile after this number of steps; 0: never
    store: SequenceStore
    actions: list[Action]
    count: Callable[[str, float], None]
    statistics: StageStatistics = field(default_factory=StageStatistics)
    running: RunningStep | None = None
    idle_since: float = 0.0  # when the last step ended

    def take_next(self, steps: StepOrder, now: float) -> Step:
        """Take the next ready step."""
        arrived, arrived_at = steps.ready.popleft()
        idle_s = max(0.0, arrived_at - self.idle_since)
        self.running = RunningStep(arrived, arrived_at, now, idle_s, len(steps.ready))
        return arrived.step

    def start(self, layers: LayerRange, now: float) -> str | None:
        """Apply the step's changes to sequences and have its rows computed.

        Returns an error text if the step breaks a rule.
        """
        assert self.running is not None
        arrived = self.running.arrived
        step = arrived.step
        problem = (
            proposal_error(step) or self.store.apply_header(step, layers) or row_error(self.store.sequences, step.rows)
        )
        if problem is not None:
            return problem
        if step.rows or step.image_parts:
            batch = self.store.batch(arrived, is_last=self._is_last(layers))
            self.actions.append(Compute(step.epoch, step.step, batch, step.cause))
        else:
            self._pass_on(ForwardResult(None, (), (), 0.0, 0.0), layers, now)
        return None

    def is_running(self, step: int) -> bool:
        """Whether this step is running."""
        return self.running is not None and self.running.arrived.step.step == step

    def on_computed(self, forwarded: ForwardResult, layers: LayerRange, now: float) -> None:
        """Record the new positions of the computed rows, log the output, and send it on."""
        assert self.running is not None
        step = self.running.arrived.step
        rows, counts = step.rows, proposed_counts(step)
        for row in rows:
            held = self.store.sequences[row.sequence]
            held.finish_row(layers, row, counts.get(row.sequence, 0))
        if forwarded.hidden is not None:
            self.store.log.append_rows(rows, layers.stop, forwarded.hidden)
        self._pass_on(forwarded, layers, now)

    def abandon(self, outcome: str, now: float) -> None:
        """Abandon the running step, counted under ``outcome``."""
        self.count(f"steps_{outcome}", 1)
        self.running = None
        self.idle_since = now

    def _pass_on(self, forwarded: ForwardResult, layers: LayerRange, now: float) -> None:
        running, self.running = self.running, None
        assert running is not None
        step = running.arrived.step
        hop = running.make_hop(self.name, layers, forwarded, now)
        self.actions.append(running.outgoing_action(hop, forwarded, is_last=self._is_last(layers)))
        for name, amount in running.counter_increments(forwarded):
            self.count(name, amount)
        self.idle_since = now
        if step.rows:
            self.statistics.add_step(step, forwarded, hop, running.num_waiting)
            if self.profile_every and self.statistics.calls % self.profile_every == 0:
                self.actions.append(WriteStageLog("profile", "info", self.statistics.profile()))

    def _is_last(self, layers: LayerRange) -> bool:
        """Whether this stage has the model's last layer."""
        return layers.stop == self.num_layers
