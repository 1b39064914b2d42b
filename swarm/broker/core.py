"""Core of the broker: ``handle(event, now) -> actions``. The only access to the state.

It decides; the shell (``service``) acts. It uses no sockets, no clock, no randomness: the same events at the same times
give the same actions, in production, in unit tests and in the simulation.

Packages, each with its own rules: ``requests`` (clients' requests), ``steps`` (the next step), ``recovery`` (plans and
their changes), ``members`` (workers and their health). After every event the core fills the pipeline: it dispatches as
many steps as may be in flight, which is why no other part needs to ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from swarm.broker.actions import Action, Dispatch, FinishJournalRewrite, Outbox, SendToWorker
from swarm.broker.admin.queries import QueryHandler
from swarm.broker.events import (
    AcceptanceWritten,
    AcceptStopped,
    AdaptersWritten,
    AssetPartArrived,
    ClientAccount,
    ClientBlocked,
    ClientMessageReceived,
    ClientUnreachable,
    DescriptorsCounted,
    DraftGone,
    DraftMessageReceived,
    EndNotWritten,
    EndWritten,
    EpochWritten,
    Event,
    HeartbeatReceived,
    JournalBroke,
    JournalFigures,
    JournalMended,
    JournalRenewed,
    JournalRewritten,
    KeyRevoked,
    ListRead,
    MessageRefused,
    ProcessFigures,
    RequestRead,
    RouteTested,
    RulesChanged,
    Solved,
    StepFinished,
    Tick,
    TokensWritten,
    WaitExpired,
    WorkerDisconnected,
    WorkerMessageReceived,
)
from swarm.broker.members.accept_gate import AcceptGate
from swarm.broker.members.admission import MemberSettings
from swarm.broker.members.health import HealthLimits
from swarm.broker.members.hosts import HostManager
from swarm.broker.members.membership import WorkerMembership
from swarm.broker.members.monitor import LostStepDetector
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.recovery.reconfiguration import Reconfiguration, ReconfigurationSettings
from swarm.broker.reports.statistics import PipelineStatistics, RequestLatencies
from swarm.broker.reports.trace import RequestTracer
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.requests.requests import RequestHandler
from swarm.broker.speculation.depth import DepthControl
from swarm.broker.speculation.drafts import DraftEvent, Drafts
from swarm.broker.speculation.proposer import Proposer
from swarm.broker.speculation.speculation import Speculation
from swarm.broker.state import InFlightStep, State, WorkerState
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.broker.state.prefix import PrefixCache, PrefixRules
from swarm.broker.state.workers import Judgement
from swarm.broker.steps import scheduler
from swarm.broker.steps.proposals import prepare_proposals, settle_proposals
from swarm.broker.steps.scheduler import SchedulerSettings
from swarm.params import SpeculationMode
from swarm.wire.messages import (
    NO_LINEAGE,
    Ack,
    AdapterCommand,
    Attach,
    Cancel,
    ClientMessage,
    Describe,
    Detach,
    GetAsset,
    GetRequest,
    HostDone,
    HostHello,
    Join,
    Lineage,
    LookUp,
    PlanCommand,
    Query,
    ShowSettings,
    Step,
    StepDone,
    Stop,
    StopWorker,
    Submit,
)

# A gap longer than this between two events, or two ticks, is the broker's own pause (the shell ticks far more often).
PAUSE_S = 0.25
# Forgive only the part of a pause above this limit; otherwise a permanently slow broker would never time anyone out.
USUAL_GAP_S = 0.05
MAX_NOTES = 8  # latest problems of the journal that are kept for reports


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of the deciding code, by package. ``settings`` derives them from the user's settings.

    The endpoints are sent to workers.
    """

    heartbeat_endpoint: str
    data_endpoint: str
    version: str = "0"
    beat_interval_s: float = 0.1
    lease_s: float = 10.0
    prefix: PrefixRules = field(default_factory=PrefixRules)
    trace_steps: int = 4096  # steps that the tracer keeps
    profile_every: int = 0  # steps between two ``profile`` log events; 0: none
    check_rules: bool = False  # check the state's rules at every tick, and log violations
    lineage: Lineage = NO_LINEAGE  # of this process
    key: str | None = None  # the broker's public key, where connections are authenticated by keys
    dtype: str = ""  # type of the weights at all workers; empty: the first worker's
    relay: str = ""  # endpoint of the relay for workers that can only connect outwards; empty: none
    run: str = ""  # prefix that distinguishes the ids of this broker's events from the ids of previous brokers
    has_draft: bool = False  # there is a draft model, in a process of its own
    requests: RequestSettings = field(default_factory=RequestSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationMode = "auto"  # which of the proposers may guess
    plan: ReconfigurationSettings = field(default_factory=ReconfigurationSettings)
    health: HealthLimits = field(default_factory=HealthLimits)
    recheck: RecheckSettings = field(default_factory=RecheckSettings)

    @property
    def member_settings(self) -> MemberSettings:
        return MemberSettings(
            self.heartbeat_endpoint,
            self.data_endpoint,
            self.beat_interval_s,
            self.lease_s,
            self.health,
            self.recheck,
            self.key,
            self.dtype,
        )


class BrokerCore:
    """Decides what the broker does (see the module)."""

    def __init__(
        self,
        settings: CoreSettings,
        now: float,
        snapshot: JournalSnapshot | None = None,
        *,
        proposers: Iterable[Proposer] = (),
        control: DepthControl | None = None,
    ) -> None:
        self.settings = settings
        self.state = State(
            lineage=settings.lineage, started_at=now, now=now, ticked_at=now, prefix=PrefixCache(settings.prefix)
        )
        self.state.routes.relay = settings.relay
        self._out = Outbox()
        self.drafts = Drafts(self.state, self._out) if settings.has_draft else None
        own = () if self.drafts is None else (self.drafts,)
        self.speculation = Speculation((*proposers, *own), settings.speculation, control)
        self._tracer = RequestTracer(settings.trace_steps, settings.requests.retain_s)
        self._statistics = PipelineStatistics()
        latencies = RequestLatencies()
        self._requests = RequestHandler(
            self.state, settings.requests, self._out, tracer=self._tracer, latencies=latencies
        )
        self._reconfiguration = Reconfiguration(
            self.state, settings.plan, settings.data_endpoint, self._out, settings.key
        )
        self._members = WorkerMembership(
            self.state, settings.member_settings, self._reconfiguration, self._requests, out=self._out, now=now
        )
        self._hosts = HostManager(self.state.hosts, self._out)
        self._accept_gate = AcceptGate(self.state.accept, self._out)
        self._queries = QueryHandler(
            self.state,
            settings.requests,
            self._out,
            version=settings.version,
            procedure=self._reconfiguration,
            members=self._members,
            tracer=self._tracer,
            statistics=self._statistics,
            latencies=latencies,
            judgements=self.judgements,
            speculation=self.speculation,
            drafts=self.drafts,
        )
        self._lost_step_detector = LostStepDetector(self.state, self._members.monitor, self._reconfiguration, self._out)
        self._num_events = 0  # part of the event ids in logs
        if snapshot is not None:
            self._restore(snapshot, now)

    def _restore(self, snapshot: JournalSnapshot, now: float) -> None:
        """Resume where the previous broker ended; findings on the way are logged with the first event."""
        self.state.plans.resume_above(snapshot.epoch)
        self._members.adapters.restore(snapshot)
        self._requests.durability.restore(snapshot, now)
        self._reconfiguration.restart.begin(snapshot, now, self.settings.plan.gather_s)
        if snapshot.manifest is not None:
            self.state.set_manifest(snapshot.manifest)
            self._requests.durability.on_model_known(now)
        self.state.journal_notes = snapshot.notes
        for text in snapshot.notes:
            self._out.note("journal_was_damaged", "error", what=text)
        if snapshot.requests:
            unended = sum(not request.has_ended for request in snapshot.requests)
            self._out.note("requests_restored", epoch=snapshot.epoch, requests=len(snapshot.requests), unended=unended)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; return the resulting actions, in order."""
        self._num_events += 1
        self._detect_own_pause(event, now)
        self.state.now = now
        self._route(event, now)
        self._reconfiguration.advance(now)
        self._fill_pipeline(now)
        key_actions = self._members.keyring.pending_actions()  # before the orders that make peers connect there
        actions = [*key_actions, *(self._add_lineage(action) for action in self._out)]
        self._out.clear()
        return actions

    def _add_lineage(self, action: Action) -> Action:
        """Add this broker's lineage, by which workers recognise whose epochs, steps and sequences these are."""
        match action:
            case SendToWorker(peer, message):
                return SendToWorker(peer, msgspec.structs.replace(message, lineage=self.state.lineage))
            case Dispatch(step):
                return Dispatch(msgspec.structs.replace(step, lineage=self.state.lineage))
            case _:
                return action

    def local_workers(self) -> list[str]:
        """Return the names of workers on the broker's own machine, including those that may come back."""
        workers = self.state.workers.values()
        return [worker.name for worker in workers if not worker.key_owner and worker.state is not WorkerState.LEFT]

    @property
    def wake_at(self) -> float:
        """Time at which ``WaitExpired`` is to be fed; infinite: never. It may change with every event."""
        return self.speculation.next_wait_end

    @property
    def cause(self) -> str:
        """Id of the event that was handled last, for ``actions.add_cause``."""
        return f"{self.settings.run}{self._num_events:x}"

    def _route(self, event: Event, now: float) -> None:  # noqa: PLR0912, PLR0915 (a case for each event)
        match event:
            case StepFinished(done):
                self._on_step_finished(done, now)
            case TokensWritten(committed):
                self._requests.collector.on_committed(committed)
            case HeartbeatReceived(beat, key):
                self._members.on_heartbeat(beat, now, key)
            case ClientMessageReceived(client, message, account):
                self._on_client_message(client, message, account, now)
            case WorkerMessageReceived(peer, message, owner, not_at):
                self._members.on_message(peer, message, now, owner, not_at)
            case WorkerDisconnected(peer):
                self._members.on_disconnected(peer, now)
            case KeyRevoked(key):
                self._members.on_key_revoked(key, now)
            case ClientUnreachable(client):
                self._requests.on_client_unreachable(client, now)
                self._hosts.on_client_gone(client)
            case ClientBlocked(client):
                self._requests.on_client_blocked(client, now)
            case AssetPartArrived():
                self._members.on_asset_part(event, now)
            case MessageRefused():
                self._on_message_refused(event, now)
            case WaitExpired():
                pass  # sequences whose wait has ended join the next step
            case Tick():
                self._tick(now)
            case AcceptStopped() | DescriptorsCounted():
                self._accept_gate.handle(event, now)
            case AcceptanceWritten(request_id, sequences):
                self._requests.on_accepted(request_id, sequences)
            case EpochWritten(epoch):
                self._reconfiguration.on_epoch_written(epoch, now)
            case EndWritten(sequence):
                self._requests.durability.on_end_written(sequence)
            case EndNotWritten(sequence):
                self._requests.durability.on_end_not_written(sequence)
            case AdaptersWritten(ticket):
                self._members.adapters.on_written(ticket)
            case RequestRead(request_id, record, problem):
                self._requests.on_request_read(request_id, record, problem, now)
            case ListRead() | Solved():
                self._queries.on_result(event, now)
            case RouteTested(epoch, problem):
                self._reconfiguration.on_route_tested(epoch, problem, now)
            case RulesChanged(rules):
                self._reconfiguration.on_rules_changed(rules, now)
            case DraftMessageReceived() | DraftGone():
                self._on_draft_event(event, now)
            case JournalFigures(values):
                self.state.journal_figures = values
            case ProcessFigures(values):
                self.state.process_figures = values
            case JournalBroke(reason):
                self._requests.durability.on_journal_broken(reason, now)
            case JournalMended():
                self._requests.durability.on_journal_mended()
            case JournalRenewed(note, next_sequence):
                self._on_journal_renewed(note, next_sequence, now)
            case JournalRewritten():
                self._out.note("journal_rewritten", requests=len(self.state.requests))
            case _:
                assert_never(event)

    def _on_journal_renewed(self, note: str, next_sequence: int, now: float) -> None:
        """Write what the new journal needs from memory, the epoch last: with that it is complete."""
        self.state.count("journals_renewed")
        self.state.journal_notes = (*self.state.journal_notes, note)[-MAX_NOTES:]
        self._out.note("journal_begun_anew", "error", what=note)
        self._requests.durability.on_journal_renewed(next_sequence, now)
        self._members.adapters.write_again()
        self._out.append(FinishJournalRewrite(self._reconfiguration.make_epoch_record(), self.state.next_sequence))

    def _on_draft_event(self, event: DraftEvent, now: float) -> None:
        for sequence in () if self.drafts is None else self.drafts.handle(event, now):
            self.speculation.end_wait(sequence)

    def _on_message_refused(self, refused: MessageRefused, now: float) -> None:
        self.state.count(f"malformed_{refused.socket}")
        if refused.foreign:
            self._members.admission.deny_unreadable(refused.peer, refused.foreign)
        if refused.socket == "data":  # most likely the last stage's answer to a step, which is not sent again
            self._members.on_damaged_message(now)

    def _fill_pipeline(self, now: float) -> None:
        if self.drafts is not None:
            self.drafts.check_overdue(now)
            for released in self.drafts.ask(now):
                self.speculation.end_wait(released)
        self.speculation.end_expired(now)  # otherwise ``wake_at`` would stay in the past
        while (step := self._next_step(now)) is not None:
            self.state.count("steps")
            self.state.count("rows", len(step.rows))
            self.state.count("positions", len(step.tokens))
            self.state.plans.gauge.on_dispatched(step.step, step.rows, step.proposed or ())
            self.state.count("speculative_steps", bool(step.proposed))
            self._statistics.record_dispatch(step, len(self.state.in_flight), len(self.state.waiting))
            self._out.append(Dispatch(step))
        for sequence in self.state.take_deadline_unreachable():
            self._requests.completer.fail_too_late(sequence, now)

    def _next_step(self, now: float) -> Step | None:
        return scheduler.next_step(self.state, self.settings.scheduler, now, self.speculation)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _on_step_finished(self, done: StepDone, now: float) -> None:
        current = self.state.plans.current
        is_current = current is not None and current.epoch == done.epoch and done.lineage == self.state.lineage
        flight = self.state.complete_step(done.step) if is_current else None
        if flight is None:
            self.state.count("stale_steps")
            return
        self.state.data_path_errors.reset()
        if self.state.evidence.steps:
            self._members.failure_judge.record_step(done.kv, now)
        self.state.count("step_seconds", now - flight.sent_at)
        self.state.plans.gauge.on_finished(done.step, done.hops, now - flight.sent_at)
        self._tracer.record_step(flight, now, done)
        if self._statistics.record_done(now - flight.sent_at, done) and self._statistics.is_due(
            self.settings.profile_every
        ):
            self._out.note("profile", "info", **self._statistics.profile())
        num_running = len(self.state.running)
        collector, last = self._requests.collector, done.hops[-1].worker if done.hops else "of the last stage"
        collector.collect_prompt_logprobs(done.prompt_logprobs or (), flight)
        scheduler.acknowledge(self.state, done.kv, flight, keeps_kv=self.settings.scheduler.kv_cache)
        is_rebuilding = not self.state.rebuilding.is_idle
        if recovery := self.state.recoveries.record_step(
            num_tokens=flight.num_tokens, rebuilding=is_rebuilding, now=now
        ):
            self._reconfiguration.log_recovery(recovery)
        collector.collect_vectors(done.vectors or (), now)
        failed = {failure.sequence for failure in done.failed}
        collector.end_prompts(tuple(k for k in done.kv if k.sequence not in failed), flight, last, now)
        early = [s.id for s, _ in flight.sequences if s.lacks_prompt_logprobs]
        collector.collect(done.sampled, done.hops, flight, now)
        for failure in done.failed:
            sequence = self.state.sequences.get(failure.sequence)
            if sequence is not None:
                self._requests.completer.end(sequence, "failed", now, failure.reason)
        scheduler.redraw_late(self.state, (*done.late, *early), flight)
        num_refused = settle_proposals(self.state, self.speculation, flight)
        self.state.record_step(flight, num_running, num_refused, now)
        self._store_forced(done, flight)
        prepare_proposals(self.state, self.speculation, flight, now)
        self.speculation.forget_inactive(sequence for sequence, _ in flight.sequences)
        self._reconfiguration.restorer.on_step_done(done.step, now)
        if flight.num_patches:  # replays may wait for an image
            self._reconfiguration.rebuilder.tick(now)

    def _store_forced(self, done: StepDone, flight: InFlightStep) -> None:
        """Keep the tokens that the last stage has found certain to follow, for the sequences' next steps."""
        for forced in done.forced or ():
            sequence = self.state.sequences.get(forced.sequence)
            if sequence is not None and sequence.is_decoding and flight.is_current(sequence):
                self.speculation.on_forced(sequence, forced)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _on_client_message(  # noqa: PLR0912 (a case for each message)
        self, client: bytes, message: ClientMessage, account: ClientAccount | None, now: float
    ) -> None:
        self._reconfiguration.refresh_wait_reason(now)
        match message:
            case Submit():
                self._requests.submit(client, message, account, now)
            case GetRequest() | LookUp():
                self._requests.look_up(client, message, account)
            case Attach():
                self._requests.attach(client, message, account)
            case Ack():
                self._requests.ack(client, message, account)
            case Stop():
                self._requests.stop(message, account, now)
            case Cancel():
                self._requests.cancel(client, message, account, now)
            case Detach():
                self._requests.detach(client, message, account, now)
            case Describe():
                self._queries.describe(client)
            case GetAsset():
                self._queries.send_asset(client, message)
            case Query():
                self._queries.query(client, message, account, now)
            case Join():
                self._hosts.join(client, message)
            case HostHello():
                self._hosts.on_hello(client, message)
            case HostDone():
                self._hosts.on_done(message)
            case StopWorker():
                self._queries.stop_worker(client, message)
            case PlanCommand():
                self._queries.steer(client, message)
            case AdapterCommand():
                self._members.adapters.execute(client, message, now)
            case ShowSettings():
                self._queries.show_settings(client, message)

    # --- time --------------------------------------------------------------------------------------------------------

    def judgements(self, now: float) -> dict[str, Judgement]:
        """Return the verdict on every worker, with its evidence."""
        return self._members.monitor.judgements(now)

    def _tick(self, now: float) -> None:
        self._members.tick(now)
        self._members.adapters.advance(now)
        self._lost_step_detector.tick(now)
        self._requests.tick(now)
        self._tracer.forget_old(now)
        self._accept_gate.tick(now)
        self._reconfiguration.rebuilder.tick(now)
        self._reconfiguration.restorer.tick(now)
        self.speculation.forget_inactive()
        if not self.state.running and (recovery := self.state.recoveries.end_without_sequences(now)):
            self._reconfiguration.log_recovery(recovery)
        self._reconfiguration.tick(now)
        self.state.ticked_at = now
        for violation in self.state.check() if self.settings.check_rules else ():
            self.state.count("rules_broken")
            self._out.note("rule_broken", "error", what=violation)

    def _detect_own_pause(self, event: Event, now: float) -> None:
        """If the broker's own process was paused, move every deadline that leads to a verdict or an end by the length
        of the pause.

        Many short pauses between two ticks count as one long one: waiting messages are handled before a tick, and
        verdicts are given only at ticks.
        """
        self._shift_deadlines(self.state.now, now)
        if isinstance(event, Tick):
            self._shift_deadlines(self.state.ticked_at, now)

    def _shift_deadlines(self, last_at: float, now: float) -> None:
        if now - last_at > PAUSE_S:
            self.state.count("own_pauses")
            self.state.shift_deadlines(now - last_at - USUAL_GAP_S, now)
