"""Health monitoring of the workers: reads their heartbeats, gives the verdict on each (``health``), and notices steps
that got lost although no worker died.

The consequences of a verdict are decided elsewhere (``membership``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.broker.actions import Outbox
from swarm.broker.members.health import Expected, HealthSettings, judge, judge_blocked
from swarm.broker.planner.load import Shape
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.state import Plan, State, Worker, WorkerState
from swarm.broker.state.workers import Judgement, Verdict
from swarm.wire.messages import Beat, LayerRange

MOST_ON_THE_WIRE_S = 60.0  # upper limit of a transfer time, whatever was measured
LOST_STEP_S = 1.0
WIRE_FACTOR = 3.0  # a transfer that takes this many times longer than measured counts as lost
MOST_DOUBLINGS = 2  # doublings of that limit, one for each loss in a row: TCP doubles its own timeout
BLAME_AFTER_LOSSES = 2  # losses of steps without a single completed step between


@dataclass(frozen=True, slots=True)
class VitalSigns:
    """Content and age of a worker's last heartbeat, for reports."""

    beat_age_s: float | None = None  # None: no heartbeat yet.
    doing: str = ""
    rate: float = 0.0  # layers per second
    pace: float | None = None  # how many times longer than predicted its recent steps took
    loop_lag_s: float = 0.0
    blocked_on: str = ""


class Vigil:
    """Judges every worker by its heartbeats."""

    def __init__(self, state: State, settings: HealthSettings) -> None:
        self._state = state
        self._settings = settings

    def judgements(self, now: float) -> dict[str, Judgement]:
        """Return the verdict on every worker, with its evidence, and the time since which it has held."""
        found: dict[str, Judgement] = {}
        replays = self._replays()
        for incarnation, worker in self._state.workers.items():
            if worker.is_gone:
                found[incarnation] = self._last_verdict(worker)
            else:
                expected = self._expected(worker, replays)
                found[incarnation] = judge(worker.pulse, self._settings, expected, now)
        told = {incarnation: self._in_full(incarnation, found) for incarnation in found}
        return {incarnation: self._dated(incarnation, judgement, now) for incarnation, judgement in told.items()}

    def _in_full(self, incarnation: str, found: dict[str, Judgement]) -> Judgement:
        """Add to a judgement what the worker's own heartbeats don't contain: the verdict on the worker that it waits
        for, the bytes that it has read."""
        judgement, worker = found[incarnation], self._state.workers[incarnation]
        if judgement.verdict is Verdict.BLOCKED:
            by = judge_blocked(incarnation, found, self.blocked_on, self._name_of)
            holder = self.blocked_on(incarnation)
            text = judgement.evidence.replace(holder, self._name_of(holder), 1)
            return replace(judgement, evidence=f"{text}; {by}")
        if judgement.verdict is Verdict.LOADING and worker.loaded_bytes < worker.total_bytes:
            done, total = worker.loaded_bytes / 2**20, worker.total_bytes / 2**20
            return replace(judgement, evidence=f"{judgement.evidence}: {done:.1f} of {total:.1f} MiB")
        return judgement

    def _last_verdict(self, worker: Worker) -> Judgement:
        """Return why a departed worker left; it was not always by a verdict."""
        last = worker.judged
        if worker.state is WorkerState.LEFT:
            return Judgement(Verdict.LEFT, worker.reason)
        return last if last is not None and last.verdict.is_out else Judgement(Verdict.DEAD, worker.reason)

    def _dated(self, incarnation: str, judgement: Judgement, now: float) -> Judgement:
        worker = self._state.workers[incarnation]
        last = worker.judged
        since = last.since if last is not None and last.verdict is judgement.verdict else now
        dated = Judgement(judgement.verdict, judgement.evidence, since)
        worker.be_judged(dated)
        return dated

    def _replays(self) -> list[Shape]:
        """Return the shapes of the replays under way, which are steps too."""
        rebuilding = self._state.rebuilding
        return [
            Shape.of([(run.done, min(rebuilding.chunk, run.stop - run.done), False)])
            for sequence in rebuilding.under_way
            for run in sequence.rebuilds[:1]
        ]

    def _expected(self, worker: Worker, replays: list[Shape]) -> Expected:
        """Collect the expected step times of a worker. The time of the step in hand matters only while the worker
        computes."""
        gauge, usual_step_s = self._state.book.gauge, self._state.costs.usual_step_s
        stage = gauge.stages.get(worker.name)
        if stage is None:
            return Expected(usual_step_s)
        pace = stage.recent_pace
        in_hand_s = gauge.in_hand_s(worker.name, replays) if self.computes(worker.incarnation) else 0.0
        return Expected(usual_step_s, in_hand_s, stage.num_layers, worker.pace if pace is None else pace)

    def _beat_of(self, incarnation: str) -> Beat | None:
        worker = self._state.workers.get(incarnation)
        return None if worker is None else worker.pulse.beat

    def blocked_on(self, incarnation: str) -> str:
        """Return the incarnation that the worker waits for, by its last heartbeat; empty if it waits for none."""
        beat = self._beat_of(incarnation)
        return beat.blocked_on if beat is not None and beat.state == "blocked" else ""

    def _name_of(self, incarnation: str) -> str:
        worker = self._state.workers.get(incarnation)
        return worker.name if worker is not None else incarnation

    def vital_signs(self, incarnation: str, now: float) -> VitalSigns:
        """Return the content of the worker's last heartbeat, for reports; empty values if it has sent none."""
        worker, beat = self._state.workers.get(incarnation), self._beat_of(incarnation)
        if worker is None or beat is None or worker.pulse.beat_at is None:
            return VitalSigns()
        stage = self._state.book.gauge.stages.get(worker.name)
        return VitalSigns(
            beat_age_s=now - worker.pulse.beat_at,
            doing=beat.state,
            rate=worker.pulse.rate,
            pace=None if stage is None or worker.is_gone else stage.recent_pace,
            loop_lag_s=beat.loop_lag_s,
            blocked_on=self._name_of(beat.blocked_on) if beat.state == "blocked" else "",
        )

    def idle_s(self, incarnation: str) -> float:
        """Return for how long this worker has computed nothing, by its last heartbeat: for lack of work, or because it
        can't pass its output on."""
        beat = self._beat_of(incarnation)
        return beat.since_s if beat is not None and beat.state in ("idle", "blocked") else 0.0

    def on_the_wire_s(self, members: Iterable[str], num_positions: int) -> float:
        """Estimate the time to send the hidden states of ``num_positions`` to the next stage, over the slowest of the
        members' links."""
        manifest = self._state.manifest
        num_bytes = num_positions * (manifest.hidden_size if manifest is not None else 0) * 4
        links = [worker.hello.link for i in members if (worker := self._state.workers.get(i)) is not None]
        times = [link.round_trip_s + num_bytes / max(1.0, link.bytes_per_s) for link in links if link is not None]
        return min(MOST_ON_THE_WIRE_S, max(times, default=0.0))

    def computes(self, incarnation: str) -> bool:
        """Whether the worker's last heartbeat reports that it computes."""
        beat = self._beat_of(incarnation)
        return beat is not None and beat.state == "computing"


