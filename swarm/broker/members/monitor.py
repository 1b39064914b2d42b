"""Health monitoring of the workers: reads their heartbeats, gives the verdict on each (``health``), and notices steps
that got lost although no worker died.

The consequences of a verdict are decided elsewhere (``membership``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.broker.actions import Outbox
from swarm.broker.members.health import ExpectedTimes, HealthLimits, describe_blocking_verdict, judge
from swarm.broker.planner.load import StepShape
from swarm.broker.recovery.reconfiguration import Reconfiguration
from swarm.broker.state import Plan, State, Worker, WorkerState
from swarm.broker.state.workers import Judgement, Verdict
from swarm.wire.messages import Heartbeat, LayerRange

MAX_TRANSFER_S = 60.0  # upper limit of a transfer time, whatever was measured
LOST_STEP_S = 1.0
TRANSFER_FACTOR = 3.0  # a transfer that takes this many times longer than measured counts as lost
MAX_DOUBLINGS = 2  # doublings of that limit, one for each loss in a row: TCP doubles its own timeout
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


class HealthMonitor:
    """Judges every worker by its heartbeats."""

    def __init__(self, state: State, settings: HealthLimits) -> None:
        self._state = state
        self._settings = settings

    def judgements(self, now: float) -> dict[str, Judgement]:
        """Return the verdict on every worker, with its evidence, and the time since which it has held."""
        verdicts: dict[str, Judgement] = {}
        replays = self._replay_shapes()
        for incarnation, worker in self._state.workers.items():
            if worker.is_gone:
                verdicts[incarnation] = self._last_verdict(worker)
            else:
                expected = self._expected_times(worker, replays)
                verdicts[incarnation] = judge(worker.heartbeats, self._settings, expected, now)
        detailed = {incarnation: self._add_details(incarnation, verdicts) for incarnation in verdicts}
        return {
            incarnation: self._record_judgement(incarnation, judgement, now)
            for incarnation, judgement in detailed.items()
        }

    def _add_details(self, incarnation: str, verdicts: dict[str, Judgement]) -> Judgement:
        """Add to a judgement what the worker's own heartbeats don't contain: the verdict on the worker that it waits
        for, the bytes that it has read."""
        judgement, worker = verdicts[incarnation], self._state.workers[incarnation]
        if judgement.verdict is Verdict.BLOCKED:
            by = describe_blocking_verdict(incarnation, verdicts, self.blocked_on, self._name_of)
            holder = self.blocked_on(incarnation)
            text = judgement.evidence.replace(holder, self._name_of(holder), 1)
            return replace(judgement, evidence=f"{text}; {by}")
        if judgement.verdict is Verdict.LOADING and worker.loaded_bytes < worker.total_bytes:
            done, total = worker.loaded_bytes / 2**20, worker.total_bytes / 2**20
            return replace(judgement, evidence=f"{judgement.evidence}: {done:.1f} of {total:.1f} MiB")
        return judgement

    def _last_verdict(self, worker: Worker) -> Judgement:
        """Return the verdict with which a departed worker left, or DEAD or LEFT if there was none."""
        last = worker.judgement
        if worker.state is WorkerState.LEFT:
            return Judgement(Verdict.LEFT, worker.reason)
        return last if last is not None and last.verdict.is_out else Judgement(Verdict.DEAD, worker.reason)

    def _record_judgement(self, incarnation: str, judgement: Judgement, now: float) -> Judgement:
        worker = self._state.workers[incarnation]
        last = worker.judgement
        since = last.since if last is not None and last.verdict is judgement.verdict else now
        dated = Judgement(judgement.verdict, judgement.evidence, since)
        worker.set_judgement(dated)
        return dated

    def _replay_shapes(self) -> list[StepShape]:
        """Return the shapes of the replays under way, which are steps too."""
        rebuilding = self._state.rebuilding
        return [
            StepShape.from_rows([(run.done, min(rebuilding.chunk_positions, run.stop - run.done), False)])
            for sequence in rebuilding.in_progress
            for run in sequence.rebuilds[:1]
        ]

    def _expected_times(self, worker: Worker, replays: list[StepShape]) -> ExpectedTimes:
        """Collect the expected step times of a worker. The time of the step in hand matters only while the worker
        computes."""
        gauge, usual_step_s = self._state.plans.gauge, self._state.costs.usual_step_s
        stage = gauge.stages.get(worker.name)
        if stage is None:
            return ExpectedTimes(usual_step_s)
        pace = stage.recent_pace
        in_hand_s = gauge.longest_in_flight_s(worker.name, replays) if self.is_computing(worker.incarnation) else 0.0
        return ExpectedTimes(usual_step_s, in_hand_s, stage.num_layers, worker.pace if pace is None else pace)

    def _last_beat(self, incarnation: str) -> Heartbeat | None:
        worker = self._state.workers.get(incarnation)
        return None if worker is None else worker.heartbeats.last

    def blocked_on(self, incarnation: str) -> str:
        """Return the incarnation that the worker waits for, by its last heartbeat; empty if it waits for none."""
        beat = self._last_beat(incarnation)
        return beat.blocked_on if beat is not None and beat.state == "blocked" else ""

    def _name_of(self, incarnation: str) -> str:
        worker = self._state.workers.get(incarnation)
        return worker.name if worker is not None else incarnation

    def vital_signs(self, incarnation: str, now: float) -> VitalSigns:
        """Return the content of the worker's last heartbeat, for reports; empty values if it has sent none."""
        worker, beat = self._state.workers.get(incarnation), self._last_beat(incarnation)
        if worker is None or beat is None or worker.heartbeats.last_arrived_at is None:
            return VitalSigns()
        stage = self._state.plans.gauge.stages.get(worker.name)
        return VitalSigns(
            beat_age_s=now - worker.heartbeats.last_arrived_at,
            doing=beat.state,
            rate=worker.heartbeats.rate,
            pace=None if stage is None or worker.is_gone else stage.recent_pace,
            loop_lag_s=beat.loop_lag_s,
            blocked_on=self._name_of(beat.blocked_on) if beat.state == "blocked" else "",
        )

    def idle_s(self, incarnation: str) -> float:
        """Return for how long this worker has computed nothing, by its last heartbeat: for lack of work, or because it
        can't pass its output on."""
        beat = self._last_beat(incarnation)
        return beat.since_s if beat is not None and beat.state in ("idle", "blocked") else 0.0

    def transfer_s(self, members: Iterable[str], num_positions: int) -> float:
        """Estimate the time to send the hidden states of ``num_positions`` to the next stage, over the slowest of the
        members' links."""
        manifest = self._state.manifest
        num_bytes = num_positions * (manifest.row_width if manifest is not None else 0) * 4
        links = [worker.hello.link for i in members if (worker := self._state.workers.get(i)) is not None]
        times = [link.round_trip_s + num_bytes / max(1.0, link.bytes_per_s) for link in links if link is not None]
        return min(MAX_TRANSFER_S, max(times, default=0.0))

    def is_computing(self, incarnation: str) -> bool:
        """Whether the worker's last heartbeat reports that it computes."""
        beat = self._last_beat(incarnation)
        return beat is not None and beat.state == "computing"


