"""The broker's core: ``handle(event, now) -> actions``. The only door to the state.

It decides; the shell (``service``) acts. It knows no sockets, no clock, no chance: the same events at the same times
give the same actions, in production, in unit tests and in the simulation.

Parts, each with its own rules: ``requests`` (the client door), ``scheduler`` (who joins the next step), ``planning``
(who holds which layers), ``members`` (who is there, and alive). After every event the core fills the pipe: as many
steps as may be in flight are dispatched at once, which is why no part needs to ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker import plan_report, reports, scheduler
from swarm.broker.actions import Action, Dispatch, Note, SayClient
from swarm.broker.events import (
    AcceptanceWritten,
    AssetPartArrived,
    BeatHeard,
    ClientSaid,
    ClientUnreachable,
    EpochWritten,
    Event,
    MessageRefused,
    StepFinished,
    Tick,
    TokensWritten,
    WorkerDisconnected,
    WorkerSaid,
)
from swarm.broker.health import HealthSettings, Judgement
from swarm.broker.hosts import Hosts
from swarm.broker.members import Members, MemberSettings
from swarm.broker.planning import Planner, PlanSettings
from swarm.broker.prefix import PrefixCache
from swarm.broker.requests import Requests, RequestSettings
from swarm.broker.scheduler import SchedulerSettings
from swarm.broker.state import Flight, SequenceState, State
from swarm.broker.statistics import PipelineStatistics
from swarm.broker.trace import Tracer
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    Ack,
    AssetPart,
    Attach,
    Cancel,
    ClientMessage,
    Describe,
    Description,
    GetAsset,
    HostDone,
    HostHello,
    Join,
    Json,
    Query,
    Report,
    StepDone,
    Stop,
    StopWorker,
    Submit,
)
from swarm.wire.tensors import pack_bytes

# A gap between two events longer than this is the broker's own pause (the shell ticks far more often).
PAUSE_S = 0.25
LOST_STEP_S = 1.0
BLAME_AFTER_LOSSES = 2  # steps lost without a single one that came through between


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What the core needs to know; the endpoints are those that workers are told."""

    beat_endpoint: str
    data_endpoint: str
    version: str = "0"
    beat_interval_s: float = 0.1
    lease_s: float = 10.0
    prefix_cache: bool = True
    trace_steps: int = 4096
    profile_every: int = 0
    run: str = ""  # tells the ids of this broker's events from those of one before it
    requests: RequestSettings = field(default_factory=RequestSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    health: HealthSettings = field(default_factory=HealthSettings)

    @property
    def member_settings(self) -> MemberSettings:
        return MemberSettings(self.beat_endpoint, self.data_endpoint, self.beat_interval_s, self.lease_s, self.health)


class BrokerCore:
    """See the module's text."""

    def __init__(self, settings: BrokerSettings, now: float) -> None:
        self.settings = settings
        self.state = State(started_at=now, prefix=PrefixCache(enabled=settings.prefix_cache))
        self._out: list[Action] = []
        self._tracer = Tracer(settings.trace_steps, settings.requests.retain_s)
        self._statistics = PipelineStatistics()
        self._requests = Requests(self.state, settings.requests, self._out, self._tracer)
        self._planner = Planner(self.state, settings.plan, settings.data_endpoint, self._out)
        self._members = Members(
            self.state, settings.member_settings, self._planner, self._requests, out=self._out, now=now
        )
        self._hosts = Hosts(self._out)
        self._num_lost_in_row = 0
        self._usual_step_s = 0.0  # moving average of a step's way through all stages
        self._last_event_at = now
        self._num_events = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one fact, return what is to be done, in order."""
        self.state.now = now
        self._num_events += 1
        self._notice_own_pause(now)
        self._route(event, now)
        self._fill_pipe(now)
        actions = self._out[:]
        self._out.clear()
        return actions

    @property
    def cause(self) -> str:
        """The id of the event that was handled last, for ``actions.caused``."""
        return f"{self.settings.run}{self._num_events:x}"

    def _route(self, event: Event, now: float) -> None:
        match event:
            case StepFinished(done):
                self._step_finished(done, now)
            case TokensWritten(committed):
                self._requests.committed(committed)
            case BeatHeard(beat):
                self._members.beat(beat, now)
            case ClientSaid(client, message):
                self._client_said(client, message, now)
            case WorkerSaid(peer, message):
                self._members.said(peer, message, now)
            case AcceptanceWritten(request_id, sequences):
                self._requests.accepted(request_id, sequences)
            case EpochWritten(epoch):
                self._planner.epoch_written(epoch, now)
            case WorkerDisconnected(peer):
                self._members.disconnected(peer, now)
            case ClientUnreachable(client):
                self._requests.unreachable(client, now)
                self._hosts.unreachable(client)
            case AssetPartArrived():
                self._members.asset_part_arrived(event, now)
            case MessageRefused(door):
                self.state.count(f"malformed_{door}")
            case Tick():
                self._tick(now)

    def _fill_pipe(self, now: float) -> None:
        while (step := scheduler.next_step(self.state, self.settings.scheduler, now)) is not None:
            self.state.count("steps")
            self.state.count("rows", len(step.rows))
            self.state.count("positions", len(step.tokens))
            self.state.book.gauge.dispatched(step.step, step.rows)
            self._statistics.dispatched(step, len(self.state.flights), len(self.state.waiting))
            self._out.append(Dispatch(step))
        while self.state.hopeless:
            self._requests.too_late(self.state.hopeless.pop(), now)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step_finished(self, done: StepDone, now: float) -> None:
        current = self.state.book.current
        flight = self.state.flights.pop(done.step, None) if current and current.epoch == done.epoch else None
        if flight is None:
            self.state.count("stale_steps")
            return
        self._num_lost_in_row = 0
        self._take_step_time(now - flight.sent_at)
        self.state.book.gauge.finished(done.step, done.hops, now - flight.sent_at)
        self._tracer.finished(flight.sent_at, now, done)
        if self._statistics.finished(now - flight.sent_at, done) and self._statistics.is_due(
            self.settings.profile_every
        ):
            self._out.append(Note("profile", "info", self._statistics.profile()))
        self.state.pace.step_done(flight.num_tokens, flight.sent_at, now)
        self._acknowledge(done, flight)
        self._requests.sampled(done.sampled, done.hops, now)
        for failure in done.failed:
            sequence = self.state.sequences.get(failure.sequence)
            if sequence is not None:
                self._requests.end(sequence, "failed", now, failure.reason)

    def _acknowledge(self, done: StepDone, flight: Flight) -> None:
        """Every stage has done these rows: their keys and values are everywhere."""
        for sequence_id, position in ((k.sequence, k.position) for k in done.kv):
            sequence = self.state.sequences.get(sequence_id)
            if sequence is None or sequence.stay != flight.stays.get(sequence_id):
                continue  # it has given its room back since
            if sequence.state is SequenceState.RUNNING:
                sequence.kv = min(max(sequence.kv, position), sequence.scheduled)
                self.state.prefix.acknowledge(sequence_id, sequence.tokens, sequence.kv)
                if not self.settings.scheduler.kv_cache and sequence.kv == sequence.scheduled == sequence.sampled:
                    sequence.kv = sequence.scheduled = 0
                    sequence.truncate = True
                    self.state.running.refresh(sequence)

    def _take_step_time(self, seconds: float) -> None:
        self.state.count("step_seconds", seconds)
        weight = 0.1 if self._usual_step_s else 1.0
        self._usual_step_s += weight * (seconds - self._usual_step_s)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client_said(self, client: bytes, message: ClientMessage, now: float) -> None:
        self._planner.look_again(now)
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
                body = self._report(message, now)
                self._out.append(SayClient(client, Report(what=message.what, ok="error" not in body, body=body)))
            case Join():
                self._hosts.join(client, message)
            case HostHello():
                self._hosts.hello(client, message)
            case HostDone():
                self._hosts.done(message)
            case StopWorker():
                self._stop_worker(client, message, now)

    def _report(self, query: Query, now: float) -> Json:
        match query.what:
            case "trace":
                return self._tracer.report(query.request_id, self.state.requests)
            case "plan" if query.suppose is not None:
                return plan_report.supposed(self.state, query.suppose, self._planner.suppose)
            case "stats":
                return reports.stats(self.state, self._statistics)
            case _:
                return reports.report(query.what, self.state, self.judgements(now), now)

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
        found = [w for w in self.state.workers.values() if w.name == message.worker and not w.is_gone]
        if not found:
            known = ", ".join(sorted(w.name for w in self.state.workers.values() if not w.is_gone))
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
        self._members.leave(found[0], now, at_once=bool(shortage))
        body = {"worker": message.worker, "state": found[0].state.value}
        self._out.append(SayClient(client, Report(what="stop", ok=True, body=body)))

    # --- time --------------------------------------------------------------------------------------------------------

    def judgements(self, now: float) -> dict[str, Judgement]:
        """The verdict on every worker, with its evidence."""
        return self._members.judgements(self._usual_step_s, now)

    def _tick(self, now: float) -> None:
        self._members.tick(self._usual_step_s, now)
        self._notice_lost_steps(now)
        self._requests.tick(now)
        self._tracer.forget_old(now)
        self._planner.rebuilder.tick(now)
        self._planner.tick(now)

    def _notice_lost_steps(self, now: float) -> None:
        """A step is under way, and yet every stage has been idle for a while: the step is lost, without a death."""
        plan = self.state.book.current
        rebuilder = self._planner.rebuilder
        under_way = [flight.sent_at for flight in self.state.flights.values()]
        under_way += [rebuilder.ordered_at] if rebuilder.under_way else []
        if plan is None or not under_way or not self.state.book.serving:
            return
        oldest = min(under_way)
        idle_s = min(self._members.idle_s(incarnation) for incarnation in plan.members)
        if now - oldest > LOST_STEP_S and idle_s > LOST_STEP_S:
            self._note("steps_lost", "error", steps=sorted(self.state.flights))
            self.state.count("steps_lost", len(self.state.flights))
            self._num_lost_in_row += 1
            # Once or twice is the network's doing. If nothing else comes through, it is what these steps carry.
            self._planner.trouble(now, blame=self._num_lost_in_row > BLAME_AFTER_LOSSES)

    def _notice_own_pause(self, now: float) -> None:
        """If the broker itself stood still, every deadline moves by that much."""
        pause_s = now - self._last_event_at
        self._last_event_at = now
        if pause_s > PAUSE_S:
            self.state.count("own_pauses")
            self._members.forgive(pause_s)
            for flight in self.state.flights.values():
                flight.sent_at += pause_s
            self._planner.forgive(pause_s)
            self._requests.forgive(pause_s)

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields))
