"""The broker's state: requests and their sequences, workers, the plan. Plain values with their questions.

A sequence's positions (see ``Sequence``) obey, at every moment::

    kv <= scheduled <= sampled        sent <= committed <= sampled        delivered <= sent
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from swarm.broker.blocks import BLOCK
from swarm.broker.pace import Pace
from swarm.broker.plan.explain import Forecast
from swarm.broker.plan.gauge import PlanGauge
from swarm.broker.prefix import PrefixCache
from swarm.broker.queue import Queue
from swarm.broker.running import Running
from swarm.wire.messages import (
    FinishReason,
    Hello,
    Hop,
    LayerRange,
    Manifest,
    Prepared,
    SequencePosition,
    Submit,
    Timing,
    TokenLogprob,
)

# When a worker that refused layers is asked for them again: a full disk or memory may be free by then, and if the cause
# lasts, asking costs the others a plan that comes to nothing.
RETRY_MIN_S = 30.0
RETRY_MAX_S = 600.0


class SequenceState(enum.Enum):
    WAITING = "waiting"  # no room in the stages yet, or none any more
    RUNNING = "running"  # holds room in the stages
    ENDED = "ended"


@dataclass(slots=True)
class Rebuild:
    """Layers of one sequence that lag behind: to be brought from ``done`` to ``stop`` positions.

    ``source`` has the log of what ``through`` begins with; None: the tokens, at layer 0. ``num_lost`` of these layers
    really lag, the others lie between them and the log.
    """

    source: str | None
    through: LayerRange
    num_lost: int
    stop: int
    start: int
    done: int

    @property
    def cost(self) -> int:
        """Layers times positions to be computed."""
        return (self.stop - self.done) * len(self.through)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt. Lengths count tokens of the whole sequence, prompt included."""

    id: int
    request: Request
    index: int
    seed: int
    tokens: list[int]
    limit: int  # the most positions it can come to hold
    state: SequenceState = SequenceState.WAITING
    committed: int = 0  # tokens in the journal: what a client may see
    sent: int = 0  # tokens sent to the attached client
    delivered: int = 0  # tokens that the client has acknowledged
    scheduled: int = 0  # positions dispatched in this epoch
    kv: int = 0  # positions whose keys and values every stage has acknowledged
    told: bool = False  # the stages of this epoch know the sequence
    rebuilds: list[Rebuild] = field(default_factory=list)  # layers that must come level before it goes on
    truncate: bool = False  # the next step must cut the stages to ``kv`` first
    fork_of: int | None = None  # its first ``kv`` positions are to be copied from this sequence when it is opened
    reason: FinishReason | None = None
    detail: str = ""
    blocks: int = 0  # room that is kept for it in the stages
    stay: int = 0  # how often it has left them without an end: what was sent before then is known by a smaller number
    num_preempted: int = 0  # how often it had to give its room to another
    num_deaths: int = 0  # worker deaths at which it was in flight
    num_recomputed: int = 0
    num_passed: int = 0  # how many came later and were let in while it was the first to wait for room
    passed_since: float | None = None
    unfit_s: float = 0.0  # for how long it has waited while plans served that could not hold it even alone
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    finish_sent: bool = False
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    sent_at: array[float] = field(default_factory=lambda: array("d"))  # when each generated token was first sent

    @property
    def priority(self) -> int:
        return self.request.submit.priority

    @property
    def rank(self) -> tuple[int, int]:
        """Who has the better claim to room: the higher class, then who came first."""
        return (self.request.submit.priority, -self.id)

    @property
    def most_to_come(self) -> int:
        """Tokens that it may still grow by."""
        return self.limit - len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.submit.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sampled(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens that the next steps must carry: none as long as layers are being rebuilt."""
        return 0 if self.rebuilds else len(self.tokens) - self.scheduled

    @property
    def in_flight(self) -> bool:
        return self.scheduled > self.kv

    @property
    def is_decoding(self) -> bool:
        return self.scheduled >= self.num_prompt and self.pending == 1

    def cut_to(self, position: int) -> None:
        """What lies beyond ``position`` in the stages no longer counts (a new epoch, or room given back)."""
        if self.scheduled > position:
            self.num_recomputed += 1
        self.kv = self.scheduled = position
        self.told = False
        self.truncate = True
        self.fork_of = None
        self.rebuilds.clear()

    def wait_again(self) -> None:
        """It holds nothing in the stages any more. What of it is still in the pipe belongs to an earlier stay."""
        self.cut_to(0)
        self.truncate = False
        self.stay += 1
        self.state = SequenceState.WAITING

    def timing(self, now: float) -> Timing:
        """A sequence without a token has no time of a first one: 0. One that never started was queued all the time."""
        arrived = self.request.arrived_at

        def since_arrival(moment: float | None) -> float:
            return max(0.0, (now if moment is None else moment) - arrived)

        return Timing(
            since_arrival(self.started_at),
            0.0 if self.first_token_at is None else since_arrival(self.first_token_at),
            since_arrival(self.ended_at),
            self.num_recomputed,
        )


@dataclass(slots=True, eq=False)
class Request:
    submit: Submit
    client: bytes | None
    arrived_at: float
    deadline_at: float | None
    tenant: str = ""  # on whose account it is computed
    sequences: list[Sequence] = field(default_factory=list)
    accepted: bool = False
    detached_at: float | None = None

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def ended(self) -> bool:
        return all(s.state is SequenceState.ENDED for s in self.sequences)

    @property
    def ended_at(self) -> float:
        return max(s.ended_at or 0.0 for s in self.sequences)

    @property
    def fully_delivered(self) -> bool:
        return self.ended and all(s.finish_sent and s.delivered >= s.sampled for s in self.sequences)


class WorkerState(enum.Enum):
    MEMBER = "member"  # may be planned with
    REFUSED = "refused"  # it said that it can't carry out the last plan it was asked to; its reason is kept
    LEAVING = "leaving"  # to be released as soon as the plan can do without it
    LEFT = "left"  # released in good order
    OUT = "out"  # dead, frozen, hung or gone: fenced; it must say Hello again


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's process, as the broker knows it."""

    hello: Hello
    peer: bytes
    joined_at: float
    state: WorkerState = WorkerState.MEMBER
    refusals: list[LayerRange] = field(default_factory=list)  # what it is not asked to load until ``retry_at``
    retry_at: float = 0.0
    num_retries: int = 0
    wants_to_leave: bool = False  # it said so: when its connection closes, that is no loss
    called_at: float | None = None  # when it was last told to say Hello again, or to go
    reason: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    pace: float = 1.0  # how many times longer its steps take than it measured at join, as far as that was seen
    planned: LayerRange | None = None  # what the last plan that served gave it
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def layers(self) -> LayerRange | None:
        """What it has loaded, as far as is known."""
        return self.planned if self.planned is not None else self.hello.held_layers

    @property
    def is_gone(self) -> bool:
        """Nothing is planned with it, and nothing it says counts."""
        return self.state in (WorkerState.LEFT, WorkerState.OUT)

    def refuse(self, layers: LayerRange, reason: str, now: float) -> None:
        """It can't load these layers; it will be asked again, the later the more often that was in vain."""
        if not self.refusals:
            self.num_retries += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (self.num_retries - 1))
        self.refusals.append(layers)
        self.state = WorkerState.REFUSED
        self.reason = reason

    def refuses(self, layers: LayerRange) -> bool:
        """It said that it can't load these layers, or some of them; or other ones, no more than these are."""
        return any((layers.first <= r.first and r.stop <= layers.stop) or len(r) <= len(layers) for r in self.refusals)

    def forget_refusals(self) -> None:
        self.refusals.clear()
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER

    def comply(self) -> None:
        """It can load what it was asked to."""
        if not self.refusals:
            self.num_retries = 0
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER


