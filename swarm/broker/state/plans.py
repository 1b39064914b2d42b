"""Plans, their phases, and the start after a restart of the broker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from math import lcm

from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.load import PlanGauge
from swarm.broker.planner.problem import NO_WORKER
from swarm.wire.messages import BLOCK, LayerRange, Order, Prepared
from swarm.wire.transport.keys import split_ticket

MAX_SHARE_UNIT = 4096  # positions; sharing by larger units would hardly ever apply


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan: a worker with its layers and the address that receives its steps."""

    incarnation: str
    name: str
    layers: LayerRange
    endpoint: str
    weight_bytes: int
    host: str = ""
    device: str = "cpu"
    memory_bytes: int = 0
    load_bytes: int = 0  # bytes of the weights that are not loaded yet
    key: str | None = None  # public key of the worker, if authentication is enabled
    # relay address at which the worker waits for steps, if they go through the relay; then ``endpoint`` points there
    # too
    relay: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of layers to workers, in the order of the pipeline."""

    epoch: int
    stages: tuple[StagePlan, ...]
    objective: str
    forecast: Forecast | None = None
    standby: tuple[tuple[str, tuple[LayerRange, ...]], ...] = ()  # (incarnation, layers that it keeps warm for others)
    recovery_choice: str = ""  # if it was made after a loss: which worker takes which layers, as text

    @property
    def shares_cores(self) -> bool:
        """Whether all stages compute on the cores of one machine, or on one GPU, so that each slows down the others."""
        return len({(stage.host, stage.device) for stage in self.stages}) == 1

    @property
    def commits_on_write(self) -> bool:
        """Whether keys and values take memory only as they are written. On devices other than CPUs all reserved memory
        is taken immediately."""
        return all(stage.device == "cpu" for stage in self.stages)

    @property
    def members(self) -> frozenset[str]:
        return frozenset(stage.incarnation for stage in self.stages)

    def standby_of(self, incarnation: str) -> tuple[LayerRange, ...]:
        return next((layers for holder, layers in self.standby if holder == incarnation), ())

    @property
    def tickets(self) -> frozenset[str]:
        """Tickets by which the relay identifies the workers whose steps it forwards."""
        return frozenset(split_ticket(stage.relay)[1] for stage in self.stages if stage.relay)

    def stage_of(self, incarnation: str) -> StagePlan | None:
        return next((s for s in self.stages if s.incarnation == incarnation), None)


@dataclass(slots=True)
class RestartState:
    """State of the start after a restart: the workers of the last plan that the broker still waits for. It ends
    (``is_over``) once a plan has been made."""

    awaited: set[str] = field(default_factory=set)  # names of workers of the last plan that have not joined yet
    rejoin_until: float = 0.0  # time at which waiting ends if workers that have joined hold sequences
    gather_until: float = 0.0  # time at which waiting ends if too few workers have joined
    is_over: bool = True
    model_is_remembered: bool = False  # the model is known from the journal only: no worker that has it has joined yet

    def shift_deadlines(self, pause_s: float) -> None:
        """Extend the waiting times by a pause of the broker, during which no worker could join."""
        self.rejoin_until += pause_s
        self.gather_until += pause_s

    def confirm_model(self) -> None:
        """Note that a worker has joined with the model: from now on that model counts."""
        self.model_is_remembered = False


class PlanPhase(enum.Enum):
    """Phase of the current or the next plan."""

    NONE = "waiting"  # no plan; ``PlanState.waits_for`` has the reason
    PREPARING = "preparing"  # layers are loading; the old plan, if any, keeps serving
    COPYING = "copying"  # the last keys and values go to the next plan's workers; nothing is dispatched
    ACTIVATING = "activating"  # the fence is up; nothing is dispatched
    SERVING = "serving"


@dataclass(slots=True)
class PlanState:
    """The active plan and the next one, with the phase of the change between them."""

    epoch: int = 0  # highest epoch that was ever chosen
    journaled_epoch: int = 0  # highest epoch in the journal; no higher one is announced
    phase: PlanPhase = PlanPhase.NONE
    current: Plan | None = None
    upcoming: Plan | None = None  # the plan that is being prepared
    # by incarnation: answers of workers that have loaded their part of the next plan
    prepared: dict[str, Prepared] = field(default_factory=dict)
    capacity: dict[str, Prepared] = field(default_factory=dict)  # by incarnation: KV capacity under the current plan
    awaited: set[str] = field(default_factory=set)  # incarnations whose answer is awaited in this phase
    # incarnation -> order that is awaited and will be repeated
    pending_orders: dict[str, Order] = field(default_factory=dict)
    repeat_orders_at: float = 0.0  # time at which unanswered orders are repeated
    deadline: float = 0.0  # time at which workers that have not answered are put out
    members_changed_at: float = 0.0  # time at which workers last joined or left
    waits_for: str = NO_WORKER  # what the broker waits for, as text for reports
    gauge: PlanGauge = field(default_factory=PlanGauge)  # predicted and measured performance of the current plan
    failed: Plan | None = None  # the last plan, while a recovery from its failure is under way

    @property
    def is_serving(self) -> bool:
        """Whether steps may be dispatched: a plan is active and no fence is up."""
        return self.current is not None and self.phase in (PlanPhase.SERVING, PlanPhase.PREPARING)

    @property
    def is_whole(self) -> bool:
        """Whether the active plan has lost no worker, so that its steps in flight still count."""
        return self.is_serving or self.phase is PlanPhase.COPYING

    @property
    def is_loaded(self) -> bool:
        """Whether all workers of the next plan have loaded their layers."""
        return self.upcoming is not None and self.upcoming.members <= self.prepared.keys()

    def is_awaited(self, incarnation: str, epoch: int) -> bool:
        """Whether this worker's answer to an order of this epoch is awaited."""
        plan = self.upcoming or self.current
        return plan is not None and plan.epoch == epoch and incarnation in self.awaited

    def add_forecast(self, forecast: Forecast) -> None:
        """Add the explanation to the active plan; it is computed on demand."""
        if self.current is not None:
            self.current = replace(self.current, forecast=forecast)

    def prepare(self, plan: Plan) -> None:
        """Make this the next plan. It is not announced before the journal has its epoch."""
        self.upcoming, self.phase = plan, PlanPhase.PREPARING
        self.prepared, self.awaited = {}, set()

    def await_loading(self, plan: Plan, deadline: float) -> None:
        """Wait until all workers of the next plan have loaded their layers."""
        self.awaited, self.deadline = set(plan.members), deadline
        self.waits_for = "the workers to load their layers"

    def start_copying(self) -> None:
        """Stop dispatching, so that the last keys and values of moved layers can be copied."""
        self.phase, self.waits_for = PlanPhase.COPYING, "the keys and values of moved layers"

    def activate(self, deadline: float) -> Plan:
        """Make the next plan the current one, and wait until all its workers have reported what they hold."""
        assert self.upcoming is not None
        self.current, self.upcoming = self.upcoming, None
        self.phase, self.capacity = PlanPhase.ACTIVATING, dict(self.prepared)
        self.awaited, self.deadline = set(self.current.members), deadline
        return self.current

    def serve(self) -> Plan:
        """Start serving: all workers are ready."""
        assert self.current is not None
        self.phase, self.waits_for, self.failed = PlanPhase.SERVING, "", None
        return self.current

    def abandon(self) -> None:
        """Drop the next plan. The active plan, if complete, keeps serving."""
        self.upcoming, self.awaited = None, set()
        if self.phase in (PlanPhase.PREPARING, PlanPhase.COPYING):
            self.phase = PlanPhase.SERVING if self.current is not None else PlanPhase.NONE
            self.waits_for = "" if self.current is not None else "a new plan"

    def fail(self) -> None:
        """Drop all plans: none is active any more."""
        self.failed = self.failed or self.current
        self.current = self.upcoming = None
        self.phase, self.awaited, self.waits_for = PlanPhase.NONE, set(), "a new plan"

    def restore_failed(self, plan: Plan | None) -> None:
        """Set the last plan of an earlier broker process, if some of its workers are still there."""
        self.failed = plan or self.failed

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        if self.phase is PlanPhase.SERVING and (self.current is None or self.failed is not None):
            return "a plan serves, but is not active or has failed"
        if self.phase is PlanPhase.ACTIVATING and (self.current is None or self.upcoming is not None):
            return "a plan is being activated, but is not the current one, or another is being prepared"
        if self.phase is PlanPhase.COPYING and (self.current is None or self.upcoming is None):
            return "keys and values are copied, but there is no plan to copy them from, or none to copy them to"
        return None

    def resume_above(self, epoch: int) -> None:
        """Continue after the journal's last epoch. Epochs that workers report never change it; they receive the
        broker's."""
        self.epoch = self.journaled_epoch = epoch

    @property
    def kv_blocks(self) -> int:
        return min((p.kv_capacity for p in self.capacity.values()), default=0) // BLOCK

    @property
    def share_unit(self) -> int:
        """Positions of a chunk that every stage can share between sequences; 0 if one of them can't."""
        units = [ready.share_unit for ready in self.capacity.values()]
        unit = lcm(BLOCK, *units) if all(units) and units else 0
        return unit if unit <= MAX_SHARE_UNIT else 0

    @property
    def share_mappings(self) -> int:
        """Number of mappings that sharing sequences may take in every stage."""
        return min((ready.share_mappings for ready in self.capacity.values()), default=0)

    @property
    def max_sequences(self) -> int:
        return min((p.max_sequences for p in self.capacity.values()), default=0)