@dataclass(slots=True)
class LostSteps:
    """Detects steps that are lost although no worker died: one is in flight, but no stage has computed for a while."""

    state: State
    vigil: Vigil
    procedure: Procedure
    out: Outbox

    def tick(self, now: float) -> None:
        plan, rebuilding = self.state.book.current, self.state.rebuilding
        under_way = [flight.sent_at for flight in self.state.flights.values()]
        under_way += [rebuilding.ordered_at] if rebuilding.under_way else []
        if plan is None or not under_way or not self.state.book.serving:
            return
        idle_s = min(self.vigil.idle_s(incarnation) for incarnation in plan.members)
        if min(now - min(under_way), idle_s) > self._lost_after_s(plan):
            self.out.note("steps_lost", "error", steps=sorted(self.state.flights))
            self.state.count("steps_lost", len(self.state.flights))
            self.state.setbacks.lost += 1
            # The first two losses are the network's fault. If still no other step completes, these steps' contents are
            # to blame, or two stages can't reach each other at all.
            again = self.state.setbacks.lost > BLAME_AFTER_LOSSES
            apart = again and self._set_apart(plan, now)
            self.procedure.trouble(now, blame=again and not apart)

    def _lost_after_s(self, plan: Plan) -> float:
        """Return after what time without computation the steps in flight count as lost. A large step over a slow link
        takes long; and where packets are lost, TCP's retransmissions take longer each time, so the limit grows with
        each loss."""
        positions = max((flight.num_tokens for flight in self.state.flights.values()), default=0)
        positions = max(positions, self.state.rebuilding.chunk if self.state.rebuilding.under_way else 0)
        usual_s = max(LOST_STEP_S, WIRE_FACTOR * self.vigil.on_the_wire_s(plan.members, positions))
        return usual_s * 2.0 ** min(self.state.setbacks.lost, MOST_DOUBLINGS)

    def _set_apart(self, plan: Plan, now: float) -> bool:
        """Exclude a stage that can't be reached. Connections were made again repeatedly, and still a stage can't send
        its output to the next one, which is idle and healthy: these two can't reach each other. The plan avoids the
        second one for a while."""
        for stage in plan.stages:
            holder = self.state.workers.get(self.vigil.blocked_on(stage.incarnation))
            if holder is not None and not holder.is_gone and holder.incarnation in plan.members:
                holder.refuse(LayerRange(0, 1), f"{stage.name} can't reach it, although both are alive", now)
                self.out.note("worker_unreachable", "error", worker=holder.name, by=stage.name)
                self.state.count("workers_unreachable")
                return True
        return False