@dataclass(frozen=True, slots=True)
class StagePlan:
    incarnation: str
    name: str
    layers: LayerRange
    endpoint: str
    weight_bytes: int
    host: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which worker holds which layers, in the order of the pipeline. ``why`` explains it in sentences."""

    epoch: int
    stages: tuple[StagePlan, ...]
    objective: str
    why: tuple[str, ...]
    forecast: Forecast | None = None

    @property
    def shares_cores(self) -> bool:
        """All stages compute on the cores of one machine: whoever computes takes from the others."""
        return len({stage.host for stage in self.stages}) == 1 and all(s.device == "cpu" for s in self.stages)

    @property
    def commits_on_write(self) -> bool:
        """Keys and values take memory as they are written. Elsewhere than on CPUs they take all that was reserved."""
        return all(stage.device == "cpu" for stage in self.stages)

    @property
    def members(self) -> frozenset[str]:
        return frozenset(stage.incarnation for stage in self.stages)

    def stage_of(self, incarnation: str) -> StagePlan | None:
        return next((s for s in self.stages if s.incarnation == incarnation), None)


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
    deadline: float = 0.0
    changed_at: float = 0.0
    waits_for: str = "a worker: none has joined yet"
    gauge: PlanGauge = field(default_factory=PlanGauge)  # how the current plan does

    @property
    def serving(self) -> bool:
        """Steps may be dispatched: a plan is in force, and no fence is up."""
        return self.current is not None and self.phase in (PlanPhase.SERVING, PlanPhase.PREPARING)

    def heard_of(self, epoch: int) -> None:
        """Somebody knows this epoch already (from a broker before this one): the next must be above it."""
        self.epoch = max(self.epoch, epoch)
        self.written = max(self.written, epoch)

    @property
    def kv_blocks(self) -> int:
        return min((p.kv_capacity for p in self.capacity.values()), default=0) // BLOCK

    @property
    def max_sequences(self) -> int:
        return min((p.max_sequences for p in self.capacity.values()), default=0)


@dataclass(slots=True)
class Flight:
    """A step in the pipe."""

    sequences: tuple[tuple[Sequence, int], ...]  # with the position each row ends at
    sent_at: float
    num_tokens: int = 0
    stays: dict[int, int] = field(default_factory=dict)  # sequence -> its ``stay`` when the step was sent


@dataclass(slots=True)
class Gauges:
    """What the scheduler decided last, for whoever looks."""

    mode: str = ""  # in force: "batch" or "overlapped"
    depth: int = 0  # steps that may be in flight
    budget: int = 0  # tokens that a step may have beside running answers' next ones
    prefill: int = 0  # of those, tokens of prompts
    throttle: str = "none"  # what holds prompts back: "none", "pending" (shared out over the pipe), "kv" or "time"


@dataclass(slots=True)
class State:
    """Everything that the broker knows. Only ``core`` and its parts touch it."""

    manifest: Manifest | None = None
    assets: dict[str, bytes] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    waiting: Queue = field(default_factory=Queue)
    running: Running = field(default_factory=Running)
    hopeless: list[Sequence] = field(default_factory=list)  # whose deadline can't be kept any more: to be ended
    pace: Pace = field(default_factory=Pace)
    gauges: Gauges = field(default_factory=Gauges)
    to_release: list[int] = field(default_factory=list)
    to_retire: list[SequencePosition] = field(default_factory=list)
    prefix: PrefixCache = field(default_factory=lambda: PrefixCache(enabled=False))
    workers: dict[str, Worker] = field(default_factory=dict)
    book: PlanBook = field(default_factory=PlanBook)
    flights: dict[int, Flight] = field(default_factory=dict)
    next_step: int = 1
    next_sequence: int = 1
    counters: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    now: float = 0.0  # of the event that is being handled

    def leave_stages(self, sequence: Sequence) -> None:
        """A running sequence ended: its room goes back with the next step, or its beginning is kept for others."""
        self.running.remove(sequence)
        sequence.rebuilds.clear()
        self.unfork(sequence)
        retired = self.prefix.retire(sequence.id)
        if retired is None:
            self.to_release.append(sequence.id)
        else:
            self.to_retire.append(SequencePosition(sequence.id, retired.num_blocks * BLOCK))

    def give_way(self, sequence: Sequence) -> None:
        """A running sequence gives all its room back with the next step, and waits to be computed again."""
        self.running.remove(sequence)
        self.unfork(sequence)
        self.prefix.index.forget(sequence.id)
        self.to_release.append(sequence.id)
        sequence.wait_again()
        sequence.num_preempted += 1
        self.waiting.add(sequence)
        self.count("preemptions")

    def unfork(self, sequence: Sequence) -> None:
        """It will not begin as a copy after all, or has done so."""
        if sequence.fork_of is not None:
            self.prefix.unpin(sequence.fork_of)
            sequence.fork_of = None

    def empty_stages(self) -> None:
        """A new epoch: nothing is in the pipe, and the stages keep only what they are told to."""
        self.flights.clear()
        self.to_release.clear()
        self.to_retire.clear()
        self.prefix.clear()
        self.waiting.unpark()

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount
