"""Plans, which of them is in force, and what is still to be brought level after a change."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.load import PlanGauge
from swarm.broker.planner.problem import NOBODY
from swarm.broker.state.sequences import Sequence
from swarm.wire.door.keys import without_ticket
from swarm.wire.messages import BLOCK, Activated, LayerRange, Order, Prepared


@dataclass(frozen=True, slots=True)
class Steering:
    """What an operator has said about plans, before the settings, for as long as this process lives; by names, so that
    it holds for a worker that was started anew. ``cordoned``: who keeps what it serves and gets nothing new, with the
    layers that it served then. ``drained``: who serves nothing. ``pins``, ``caps``, ``exclude``, ``objective``: as in
    the settings. ``margin``: by what part the next plan must be quicker, where that is not left to them."""

    cordoned: Mapping[str, LayerRange | None] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    pins: Mapping[str, LayerRange] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    objective: str = ""
    margin: float | None = None

    def cordon(self, name: str, layers: LayerRange | None) -> Steering:
        """Have a worker keep these layers (None: it has none) and get no others."""
        return replace(self, cordoned={**self.cordoned, name: layers})

    def drain(self, name: str) -> Steering:
        """Cordon a worker, and have it serve nothing."""
        return replace(self.cordon(name, None), drained=self.drained | {name})

    def uncordon(self, name: str) -> Steering:
        """Let a worker get layers again."""
        rest = {each: layers for each, layers in self.cordoned.items() if each != name}
        return replace(self, cordoned=rest, drained=self.drained - {name})

    def held_as(self, name: str) -> str:
        """``drained`` or ``cordoned``; empty for whoever may get layers."""
        if name not in self.cordoned:
            return ""
        return "drained" if name in self.drained else "cordoned"

    def calm(self) -> Steering:
        """The plan that was asked for is there: from now on the settings say what is worth a change."""
        return self if self.margin is None else replace(self, margin=None)

    @property
    def is_by_hand(self) -> bool:
        """Whether something else than the settings says what a plan must keep to."""
        return bool(self.pins or self.caps or self.exclude or self.objective)

    def by_the_settings(self) -> Steering:
        """As if no plan had been asked for; who is cordoned stays so."""
        return Steering(cordoned=self.cordoned, drained=self.drained)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the same plan would be made."""
        parts = (self.cordoned, self.pins, self.caps)
        named = tuple(tuple(sorted(part.items(), key=lambda item: item[0])) for part in parts)
        return (*named, self.drained, self.exclude, self.objective, self.margin)


@dataclass(frozen=True, slots=True)
class StagePlan:
    incarnation: str
    name: str
    layers: LayerRange
    endpoint: str
    weight_bytes: int
    host: str = ""
    device: str = "cpu"
    memory_bytes: int = 0
    load_bytes: int = 0  # what of it is not loaded yet
    key: str | None = None  # by which it is known where doors go by keys
    relay: str = ""  # where its steps are waited for, if they come by relay; ``endpoint`` is there, too, then


@dataclass(frozen=True, slots=True)
class Plan:
    """Which worker holds which layers, in the order of the pipeline. ``back``: if it was made after a loss, who takes
    what, in words."""

    epoch: int
    stages: tuple[StagePlan, ...]
    objective: str
    forecast: Forecast | None = None
    standby: tuple[tuple[str, tuple[LayerRange, ...]], ...] = ()  # (incarnation, what it keeps warm for others)
    back: str = ""

    @property
    def shares_cores(self) -> bool:
        """Whether all stages compute on the cores of one machine: whoever computes takes from the others."""
        return len({stage.host for stage in self.stages}) == 1 and all(s.device == "cpu" for s in self.stages)

    @property
    def commits_on_write(self) -> bool:
        """Keys and values take memory as they are written. Elsewhere than on CPUs they take all that was reserved."""
        return all(stage.device == "cpu" for stage in self.stages)

    @property
    def members(self) -> frozenset[str]:
        return frozenset(stage.incarnation for stage in self.stages)

    def standby_of(self, incarnation: str) -> tuple[LayerRange, ...]:
        return next((layers for who, layers in self.standby if who == incarnation), ())

    @property
    def tickets(self) -> frozenset[str]:
        """By which the relay knows those whose steps it passes on."""
        return frozenset(without_ticket(stage.relay)[1] for stage in self.stages if stage.relay)

    def stage_of(self, incarnation: str) -> StagePlan | None:
        return next((s for s in self.stages if s.incarnation == incarnation), None)


