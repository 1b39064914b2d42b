"""A broker's core on a bench: a journal, workers, stages and clients that do what a test says, and rules that are
checked after every event.

The journal answers at once unless its kind of write is in ``held``; then the test feeds ``write_out``. Workers answer
``Prepare``, ``Activate`` and ``KeepWarm`` unless they are in ``mute``. Steps wait in ``pipe`` until the test finishes
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from swarm.broker.actions import (
    Action,
    ConnectPipeline,
    Dispatch,
    FinishJournalRewrite,
    SendToClient,
    SendToWorker,
    Solve,
    WriteAcceptance,
    WriteAdapters,
    WriteEnd,
    WriteEpoch,
    WriteLog,
    WriteTokens,
)
from swarm.broker.core import BrokerCore, CoreSettings
from swarm.broker.events import (
    AcceptanceWritten,
    ClientAccount,
    ClientBlocked,
    ClientMessageReceived,
    EpochWritten,
    Event,
    HeartbeatReceived,
    RequestRead,
    Solved,
    StepFinished,
    Tick,
    TokensWritten,
    WorkerDisconnected,
    WorkerMessageReceived,
)
from swarm.broker.journal import WriteConfirmed, confirm
from swarm.broker.planning.plan_query import answer_query
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.requests.tokens import WINDOW
from swarm.broker.speculation.proposer import Proposer
from swarm.broker.state import Sequence as BrokerSequence
from swarm.broker.state import SequenceState, State
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.broker.state.workers import Judgement
from swarm.broker.steps.kv_capacity import MAX_PREEMPTIONS
from swarm.broker.steps.scheduler import SchedulerSettings, max_steps_in_flight
from swarm.params import SamplingParams
from swarm.testing import fake_manifest
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import (
    NO_LINEAGE,
    Accepted,
    Activate,
    Activated,
    Attach,
    ClientMessage,
    Failure,
    Finished,
    Heartbeat,
    HeldSequence,
    Hello,
    Hop,
    KeepWarm,
    KeptWarm,
    LayerCost,
    LayerRange,
    Lineage,
    LinkCost,
    LogRange,
    Manifest,
    Order,
    PlanCommand,
    Prepare,
    Prepared,
    Query,
    RangePosition,
    Report,
    Sampled,
    SequencePosition,
    ServerMessage,
    Step,
    StepDone,
    StopWorker,
    Submit,
    TokenLogprob,
    Tokens,
    Welcome,
    WorkerMessage,
    layers_of,
    to_ranges,
)
from swarm.wire.schema import schema
from swarm.wire.versions import VERSIONS

MIB = 1 << 20
ROOMY = 200 * MIB
TICK_S = 0.1
CLIENT = b"client"
TOKEN = 7  # what a step samples unless the test says otherwise; no end of sequence


def settings(**parts: object) -> CoreSettings:
    """Everything by default, a short settling time; ``parts`` replaces whole groups."""
    defaults: dict[str, object] = {"plan": ReconfigurationSettings(settle_s=0.0)}
    return CoreSettings(heartbeat_endpoint="beats", data_endpoint="data", **(defaults | parts))  # type: ignore[arg-type]


def submit(request_id: str = "r", num_prompt: int = 3, **fields: object) -> Submit:
    """A request of ``num_prompt`` tokens; what is not a field of Submit is a sampling parameter."""
    own = {
        name: fields.pop(name)
        for name in ("seed", "deadline_s", "detached", "keep_s", "hops", "priority", "prompt", "tenant", "speculation")
        if name in fields
    }
    defaults: dict[str, object] = {"prompt": tuple(1 + i % 90 for i in range(num_prompt)), "seed": 1}
    params = SamplingParams(**({"max_tokens": 8} | fields))  # type: ignore[arg-type]
    return Submit(request_id=request_id, params=params, **(defaults | own))  # type: ignore[arg-type]


def beat_of(incarnation: str, **fields: object) -> Heartbeat:
    """The beat of a worker that has nothing to do, unless a test says otherwise."""
    values: dict[str, object] = {
        "incarnation": incarnation,
        "progress": 0,
        "state": "idle",
        "blocked_on": "",
        "since_s": 0.0,
        "asleep_s": 0.0,
        "loop_lag_s": 0.0,
        "memory_bytes": 0,
        "kv_used": 0,
        "kv_capacity": 0,
    }
    return Heartbeat(**(values | fields))  # type: ignore[arg-type]


@dataclass(slots=True)
class FakeWorker:
    """What a worker would know: its range, and how far it holds each sequence."""

    name: str
    incarnation: str
    memory_bytes: int = ROOMY
    kv_capacity: int = 4096
    max_sequences: int = 64
    device: str = "cpu"
    manifest: Manifest = field(default_factory=fake_manifest)
    prepare: Prepare | None = None
    kept: tuple[LayerRange, ...] = ()
    host: str = ""
    kernels: str = ""
    bits: str = ""
    key: str | None = None
    ticket: str = ""
    kv_endpoint: str = ""
    spill_from: int = 0
    costs: tuple[LayerCost, ...] = ()
    link: LinkCost | None = None
    copies: tuple[HeldSequence, ...] = ()  # of other workers' keys and values, in its next report
    share_unit: int = 0
    share_mappings: int = 1000
    held: dict[int, int] = field(default_factory=dict)  # lies, if a test wants it to
    logged: dict[int, int] = field(default_factory=dict)  # sequence -> positions in the log of what it sent
    epoch: int = 0
    lineage: Lineage = NO_LINEAGE
    progress: int = 0

    @property
    def peer(self) -> bytes:
        return self.incarnation.encode()

    @property
    def own_bits(self) -> str:
        return self.bits or self.kernels or f"of {self.incarnation}"

    def hello(self, **changes: object) -> Hello:
        fields: dict[str, object] = {
            "epoch": self.epoch,
            "lineage": self.lineage,
            "name": self.name,
            "incarnation": self.incarnation,
            "pid": 1,
            "link": self.link,
            "host": self.host or self.name,  # each on a machine of its own, unless a test says otherwise
            "wire_versions": VERSIONS,
            "schema": schema(),
            "device": self.device,
            "dtype": "float32",
            "cores": 1,
            "endpoint": f"tcp://{self.incarnation}",
            "memory_bytes": self.memory_bytes,
            "costs": self.costs,
            "manifest": self.manifest,
            "held_layers": None,
            "held": (),
            "logs": (),
            "kept": self.kept,
            "bits": self.own_bits if self.kept else "",
            "key": self.key,
            "ticket": self.ticket,
            "kv_endpoint": self.kv_endpoint,
            "spill_from": self.spill_from,
        }
        return Hello(**(fields | changes))  # type: ignore[arg-type]

    def prepared(self, epoch: int) -> Prepared:
        return Prepared(
            epoch=epoch,
            incarnation=self.incarnation,
            kv_capacity=self.kv_capacity,
            max_sequences=self.max_sequences,
            load_s=0.0,
            warm_up_s=0.0,
            resident_bytes=0,
            kernels=self.kernels or f"of {self.incarnation}; exact",
            bits=self.own_bits,
            share_unit=self.share_unit,
            share_mappings=self.share_mappings,
        )

    def activated(self, order: Activate) -> Activated:
        """It holds what it is told to keep, unless ``held`` says otherwise."""
        assert self.prepare is not None
        layers = self.prepare.layers
        positions = {item.sequence: item.position for item in order.live}
        held = tuple(
            HeldSequence(sequence, (RangePosition(layers, self.held.get(sequence, position)),))
            for sequence, position in positions.items()
        )
        logs = tuple(LogRange(sequence, layers.stop, 0, stop) for sequence, stop in self.logged.items())
        room = layers_of(self.prepare.standby) - layers_of((layers,))
        self.kept = to_ranges(layers_of(self.kept) & room)
        return Activated(
            epoch=order.epoch,
            incarnation=self.incarnation,
            held=held,
            logs=logs,
            kept=self.kept,
            copies=self.copies,
        )


@dataclass(slots=True)
class Bench:
    """See the module's text. ``log`` collects every action in order; ``take`` empties it."""

    settings: CoreSettings = field(default_factory=settings)
    past: JournalSnapshot | None = None
    now: float = 0.0
    proposers: tuple[Proposer, ...] = ()
    core: BrokerCore = field(init=False)
    held: set[type] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)  # names that don't beat
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    pipe: deque[Step] = field(default_factory=deque)
    pending: deque[WriteConfirmed] = field(default_factory=deque)
    log: list[Action] = field(default_factory=list)
    watch: Watch = field(init=False)
    _due: deque[Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.core = BrokerCore(self.settings, self.now, self.past, proposers=self.proposers)
        self.watch = Watch(self.core.state, self.settings)
        if self.past is not None:
            self.watch.remember(self.past)

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def epoch(self) -> int:
        assert self.state.plans.current is not None
        return self.state.plans.current.epoch

    def judgements_of(self, name: str) -> Judgement:
        return self.core.judgements(self.now)[self.workers[name].incarnation]

    # --- feeding -----------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Action]:
        """The core's actions for this event alone; what follows from them at once is done too, and logged."""
        actions = self._handle(event)
        while self._due:
            self._handle(self._due.popleft())
        return actions

    def say(self, message: ClientMessage, client: bytes = CLIENT, account: ClientAccount | None = None) -> list[Action]:
        return self.feed(ClientMessageReceived(client, message, account))

    def tell(self, name: str, message: WorkerMessage) -> list[Action]:
        return self.feed(WorkerMessageReceived(self.workers[name].peer, message))

    def tick(self, after_s: float = TICK_S) -> list[Action]:
        """Let time pass in steps that no health check minds: everybody beats, then the clock ticks."""
        until, actions = self.now + after_s, []
        while self.now < until - 1e-9:
            self.now = min(until, self.now + TICK_S)
            for name in self.workers:
                if name not in self.silent:
                    self.beat(name)
            actions += self.feed(Tick())
        return actions

    def beat(self, name: str, **fields: object) -> list[Action]:
        worker = self.workers[name]
        beat = beat_of(worker.incarnation, **({"progress": worker.progress} | fields))
        return self.feed(HeartbeatReceived(beat, worker.key or ""))

    def write_out(self) -> list[Action]:
        """The journal has written everything that was held back."""
        actions: list[Action] = []
        while self.pending:
            actions += self.feed(self.pending.popleft())
        return actions

    def _handle(self, event: Event) -> list[Action]:
        self.watch.before(event)
        actions = self.core.handle(event, self.now)
        self.log += actions
        for action in actions:
            self._perform(action)
        self.watch.after(actions)
        return actions

    def _perform(self, action: Action) -> None:
        match action:
            case Dispatch(step):
                self.pipe.append(step)
            case ConnectPipeline():
                self.pipe.clear()
            case SendToWorker(peer, order):
                self._obey(peer, order)
            case (
                WriteAcceptance() | WriteTokens() | WriteEnd() | WriteEpoch() | WriteAdapters() | FinishJournalRewrite()
            ):
                (self.pending if type(action) in self.held else self._due).append(confirm(action))
            case Solve(number, question):
                self._due.append(Solved(number, answer_query(question)))
            case _:
                pass

    def ask(self, query: Query | StopWorker | PlanCommand) -> Report:
        """The answer, once what it takes has been found."""
        before = len(self.log)
        self.say(query)
        (report,) = said(self.log[before:], Report)
        assert isinstance(report, Report)
        return report

    def _obey(self, peer: bytes, order: Order) -> None:
        worker = next((w for w in self.workers.values() if w.peer == peer), None)
        if worker is None:
            return
        worker.epoch = max(worker.epoch, order.epoch)
        if isinstance(order, Welcome):
            worker.lineage = order.lineage
        if isinstance(order, Prepare):
            worker.prepare = order
        if worker.name in self.mute:
            return
        if isinstance(order, Prepare):
            self._answer(peer, worker.prepared(order.epoch), order)
        elif isinstance(order, Activate):
            self._answer(peer, worker.activated(order), order)
        elif isinstance(order, KeepWarm):
            worker.kept = order.layers
            kept = KeptWarm(
                epoch=order.epoch,
                incarnation=worker.incarnation,
                layers=order.layers,
                wanted=order.layers,
                load_s=0.1,
                bits=worker.own_bits,
            )
            self._answer(peer, kept, order)

    def _answer(self, peer: bytes, message: WorkerMessage, order: Order) -> None:
        self._due.append(WorkerMessageReceived(peer, msgspec.structs.replace(message, lineage=order.lineage)))

    # --- scenes ------------------------------------------------------------------------------------------------------

    def add(self, name: str, incarnation: str = "", **fields: object) -> FakeWorker:
        """A worker process starts; it has not said Hello yet."""
        worker = FakeWorker(name, incarnation or f"{name}.1", **fields)  # type: ignore[arg-type]
        self.workers[name] = worker
        return worker

    def join(self, *names: str, **fields: object) -> list[Action]:
        actions: list[Action] = []
        for name in names:
            self.add(name, **fields)
            actions += self.tell(name, self.workers[name].hello())
        return actions

    def lose(self, name: str) -> list[Action]:
        """A worker's process dies: its connection closes."""
        return self.feed(WorkerDisconnected(self.workers.pop(name).peer))

    def serve(self, num_workers: int = 2, **fields: object) -> Bench:
        """Workers w0, w1, … join and the swarm serves, standby layers warm."""
        self.join(*(f"w{i}" for i in range(num_workers)), **fields)
        self.tick()
        self.tick()
        assert self.state.plans.is_serving, self.state.plans
        self.take()
        return self

    def take(self) -> list[Action]:
        """What has been asked for since the last time, notes aside."""
        found = [action for action in self.log if not isinstance(action, WriteLog)]
        self.log.clear()
        return found

    def finish(
        self,
        step: Step | None = None,
        token: int = TOKEN,
        tokens: dict[int, int] | None = None,
        failed: Iterable[Failure] = (),
        hops: tuple[Hop, ...] = (),
    ) -> list[Action]:
        """The last stage answers the oldest step (or this one)."""
        if step is None:
            step = self.pipe.popleft()
        elif step in self.pipe:
            self.pipe.remove(step)
        for worker in self.workers.values():
            worker.progress += 1
        failed = tuple(failed)
        done = done_of(step, token, tokens or {}, {f.sequence for f in failed}, hops)
        return self.feed(StepFinished(msgspec.structs.replace(done, failed=failed)))

    def verify(self, answer: Mapping[int, Sequence[int]], step: Step | None = None) -> list[Action]:
        """The last stage answers the oldest step (or this one) as if these were the sequences' answers: it verifies
        proposed tokens."""
        if step is None:
            step = self.pipe.popleft()
        elif step in self.pipe:
            self.pipe.remove(step)
        for worker in self.workers.values():
            worker.progress += 1
        return self.feed(StepFinished(verified(step, self.state, answer)))

    def run_dry(self, limit: int = 10_000) -> None:
        """Finish steps until none is under way."""
        for _ in range(limit):
            if not self.pipe:
                return
            self.finish()
        raise AssertionError("the pipe never runs dry")

    def sequence(self, request_id: str = "r", index: int = 0) -> BrokerSequence:
        return self.state.requests[request_id].sequences[index]


def holds(
    sequence: int,
    position: int,
    layers: LayerRange,
    tokens: tuple[int, ...] = (1, 2, 3, *[TOKEN] * 16),
    limit: int = 19,
) -> HeldSequence:
    """What a worker says of a sequence whose keys and values it has computed from these tokens."""
    return HeldSequence(sequence, (RangePosition(layers, position),), prefix_digests(tokens, position), limit)


def done_of(step: Step, token: int, tokens: dict[int, int], without: set[int], hops: tuple[Hop, ...]) -> StepDone:
    """What the last stage answers to a step that went well."""
    return StepDone(
        epoch=step.epoch,
        step=step.step,
        lineage=step.lineage,
        kv=tuple(SequencePosition(r.sequence, r.start + r.count) for r in step.rows),
        sampled=tuple(
            Sampled(
                r.sequence,
                r.start + r.count,
                tokens.get(r.sequence, token),
                (TokenLogprob(tokens.get(r.sequence, token), -0.5),),
            )
            for r in step.rows
            if r.sample and r.sequence not in without
        ),
        failed=(),
        hops=hops,
    )


def verified(step: Step, state: State, answer: Mapping[int, Sequence[int]]) -> StepDone:
    """What the last stage answers to a step with proposals, by the rules: it stops at the first token that differs."""
    proposed = {} if step.proposed is msgspec.UNSET else {tail.sequence: tail.count for tail in step.proposed}
    kv: list[SequencePosition] = []
    sampled: list[Sampled] = []
    begin = 0
    for r in step.rows:
        tokens, begin = step.tokens[begin : begin + r.count], begin + r.count
        first = r.count - proposed.get(r.sequence, 0)  # number of certain tokens
        position = r.start + first
        kv.append(SequencePosition(r.sequence, position))
        if not r.sample:
            continue
        num_prompt = state.sequences[r.sequence].num_prompt
        for guess in (*tokens[first:], None):
            token = answer[r.sequence][position - num_prompt]
            sampled.append(Sampled(r.sequence, position, token, (TokenLogprob(token, -0.5),)))
            kv[-1] = SequencePosition(r.sequence, position)
            if token != guess:
                break
            position += 1
    return StepDone(
        epoch=step.epoch,
        step=step.step,
        lineage=step.lineage,
        kv=tuple(kv),
        sampled=tuple(sampled),
        failed=(),
        hops=(),
    )


def said(actions: Sequence[Action], kind: type[ServerMessage] | None = None) -> list[ServerMessage]:
    """What clients are told."""
    found = [a.message for a in actions if isinstance(a, SendToClient)]
    return [m for m in found if kind is None or isinstance(m, kind)]


def orders(actions: Sequence[Action], kind: type[Order] | None = None) -> list[tuple[str, Order]]:
    """(incarnation, order) in order."""
    found = [(a.peer.decode(), a.message) for a in actions if isinstance(a, SendToWorker)]
    return [(peer, m) for peer, m in found if kind is None or isinstance(m, kind)]


def steps(actions: Sequence[Action]) -> list[Step]:
    return [a.step for a in actions if isinstance(a, Dispatch)]


def row(step: Step) -> list[tuple[int, int, int]]:
    """(sequence, start, count) of each row."""
    return [(r.sequence, r.start, r.count) for r in step.rows]


def ranges(bench: Bench) -> dict[str, LayerRange]:
    assert bench.state.plans.current is not None
    return {s.name: s.layers for s in bench.state.plans.current.stages}


@dataclass(slots=True)
class Watch:
    """What must hold at every moment, whoever says what."""

    state: State
    settings: CoreSettings
    epoch_written: int = 0
    accepted: set[str] = field(default_factory=set)
    written: dict[int, int] = field(default_factory=dict)  # sequence -> tokens in the journal
    sent: dict[tuple[str, int], int] = field(default_factory=dict)
    last_step: int = 0
    highest_epoch: int = 0

    def remember(self, past: JournalSnapshot) -> None:
        """What the journal has from before counts as written."""
        self.epoch_written = self.highest_epoch = past.epoch
        for request in past.requests:
            self.accepted.add(request.submit.request_id)
            for each in request.sequences:
                self.written[each.id] = len(request.submit.prompt) + len(each.tokens)

    def before(self, event: Event) -> None:
        match event:
            case EpochWritten(epoch):
                self.epoch_written = max(self.epoch_written, epoch)
            case WorkerMessageReceived(_, Hello(epoch=epoch)):
                self.epoch_written = max(self.epoch_written, epoch)  # a broker before this one wrote it
            case AcceptanceWritten(request_id):
                self.accepted.add(request_id)
            case TokensWritten(committed):
                self.written |= dict(committed)
            case ClientMessageReceived(_, Attach() as attach):
                for index in range(len(attach.next_index)):
                    self.sent.pop((attach.request_id, index), None)
            case RequestRead(request_id):
                self.sent = {place: num for place, num in self.sent.items() if place[0] != request_id}
            case ClientBlocked():
                self.sent.clear()  # what went out last did not arrive
            case ClientMessageReceived(_, Submit() as again):
                for index in range(again.params.n):
                    self.sent.pop((again.request_id, index), None)
            case _:
                pass

    def after(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendToClient(_, message):
                    self._check_said(message)
                case SendToWorker(_, order):
                    assert order.epoch <= self.epoch_written, f"epoch {order.epoch} is announced before it is written"
                case Dispatch(step):
                    self._check_step(step)
                case _:
                    pass
        check_state(self.state, self.settings)
        assert self.state.plans.epoch >= self.highest_epoch, "an epoch fell"
        self.highest_epoch = self.state.plans.epoch

    def _check_said(self, message: ServerMessage) -> None:
        match message:
            case Accepted(request_id=request_id):
                assert request_id in self.accepted, "accepted before it is in the journal"
            case Tokens(request_id=request_id, index=index, start=start, ids=ids):
                assert ids, "an empty Tokens message"
                expected = self.sent.get((request_id, index))
                assert expected in (None, start), f"{request_id}[{index}]: token {start} after {expected}"
                self.sent[request_id, index] = start + len(ids)
                sequence = self.state.requests[request_id].sequences[index]
                assert sequence.num_prompt + start + len(ids) <= self.written[sequence.id], "sent before it is written"
            case Finished(request_id=request_id, index=index):
                assert self.sent.get((request_id, index)) != -1, f"{request_id}[{index}] ended twice"
                self.sent[request_id, index] = -1
            case _:
                pass

    def _check_step(self, step: Step) -> None:
        if step.replay:
            assert step.step == 0, "replays are none of the numbered steps"
        else:
            assert step.step == self.last_step + 1, "steps are numbered without a gap"
            self.last_step = step.step
        assert sum(r.count for r in step.rows) == len(step.tokens)
        assert len({r.sequence for r in step.rows}) == len(step.rows), "a sequence twice in one step"
        assert step.rows or step.release or step.retire or step.open or step.image_parts, "an empty step"
        assert sum(r.count for r in step.rows) <= self.settings.scheduler.step_tokens


def check_state(state: State, of: CoreSettings) -> None:
    """The state's own rules, and those of the settings."""
    assert list(state.check()) == []
    assert all(s.sent - s.delivered <= WINDOW for s in state.sequences.values())
    plan = state.plans.current
    if plan is None or not state.plans.is_serving:
        return
    assert len(state.in_flight) <= max_steps_in_flight(of.scheduler.mode, len(plan.stages))
    assert all(s.num_preempted <= MAX_PREEMPTIONS for s in state.sequences.values())
    assert len(state.running) <= of.scheduler.max_running
    decoding = [
        s.id for f in state.in_flight.values() for s, end in f.sequences if end > s.num_prompt and _alone(s, end)
    ]
    assert len(decoding) == len(set(decoding)), "a decode in two micro-batches"


def _alone(sequence: BrokerSequence, end: int) -> bool:
    """This row is the sequence's newest token: nothing may follow it before it is answered."""
    return sequence.state is SequenceState.RUNNING and end == sequence.sampled


def request_settings(**fields: object) -> RequestSettings:
    return RequestSettings(**fields)  # type: ignore[arg-type]


def scheduling(**fields: object) -> CoreSettings:
    return settings(scheduler=SchedulerSettings(**fields))  # type: ignore[arg-type]
