"""The broker's core: ``handle(event, now) -> actions``. The only door to the state.

It decides; the shell (``service``) acts. It knows no sockets, no clock, no chance: the same events at the same times
give the same actions, in production, in unit tests and in the simulation.

Parts, each with its own rules: ``requests`` (the client door), ``scheduler`` (who joins the next step), ``planning``
(who holds which layers), ``health`` (who is alive). After every event the core fills the pipe: as many steps as may be
in flight are dispatched at once, which is why no part needs to ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker import reports, scheduler
from swarm.broker.actions import Action, Dispatch, Note, OrderWorker, SayClient
from swarm.broker.events import (
    AcceptanceWritten,
    AssetArrived,
    BeatHeard,
    ClientSaid,
    ClientUnreachable,
    EpochWritten,
    Event,
    StepFinished,
    Tick,
    TokensWritten,
    WorkerDisconnected,
    WorkerSaid,
)
from swarm.broker.health import HealthSettings, Judgement, Pulse, Verdict, judge
from swarm.broker.hosts import Hosts
from swarm.broker.partition import DEVICES, is_supported
from swarm.broker.planning import QUARANTINE_AFTER, Planner, PlanSettings
from swarm.broker.prefix import PrefixCache
from swarm.broker.requests import Requests, RequestSettings
from swarm.broker.scheduler import SchedulerSettings
from swarm.broker.state import SequenceState, State, Worker, WorkerState
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Activated,
    Alive,
    AssetPart,
    Attach,
    Beat,
    Cancel,
    ClientMessage,
    Denied,
    Describe,
    Description,
    Dismiss,
    Fence,
    GetAsset,
    Hello,
    HostDone,
    HostHello,
    Join,
    Leaving,
    LoadProgress,
    Prepared,
    Query,
    Refused,
    Rejoin,
    Report,
    Stats,
    StepDone,
    Stop,
    StopWorker,
    Submit,
    Trouble,
    Welcome,
    WorkerMessage,
)
from swarm.wire.tensors import pack_bytes

# A gap between two events longer than this is the broker's own pause (the shell ticks far more often).
PAUSE_S = 0.25
LOST_STEP_S = 1.0
REJOIN_AGAIN_S = 2.0  # an order may be lost; asking at every beat would make the worker join over and over


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What the core needs to know; the endpoints are those that workers are told."""

    beat_endpoint: str
    data_endpoint: str
    version: str = "0"
    beat_interval_s: float = 0.1
    lease_s: float = 10.0
    prefix_cache: bool = True
    requests: RequestSettings = field(default_factory=RequestSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    health: HealthSettings = field(default_factory=HealthSettings)


class BrokerCore:
    """See the module's text."""

    def __init__(self, settings: BrokerSettings, now: float) -> None:
        self.settings = settings
        self.state = State(started_at=now, prefix=PrefixCache(enabled=settings.prefix_cache))
        self._out: list[Action] = []
        self._requests = Requests(self.state, settings.requests, self._out)
        self._planner = Planner(self.state, settings.plan, settings.data_endpoint, self._out)
        self._hosts = Hosts(self._out)
        self._pulses: dict[str, Pulse] = {}
        self._usual_step_s = 0.0  # moving average of a step's way through all stages
        self._last_event_at = now
        self._leases_renewed_at = now

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one fact, return what is to be done, in order."""
        self._notice_own_pause(now)
        self._route(event, now)
        self._fill_pipe(now)
        actions = self._out[:]
        self._out.clear()
        return actions

    def _route(self, event: Event, now: float) -> None:
        match event:
            case StepFinished(done):
                self._step_finished(done, now)
            case TokensWritten(committed):
                self._requests.committed(committed)
            case BeatHeard(beat):
                self._beat(beat, now)
            case ClientSaid(client, message):
                self._client_said(client, message, now)
            case WorkerSaid(peer, message):
                self._worker_said(peer, message, now)
            case AcceptanceWritten(request_id):
                self._requests.accepted(request_id)
            case EpochWritten(epoch):
                self._planner.epoch_written(epoch, now)
            case WorkerDisconnected(peer):
                self._disconnected(peer, now)
            case ClientUnreachable(client):
                self._requests.unreachable(client, now)
                self._hosts.unreachable(client)
            case AssetArrived():
                self._asset_arrived(event)
            case Tick():
                self._tick(now)

    def _fill_pipe(self, now: float) -> None:
        while (step := scheduler.next_step(self.state, self.settings.scheduler, now)) is not None:
            self.state.count("steps")
            self.state.count("rows", len(step.rows))
            self.state.count("positions", len(step.tokens))
            self._out.append(Dispatch(step))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step_finished(self, done: StepDone, now: float) -> None:
        current = self.state.book.current
        flight = self.state.flights.pop(done.step, None) if current and current.epoch == done.epoch else None
        if flight is None:
            self.state.count("stale_steps")
            return
        self._take_step_time(now - flight.sent_at)
        self._acknowledge(done)
        self._requests.sampled(done.sampled, done.hops, now)
        for failure in done.failed:
            sequence = self.state.sequences.get(failure.sequence)
            if sequence is not None:
                self._requests.end(sequence, "failed", now, failure.reason)

    def _acknowledge(self, done: StepDone) -> None:
        """Every stage has done these rows: their keys and values are everywhere."""
        for sequence_id, position in ((k.sequence, k.position) for k in done.kv):
            sequence = self.state.sequences.get(sequence_id)
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                sequence.kv = min(max(sequence.kv, position), sequence.scheduled)
                self.state.prefix.acknowledge(sequence_id, sequence.tokens, sequence.kv)
                if not self.settings.scheduler.kv_cache and sequence.kv == sequence.scheduled == sequence.sampled:
                    sequence.kv = sequence.scheduled = 0
                    sequence.truncate = True

    def _take_step_time(self, seconds: float) -> None:
        self.state.count("step_seconds", seconds)
        weight = 0.1 if self._usual_step_s else 1.0
        self._usual_step_s += weight * (seconds - self._usual_step_s)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client_said(self, client: bytes, message: ClientMessage, now: float) -> None:
        match message:
            case Submit():
                self._requests.submit(client, message, now)
            case Ack():
                self._requests.ack(message)
            case Attach():
                self._requests.attach(client, message)
            case Stop():
                self._requests.stop(message, now)
            case Cancel():
                self._requests.cancel(client, message, now)
            case Describe():
                self._out.append(SayClient(client, self._description()))
            case GetAsset():
                self._send_asset(client, message)
            case Query():
                body = reports.report(message.what, self.state, self.judgements(now), now)
                self._out.append(SayClient(client, Report(what=message.what, ok=True, body=body)))
            case Join():
                self._hosts.join(client, message)
            case HostHello():
                self._hosts.hello(client, message)
            case HostDone():
                self._hosts.done(message)
            case StopWorker():
                self._stop_worker(client, message, now)

    def _description(self) -> Description:
        book, manifest = self.state.book, self.state.manifest
        return Description(
            manifest=manifest,
            state=book.phase.value if not book.serving else "serving",
            waits_for=book.waits_for,
            max_context=manifest.context if manifest else 0,
            max_queue=self.settings.requests.max_queue,
            swarm_version=self.settings.version,
        )

    def _send_asset(self, client: bytes, message: GetAsset) -> None:
        data = self.state.assets.get(message.name)
        if data is None:
            body: dict[str, object] = {"error": f"this swarm has no asset {message.name!r}"}
            self._out.append(SayClient(client, Report(what="asset", ok=False, body=body)))
            return
        part = data[message.offset : message.offset + ASSET_PART_BYTES]
        answer = AssetPart(name=message.name, offset=message.offset, total=len(data), payload=pack_bytes(part))
        self._out.append(SayClient(client, answer, part))

    def _stop_worker(self, client: bytes, message: StopWorker, now: float) -> None:
        found = [w for w in self.state.workers.values() if w.name == message.worker and w.state is not WorkerState.OUT]
        if not found:
            known = ", ".join(sorted(w.name for w in self.state.workers.values() if w.state is not WorkerState.OUT))
            body: dict[str, object] = {"error": f"no worker {message.worker!r}: the workers are {known or 'none'}"}
            self._out.append(SayClient(client, Report(what="stop", ok=False, body=body)))
            return
        shortage = self._planner.shortage_without(found[0])
        if shortage and not message.force:
            reason = (
                f"the swarm can't do without {message.worker}, it would wait for {shortage} (--force stops it anyway)"
            )
            self._out.append(SayClient(client, Report(what="stop", ok=False, body={"error": reason})))
            return
        self._leave(found[0], now, at_once=bool(shortage))
        body = {"worker": message.worker, "state": found[0].state.value}
        self._out.append(SayClient(client, Report(what="stop", ok=True, body=body)))

    # --- workers -----------------------------------------------------------------------------------------------------

    def _worker_said(self, peer: bytes, message: WorkerMessage, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, now)
            return
        worker = self._member(peer)
        if worker is None:
            self.state.count("strangers")
            return
        match message:
            case Prepared():
                self._planner.prepared(message, now)
            case Refused():
                self._planner.refused(worker, message, now)
            case Activated():
                self._planner.activated(message, now)
                self._end_the_dangerous(now)
            case LoadProgress():
                worker.loaded_bytes, worker.total_bytes = message.loaded_bytes, message.total_bytes
            case Stats():
                worker.stats = message.values
            case Trouble():
                self._trouble(worker, message, now)
            case Leaving():
                self._leave(worker, now, at_once=self._planner.shortage_without(worker) is not None)
            case _:
                self.state.count("unexpected_control")

    def _trouble(self, worker: Worker, message: Trouble, now: float) -> None:
        """The data path of the plan in force broke at this worker; what it says of an older one is settled already."""
        current = self.state.book.current
        if current is None or message.epoch != current.epoch:
            self.state.count("stale_control")
            return
        self._note("trouble", "error", worker=worker.name, reason=message.reason)
        self.state.count("troubles")
        self._planner.trouble(now, blame=True)
        self._end_the_dangerous(now)

    def _hello(self, peer: bytes, hello: Hello, now: float) -> None:
        reason = self._why_not(hello)
        if reason is not None:
            self._note("worker_denied", "warning", worker=hello.name, reason=reason)
            self._out.append(OrderWorker(peer, Denied(reason=reason)))
            return
        known = self.state.workers.get(hello.incarnation)
        if known is not None and known.state is not WorkerState.OUT:
            self._lose(known, "it said Hello again: what was under way with it is void", now)
        for other in list(self.state.workers.values()):
            if other.name == hello.name and other.incarnation != hello.incarnation:
                self._lose(other, f"replaced by a new process (pid {hello.pid})", now)
                del self.state.workers[other.incarnation]
                self._pulses.pop(other.incarnation, None)
        if self.state.manifest is None:
            self.state.manifest = hello.manifest
        self.state.book.heard_of(hello.epoch)
        self.state.workers[hello.incarnation] = Worker(hello, peer, now)
        self._pulses[hello.incarnation] = Pulse(now)
        self._welcome(peer, hello)
        self._planner.changed(now)
        self._note("worker_joined", worker=hello.name, device=hello.device, memory_mib=hello.memory_bytes >> 20)

    def _why_not(self, hello: Hello) -> str | None:
        if PROTOCOL_VERSION not in hello.wire_versions:
            return (
                f"this broker speaks protocol {PROTOCOL_VERSION}, the worker {hello.wire_versions}: install one version"
            )
        if not is_supported(hello.device):
            return f"device {hello.device!r} is none of {', '.join(DEVICES)}"
        if self.state.manifest is not None:
            difference = self.state.manifest.difference(hello.manifest)
            if difference is not None:
                return f"this swarm serves another model: {difference}"
        return None

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        wants = tuple(a.name for a in hello.manifest.assets if a.name not in self.state.assets)
        welcome = Welcome(
            epoch=self.state.book.written,
            beat_endpoint=self.settings.beat_endpoint,
            data_endpoint=self.settings.data_endpoint,
            beat_interval_s=self.settings.beat_interval_s,
            lease_s=self.settings.lease_s,
            wants=wants,
        )
        self._out.append(OrderWorker(peer, welcome))
        if self.state.book.current is not None:
            # The plan in force was made without it: what it still holds of the sequences is of no use any more.
            self._out.append(OrderWorker(peer, Dismiss(epoch=self.state.book.written)))

    def _asset_arrived(self, event: AssetArrived) -> None:
        """A file counts if it is the one that the manifest names."""
        manifest = self.state.manifest
        named = manifest is not None and any(a.name == event.name and a.digest == event.digest for a in manifest.assets)
        if self._member(event.peer) is not None and named:
            self.state.assets[event.name] = event.data
        else:
            self.state.count("wrong_assets")

    def _leave(self, worker: Worker, now: float, *, at_once: bool) -> None:
        """In good order: the plan is made without it first, unless nobody else can take its layers."""
        if at_once:
            self._planner.release(worker, "it was asked to leave")
            self._planner.lost(worker, now, blame=False)
        elif worker.state is not WorkerState.OUT:
            worker.state = WorkerState.LEAVING
            self._planner.changed(now)

    def _disconnected(self, peer: bytes, now: float) -> None:
        worker = self._member(peer)
        if worker is not None:
            self._lose(worker, "its connection closed", now, blame=True)

    def _lose(self, worker: Worker, evidence: str, now: float, *, blame: bool = False) -> None:
        if worker.state is WorkerState.OUT:
            return
        worker.state = WorkerState.OUT
        worker.reason = evidence
        self.state.count("workers_lost")
        self._note("worker_out", "warning", worker=worker.name, evidence=evidence)
        self._planner.lost(worker, now, blame=blame)
        self._end_the_dangerous(now)

    def _end_the_dangerous(self, now: float) -> None:
        """A request present at several deaths may be their cause; it must not take the swarm with it."""
        for sequence in [s for s in self.state.running + list(self.state.waiting) if s.num_deaths >= QUARANTINE_AFTER]:
            detail = f"quarantined: it was in flight at {sequence.num_deaths} worker deaths"
            self._requests.end(sequence, "failed", now, detail)

    def _member(self, peer: bytes) -> Worker | None:
        for worker in self.state.workers.values():
            if worker.peer == peer and worker.state is not WorkerState.OUT:
                return worker
        return None

    # --- health ------------------------------------------------------------------------------------------------------

    def _beat(self, beat: Beat, now: float) -> None:
        worker = self.state.workers.get(beat.incarnation)
        if worker is None:
            self.state.count("strangers")
            return
        self._pulses[beat.incarnation].take(beat, now)
        if worker.state is WorkerState.OUT:
            self._call_back(worker, now)

    def _call_back(self, worker: Worker, now: float) -> None:
        """It was declared out and lives: it is fenced, and may say Hello and join anew."""
        if worker.asked_to_rejoin_at is None or now - worker.asked_to_rejoin_at > REJOIN_AGAIN_S:
            worker.asked_to_rejoin_at = now
            epoch = self.state.book.written
            self._out.append(OrderWorker(worker.peer, Fence(epoch=epoch)))
            self._out.append(OrderWorker(worker.peer, Rejoin(epoch=epoch, reason=worker.reason)))

    def judgements(self, now: float) -> dict[str, Judgement]:
        """The verdict on every worker, with its evidence."""
        found: dict[str, Judgement] = {}
        for incarnation, worker in self.state.workers.items():
            if worker.state is WorkerState.OUT:
                found[incarnation] = Judgement(Verdict.DEAD, worker.reason)
            else:
                pulse = self._pulses[incarnation]
                found[incarnation] = judge(pulse, self.settings.health, self._usual_step_s, now)
        return found

    def _tick(self, now: float) -> None:
        for incarnation, judgement in self.judgements(now).items():
            worker = self.state.workers[incarnation]
            if judgement.verdict.is_out and worker.state is not WorkerState.OUT:
                self._lose(worker, judgement.evidence, now, blame=judgement.verdict is Verdict.HUNG)
        self._forget_the_long_gone()
        self._notice_lost_steps(now)
        self._renew_leases(now)
        self._requests.tick(now)
        self._planner.tick(now)

    def _notice_lost_steps(self, now: float) -> None:
        """A step is under way, and yet every stage has been idle for a while: the step is lost, without a death."""
        plan = self.state.book.current
        if plan is None or not self.state.flights or not self.state.book.serving:
            return
        oldest = min(flight.sent_at for flight in self.state.flights.values())
        beats = [self._pulses[i].beat for i in plan.members if i in self._pulses]
        idle_s = min((b.since_s if b is not None and b.state == "idle" else 0.0) for b in beats) if beats else 0.0
        if now - oldest > LOST_STEP_S and idle_s > LOST_STEP_S:
            self._note("steps_lost", "error", steps=sorted(self.state.flights))
            self.state.count("steps_lost", len(self.state.flights))
            self._planner.trouble(now, blame=False)

    def _renew_leases(self, now: float) -> None:
        if now - self._leases_renewed_at < self.settings.lease_s / 5:
            return
        self._leases_renewed_at = now
        for worker in self.state.workers.values():
            if worker.state is not WorkerState.OUT:
                self._out.append(OrderWorker(worker.peer, Alive(epoch=self.state.book.written)))

    def _forget_the_long_gone(self) -> None:
        """Keep the last few that went, for ``swarmctl nodes``; a crash loop must not fill the memory."""
        gone = [i for i, w in self.state.workers.items() if w.state is WorkerState.OUT]
        for incarnation in gone[: max(0, len(gone) - 16)]:
            del self.state.workers[incarnation]
            self._pulses.pop(incarnation, None)

    def _notice_own_pause(self, now: float) -> None:
        """If the broker itself stood still, every deadline moves by that much."""
        pause_s = now - self._last_event_at
        self._last_event_at = now
        if pause_s > PAUSE_S:
            self.state.count("own_pauses")
            for pulse in self._pulses.values():
                pulse.forgive(pause_s)
            for flight in self.state.flights.values():
                flight.sent_at += pause_s
            self._planner.forgive(pause_s)
            self._requests.forgive(pause_s)

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields))