@dataclass(slots=True)
class Return:
    """What is still to be found out after a restart; nothing (``is_over``) once a plan has been made. ``awaited``: the
    workers of the last plan, by name."""

    awaited: set[str] = field(default_factory=set)
    until: float = 0.0
    gathered_at: float = 0.0
    is_over: bool = True
    model_is_remembered: bool = False  # no worker has come yet that has it

    def forgive(self, pause_s: float) -> None:
        """The broker stood still, and heard nobody come: those awaited have so much more time."""
        self.until += pause_s
        self.gathered_at += pause_s

    def meet_the_model(self) -> None:
        """A worker has come with its model: that is the one from now on."""
        self.model_is_remembered = False


class PlanPhase(enum.Enum):
    NONE = "waiting"  # no plan; ``PlanBook.waits_for`` says why
    PREPARING = "preparing"  # layers are loading; if there is an old plan, it runs on
    ACTIVATING = "activating"  # the fence is up; nothing is dispatched
    SERVING = "serving"


@dataclass(slots=True)
class PlanBook:
    """The plan in force and the one under way."""

    epoch: int = 0  # the highest that was ever chosen
    written: int = 0  # the highest that the journal holds: no higher one is announced
    phase: PlanPhase = PlanPhase.NONE
    current: Plan | None = None
    coming: Plan | None = None
    prepared: dict[str, Prepared] = field(default_factory=dict)
    capacity: dict[str, Prepared] = field(default_factory=dict)  # of the current plan
    awaited: set[str] = field(default_factory=set)
    given: dict[str, Order] = field(default_factory=dict)  # to those who are awaited, to be said again
    again_at: float = 0.0
    deadline: float = 0.0
    changed_at: float = 0.0
    waits_for: str = NOBODY
    gauge: PlanGauge = field(default_factory=PlanGauge)  # how the current plan does
    fallen: Plan | None = None  # the one whose way back is looked for, until another serves

    @property
    def serving(self) -> bool:
        """Steps may be dispatched: a plan is in force, and no fence is up."""
        return self.current is not None and self.phase in (PlanPhase.SERVING, PlanPhase.PREPARING)

    def explain(self, forecast: Forecast) -> None:
        """Keep the reasons for the plan in force, now that somebody has asked."""
        if self.current is not None:
            self.current = replace(self.current, forecast=forecast)

    def prepare(self, plan: Plan) -> None:
        """Take this plan as the one to come; nobody hears of it before the journal has its epoch."""
        self.coming, self.phase = plan, PlanPhase.PREPARING
        self.prepared, self.awaited = {}, set()

    def load(self, plan: Plan, deadline: float) -> None:
        """Await from all who have a part in the plan to come that they have loaded it."""
        self.awaited, self.deadline = set(plan.members), deadline
        self.waits_for = "the workers to load their layers"

    def activate(self, deadline: float) -> Plan:
        """The plan to come is in force; all are to say what they hold."""
        assert self.coming is not None
        self.current, self.coming = self.coming, None
        self.phase, self.capacity = PlanPhase.ACTIVATING, dict(self.prepared)
        self.awaited, self.deadline = set(self.current.members), deadline
        return self.current

    def serve(self) -> Plan:
        """Put the plan in force: all have said that they are ready."""
        assert self.current is not None
        self.phase, self.waits_for, self.fallen = PlanPhase.SERVING, "", None
        return self.current

    def abandon(self) -> None:
        """The plan to come is void; the one in force, if whole, stays."""
        self.coming, self.awaited = None, set()
        if self.phase is PlanPhase.PREPARING:
            self.phase = PlanPhase.SERVING if self.current is not None else PlanPhase.NONE
            self.waits_for = "" if self.current is not None else "a new plan"

    def fall(self) -> None:
        """No plan is in force any more."""
        self.fallen = self.fallen or self.current
        self.current = self.coming = None
        self.phase, self.awaited, self.waits_for = PlanPhase.NONE, set(), "a new plan"

    def find(self, fallen: Plan | None) -> None:
        """The plan of a broker before this one, if there is anything of it."""
        self.fallen = fallen or self.fallen

    def check(self) -> str | None:
        """The first rule that does not hold, in words."""
        if self.phase is PlanPhase.SERVING and (self.current is None or self.fallen is not None):
            return "a plan serves, and is not in force or has fallen"
        if self.phase is PlanPhase.ACTIVATING and (self.current is None or self.coming is not None):
            return "a plan is activated, and is not in force, or another is to come"
        return None

    def begin_above(self, epoch: int) -> None:
        """The journal's last one. What workers say of epochs moves none: they are told whose these are."""
        self.epoch = self.written = epoch

    @property
    def kv_blocks(self) -> int:
        return min((p.kv_capacity for p in self.capacity.values()), default=0) // BLOCK

    @property
    def max_sequences(self) -> int:
        return min((p.max_sequences for p in self.capacity.values()), default=0)