@dataclass(slots=True)
class LostStepDetector:
    """Detects steps that are lost although no worker died: one is in flight, but no stage has computed for a while."""

    state: State
    monitor: HealthMonitor
    reconfiguration: Reconfiguration
    out: Outbox

    def tick(self, now: float) -> None:
        plan, rebuilding = self.state.plans.current, self.state.rebuilding
        under_way = [flight.sent_at for flight in self.state.in_flight.values()]
        under_way += [rebuilding.ordered_at] if rebuilding.in_progress else []
        if plan is None or not under_way or not self.state.plans.is_serving:
            return
        idle_s = min(self.monitor.idle_s(incarnation) for incarnation in plan.members)
        if min(now - min(under_way), idle_s) > self._lost_after_s(plan):
            self.out.note("steps_lost", "error", steps=sorted(self.state.in_flight))
            self.state.count("steps_lost", len(self.state.in_flight))
            self.state.data_path_errors.num_lost += 1
            # The first two losses are the network's fault. If still no other step completes, these steps' contents are
            # to blame, or two stages can't reach each other at all.
            should_blame = self.state.data_path_errors.num_lost > BLAME_AFTER_LOSSES
            is_excluded = should_blame and self._exclude_unreachable(plan, now)
            self.reconfiguration.on_data_path_broken(now, blame=should_blame and not is_excluded)

    def _lost_after_s(self, plan: Plan) -> float:
        """Return the time without any computation after which the steps in flight count as lost.

        A large step over a slow link takes long. Where packets are lost, TCP's retransmission timeouts grow, so the
        limit grows with each lost step.
        """
        positions = max((flight.num_tokens for flight in self.state.in_flight.values()), default=0)
        positions = max(positions, self.state.rebuilding.chunk_positions if self.state.rebuilding.in_progress else 0)
        usual_s = max(LOST_STEP_S, TRANSFER_FACTOR * self.monitor.transfer_s(plan.members, positions))
        return usual_s * 2.0 ** min(self.state.data_path_errors.num_lost, MAX_DOUBLINGS)

    def _exclude_unreachable(self, plan: Plan, now: float) -> bool:
        """Exclude a stage that can't be reached. Connections were made again repeatedly, and still a stage can't send
        its output to the next one, which is idle and healthy: these two can't reach each other. The plan avoids the
        second one for a while."""
        for stage in plan.stages:
            holder = self.state.workers.get(self.monitor.blocked_on(stage.incarnation))
            if holder is not None and not holder.is_gone and holder.incarnation in plan.members:
                holder.record_refusal(LayerRange(0, 1), f"{stage.name} can't reach it, although both are alive", now)
                self.out.note("worker_unreachable", "error", worker=holder.name, by=stage.name)
                self.state.count("workers_unreachable")
                return True
        return False
