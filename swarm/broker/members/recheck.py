"""From time to time, have another worker recompute one stage's result, and compare.

It is the only protection against a worker whose results are finite but wrong. Every ``every_s`` seconds one running
sequence and one stage are selected, each in turn. The previous stage sends the stage's input (for the first stage: the
tokens) to workers that have these layers loaded, which recompute it. The digest of their output is compared with the
digest that the checked stage reports. For the last stage, which sends no hidden states on, the sampled tokens are
compared.

* Only workers are compared that promise the same bits: the same kind of device, dtype and kernels, and exact kernels.
* One comparison does not show which side is right: a disagreement is logged, counted and shown with both names, and
  nothing else happens. A worker that disagrees with several others is the likely culprit.
* Only the first ``positions`` of a sequence are checked, and only one sequence at a time; a worker that is wrong
  occasionally may stay undetected for long. Wrong results before that stay in the answer.
* Sequences with images are not checked: only the first stage has what is added to its layers' outputs.
* Any interruption (the plan changes, the sequence ends, the log is gone, no worker has time) voids the recheck.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.state import Plan, Sequence, SequenceState, StagePlan, State, Worker
from swarm.broker.state.rechecks import RecheckComparison, RecheckSchedule
from swarm.broker.steps.scheduler import build_open
from swarm.wire.messages import (
    AllowKey,
    Edge,
    GetDigest,
    LayerRange,
    LogDigest,
    Recheck,
    Rechecked,
    RecheckHop,
    RecheckRoute,
    loaded_layers,
)

TIMEOUT_S = 30.0  # a checker computes only when it is otherwise idle
MAX_HOPS = 16
MAX_DRAWN = 8  # tokens that are sampled again after the last stage


@dataclass(frozen=True, slots=True)
class RecheckSettings:
    """Settings of the recheck. ``every_s``: seconds between two comparisons, 0 for none. ``positions``: of a sequence,
    at most."""

    every_s: float = 0.0
    positions: int = 512


@dataclass(slots=True)
class RecheckCoordinator:
    """Runs one recheck at a time (see the module). Appends actions to ``out``."""

    state: State
    settings: RecheckSettings
    out: Outbox

    @property
    def _rechecks(self) -> RecheckSchedule:
        return self.state.rechecks

    def tick(self, now: float) -> None:
        """Begin a recheck if it is due. Cancel the current one if it takes too long or has become invalid."""
        trial = self._rechecks.current
        if trial is not None:
            if now >= trial.give_up_at:
                self._void("no answer")
            elif not self._is_valid(trial):
                self._void("the plan changed, or the sequence ended")
            return
        if self.settings.every_s > 0 and now - self._rechecks.due_at >= self.settings.every_s:
            self._begin(now)

    def on_result(self, worker: Worker, message: Rechecked | LogDigest) -> None:
        trial = self._rechecks.current
        if trial is None or message.ticket != trial.ticket:
            self.state.count("stale_rechecks")
            return
        if isinstance(message, LogDigest):
            if worker.incarnation != trial.stage.incarnation:
                self.state.count("stale_rechecks")
                return
            trial.expected = message.digest
        elif message.problem:
            self._void(f"{worker.name}: {message.problem}")
            return
        elif worker.name != trial.checkers[-1]:
            self.state.count("stale_rechecks")
            return
        else:
            trial.result = message.digest or message.tokens
        if not self._is_valid(trial):
            self._void("the plan changed, or the sequence ended")
        elif trial.expected == "":  # The stage reports an empty digest when its log no longer has these positions.
            self._void(f"the log of {trial.stage.name} has gone")
        elif trial.expected is not None and trial.result is not None:
            self._compare(trial)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        plans = self.state.plans
        plan = plans.current
        if plan is None or not plans.is_serving:
            return
        for _ in plan.stages:
            index = self._rechecks.next_stage(len(plan.stages))
            sequence = self._next_sequence(is_last=index + 1 == len(plan.stages))
            legs = self._find_hops(plan.stages[index]) if sequence is not None else ()
            if sequence is not None and legs:
                self._rechecks.record_due(now)
                self._rechecks.record_sequence(sequence)
                self._start(plan, index, sequence, legs, now)
                return
        self._rechecks.record_due(now)
        if len(plan.stages) and self.state.running:
            self.state.count("rechecks_impossible")  # no comparable worker has the layers loaded

    def _next_sequence(self, *, is_last: bool) -> Sequence | None:
        """Return the next sequence that can be checked."""
        fit = [
            s
            for s in self.state.running
            if s.kv > 0
            and not s.rebuilds
            and not s.images  # a checker may begin between the layers that only the first stage has features for
            and (not is_last or (s.num_generated > 0 and s.sampled > self._end_position(s)))
        ]
        return self._rechecks.next_sequence(fit)

    def _end_position(self, sequence: Sequence) -> int:
        return min(sequence.kv, self.settings.positions)

    def _find_hops(self, suspect: StagePlan) -> tuple[RecheckHop, ...]:
        """Return workers that have the stage's layers loaded, each with as many of them in a row as possible; nothing
        if no worker has some layer."""
        others = [w for w in self.state.workers.values() if self._is_comparable(w, suspect)]
        loaded = {w.incarnation: loaded_layers(w.layers, w.warm_layers) for w in others}
        legs: list[RecheckHop] = []
        at = suspect.layers.first
        while at < suspect.layers.stop:
            stops = {i: self._run_end(at, suspect.layers.stop, layers) for i, layers in loaded.items()}
            best = max(stops, key=lambda i: stops[i], default=None)
            if best is None or stops[best] == at or len(legs) == MAX_HOPS:
                return ()
            worker = self.state.workers[best]
            legs.append(RecheckHop(Edge(best, self._endpoint(worker)), LayerRange(at, stops[best])))
            at = stops[best]
        return tuple(legs)

    def _endpoint(self, worker: Worker) -> str:
        """Return the address to reach this worker: by relay if its neighbours in the plan reach it so."""
        stage = self._stage(worker)
        return worker.hello.endpoint if stage is None else stage.endpoint

    def _stage(self, worker: Worker) -> StagePlan | None:
        plan = self.state.plans.current
        return None if plan is None else plan.stage_of(worker.incarnation)

    @staticmethod
    def _run_end(at: int, stop: int, layers: frozenset[int]) -> int:
        while at < stop and at in layers:
            at += 1
        return at

    def _is_comparable(self, worker: Worker, suspect: StagePlan) -> bool:
        """Whether both workers promise the same bits. A worker outside of the plan has not reported its kernels; on the
        same host they are the same."""
        own = self.state.workers[suspect.incarnation].hello
        if worker.is_gone or worker.incarnation == suspect.incarnation:
            return False
        if worker.incarnation in self.state.routes.relay_only and self._stage(worker) is None:
            return False  # the worker connects to the relay only while it is a stage
        if (worker.hello.device, worker.hello.dtype) != (own.device, own.dtype):
            return False
        capacity = self.state.plans.capacity
        suspected, other = capacity.get(suspect.incarnation), capacity.get(worker.incarnation)
        if suspected is not None and "inexact" in suspected.kernels:
            return False
        if suspected is not None and other is not None:
            return suspected.bits == other.bits
        return worker.hello.host == own.host

    def _start(self, plan: Plan, index: int, sequence: Sequence, legs: tuple[RecheckHop, ...], now: float) -> None:
        stage, ticket, stop = plan.stages[index], self._rechecks.next_ticket(), self._end_position(sequence)
        names = tuple(self.state.workers[leg.to.to].name for leg in legs)
        trial = RecheckComparison(ticket, plan.epoch, sequence, stage, names, stop, now + TIMEOUT_S)
        drawn = 0
        if index + 1 == len(plan.stages):
            drawn = max(0, min(MAX_DRAWN, stop + 1 - sequence.num_prompt, stop))
            if not drawn:
                return  # the sampled tokens lie beyond the positions that are checked
            trial.expected = tuple(sequence.tokens[stop - drawn + 1 : stop + 1])
        self._rechecks.begin(trial)
        self.state.count("rechecks")
        order = Recheck(
            epoch=plan.epoch,
            boundary=stage.layers.first,
            stop=stop,
            open=replace(build_open(sequence), tokens=tuple(sequence.tokens[: stop + 1]), source=None, shared=0),
            trial=RecheckRoute(ticket, legs, drawn),
        )
        sender = legs[0].to.to if index == 0 else plan.stages[index - 1].incarnation
        self._allow_keys([sender, *(leg.to.to for leg in legs)], plan.epoch)
        self._send(sender, order)
        if not drawn:
            tell = GetDigest(
                epoch=plan.epoch, ticket=ticket, sequence=sequence.id, boundary=stage.layers.stop, stop=stop
            )
            self._send(stage.incarnation, tell)

    def _allow_keys(self, route: list[str], epoch: int) -> None:
        """Have each worker on the route accept messages of the previous one, which is not its neighbour in the plan."""
        for sender, receiver in pairwise(route):
            key = self.state.workers[sender].hello.key
            if key is not None and sender != receiver:
                self._send(receiver, AllowKey(epoch=epoch, key=key))

    def _send(self, incarnation: str, order: Recheck | GetDigest | AllowKey) -> None:
        self.out.append(SendToWorker(self.state.workers[incarnation].peer, order))

    # --- the end -----------------------------------------------------------------------------------------------------

    def _is_valid(self, trial: RecheckComparison) -> bool:
        """Whether the stages still hold the positions under check."""
        current = self.state.plans.current
        is_held = trial.sequence.state is SequenceState.RUNNING and trial.sequence.kv >= trial.stop
        return current is not None and current.epoch == trial.epoch and is_held

    def _compare(self, trial: RecheckComparison) -> None:
        self._rechecks.end()
        suspect = self.state.workers[trial.stage.incarnation]
        fields = {
            "worker": suspect.name,
            "checkers": list(trial.checkers),
            "layers": str(trial.stage.layers),
            "sequence": trial.sequence.id,
            "positions": trial.stop,
        }
        if trial.result == trial.expected:
            self.state.count("rechecks_agreed")
            suspect.num_confirmed += 1
            self.out.note("recheck_agreed", "debug", **fields)
            return
        self.state.count("rechecks_disagreed")
        for name in trial.checkers:
            suspect.disagreed_with[name] = suspect.disagreed_with.get(name, 0) + 1
        for worker in self.state.workers.values():
            if worker.name in trial.checkers and not worker.is_gone:
                worker.disagreed_with[suspect.name] = worker.disagreed_with.get(suspect.name, 0) + 1
        self.out.note("recheck_disagreed", "error", **fields, who_is_right="not known from one comparison")

    def _void(self, reason: str) -> None:
        self.state.count("rechecks_void")
        self.out.note("recheck_void", worker=self._rechecks.end().stage.name, why=reason)