@dataclass(slots=True)
class Rebuilding:
    """Sequences some of whose layers lag behind since the plan changed. ``chunk``: positions of one order."""

    chunk: int = 256
    said: dict[str, Activated] = field(default_factory=dict)  # what each stage holds, until all have said it
    queue: deque[Sequence] = field(default_factory=deque)
    under_way: list[Sequence] = field(default_factory=list)
    ordered_at: float = 0.0  # when an order was last given or answered
    began_at: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether all layers are level."""
        return not self.queue and not self.under_way

    def clear(self) -> None:
        """The epoch ended: what every layer holds will be told again."""
        self.said.clear()
        for sequence in (*self.under_way, *self.queue):
            sequence.stop_rebuilding()
        self.queue.clear()
        self.under_way.clear()


@dataclass(slots=True)
class Comparison:
    """A stage's results are computed again by others. ``expected``: the digest, or the tokens that were drawn; None
    until it is known; ``found`` by whoever computes again."""

    ticket: int
    epoch: int
    sequence: Sequence
    stage: StagePlan
    checkers: tuple[str, ...]  # names
    stop: int
    give_up_at: float
    expected: str | tuple[int, ...] | None = None
    found: str | tuple[int, ...] | None = None


@dataclass(slots=True)
class Rechecks:
    """What ``members.recheck`` compares, one thing at a time: each stage and each sequence in its turn."""

    under_way: Comparison | None = None
    looked_at: float = 0.0  # when it was time for one the last time
    _num_begun: int = 0
    _turn: int = 0
    _last_sequence: int = 0

    def next_stage(self, num_stages: int) -> int:
        index, self._turn = self._turn % num_stages, self._turn + 1
        return index

    def next_sequence(self, fit: list[Sequence]) -> Sequence | None:
        """The one after the one that was taken last, by number."""
        later = [sequence for sequence in fit if sequence.id > self._last_sequence]
        return min(later or fit, key=lambda sequence: sequence.id, default=None)

    def next_ticket(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def take(self, sequence: Sequence) -> None:
        self._last_sequence = sequence.id

    def begin(self, comparison: Comparison) -> None:
        self.under_way = comparison

    def end(self) -> Comparison:
        ended, self.under_way = self.under_way, None
        assert ended is not None
        return ended

    def look(self, now: float) -> None:
        self.looked_at = now
