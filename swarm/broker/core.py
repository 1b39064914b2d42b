"""Core of the broker: ``handle(event, now) -> actions``. The only access to the state.

It decides; the shell (``service``) acts. It uses no sockets, no clock, no randomness: the same events at the same times
give the same actions, in production, in unit tests and in the simulation.

Packages, each with its own rules: ``requests`` (clients' requests), ``steps`` (the next step), ``recovery`` (plans and
their changes), ``members`` (workers and their health). After every event the core fills the pipeline: it dispatches as
many steps as may be in flight, which is why no other part needs to ask for it.
"""

from __future__ import annotations

import msgspec

from swarm.broker.actions import Action, Dispatch, OrderWorker, Outbox, WriteAnew
from swarm.broker.core_settings import BrokerSettings
from swarm.broker.events import (
    AcceptanceWritten,
    Account,
    AssetPartArrived,
    BeatHeard,
    ClientSaid,
    ClientStuck,
    ClientUnreachable,
    DescriptorsCounted,
    DoorClosed,
    DoorTried,
    EndNotWritten,
    EndWritten,
    EpochWritten,
    Event,
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
    RulesChanged,
    Solved,
    StepFinished,
    Tick,
    TokensWritten,
    WorkerDisconnected,
    WorkerSaid,
)
from swarm.broker.members.doors import Doors
from swarm.broker.members.hosts import Hosts
from swarm.broker.members.roster import Members
from swarm.broker.members.vigil import LostSteps
from swarm.broker.questions.inquiries import Inquiries
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.reports.statistics import Latencies, PipelineStatistics
from swarm.broker.reports.trace import Tracer
from swarm.broker.requests.requests import Requests
from swarm.broker.state import State, WorkerState
from swarm.broker.state.past import Past
from swarm.broker.state.prefix import PrefixCache
from swarm.broker.state.workers import Judgement
from swarm.broker.steps import scheduler
from swarm.wire.messages import (
    Ack,
    Attach,
    Cancel,
    ClientMessage,
    Describe,
    Detach,
    GetAsset,
    HostDone,
    HostHello,
    Join,
    LookUp,
    Query,
    Recall,
    RequestMessage,
    ShowSettings,
    Steer,
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


class BrokerCore:
    """Decides what the broker does (see the module)."""

    def __init__(self, settings: BrokerSettings, now: float, past: Past | None = None) -> None:
        self.settings = settings
        self.state = State(
            lineage=settings.lineage, started_at=now, now=now, ticked_at=now, prefix=PrefixCache(settings.prefix)
        )
        self.state.ways.relay = settings.relay
        self._out = Outbox()
        self._tracer = Tracer(settings.trace_steps, settings.requests.retain_s)
        self._statistics = PipelineStatistics()
        latencies = Latencies()
        self._requests = Requests(self.state, settings.requests, self._out, tracer=self._tracer, latencies=latencies)
        self._procedure = Procedure(self.state, settings.plan, settings.data_endpoint, self._out, settings.key)
        self._members = Members(
            self.state, settings.member_settings, self._procedure, self._requests, out=self._out, now=now
        )
        self._hosts = Hosts(self.state.hosts, self._out)
        self._doors = Doors(self.state.doors, self._out)
        self._inquiries = Inquiries(
            self.state,
            settings.requests,
            self._out,
            version=settings.version,
            procedure=self._procedure,
            members=self._members,
            tracer=self._tracer,
            statistics=self._statistics,
            latencies=latencies,
            judgements=self.judgements,
        )
        self._lost_steps = LostSteps(self.state, self._members.vigil, self._procedure, self._out)
        self._num_events = 0  # part of the event ids in logs
        if past is not None:
            self._restore(past, now)

    def _restore(self, past: Past, now: float) -> None:
        """Resume where the previous broker ended; findings on the way are logged with the first event."""
        self.state.book.begin_above(past.epoch)
        self._requests.durability.restore(past, now)
        self._procedure.restart.begin(past, now, self.settings.plan.gather_s)
        if past.manifest is not None:
            self.state.learn(past.manifest)
            self._requests.durability.model_known(now)
        self.state.journal_notes = past.notes
        for text in past.notes:
            self._out.note("journal_was_damaged", "error", what=text)
        if past.requests:
            unended = sum(not request.ended for request in past.requests)
            self._out.note("requests_restored", epoch=past.epoch, requests=len(past.requests), unended=unended)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; return the resulting actions, in order."""
        self._num_events += 1
        self._notice_own_pause(event, now)
        self.state.now = now
        self._route(event, now)
        self._fill_pipe(now)
        doors = self._members.keyring.changes()  # before the orders that make peers connect there
        actions = [*doors, *(self._of_this_life(action) for action in self._out)]
        self._out.clear()
        return actions

    def _of_this_life(self, action: Action) -> Action:
        """Add this broker's lineage, by which workers recognise whose epochs, steps and sequences these are."""
        match action:
            case OrderWorker(peer, message):
                return OrderWorker(peer, msgspec.structs.replace(message, lineage=self.state.lineage))
            case Dispatch(step):
                return Dispatch(msgspec.structs.replace(step, lineage=self.state.lineage))
            case _:
                return action

    def workers_here(self) -> list[str]:
        """Return the names of workers on the broker's own machine, including those that may come back."""
        found = self.state.workers.values()
        return [worker.name for worker in found if not worker.belongs_to and worker.state is not WorkerState.LEFT]

    @property
    def cause(self) -> str:
        """Id of the event that was handled last, for ``actions.caused``."""
        return f"{self.settings.run}{self._num_events:x}"

    def _route(self, event: Event, now: float) -> None:
        match event:
            case StepFinished(done):
                self._step_finished(done, now)
            case TokensWritten(committed):
                self._requests.growth.committed(committed)
            case BeatHeard(beat, key):
                self._members.beat(beat, now, key)
            case ClientSaid(client, message, account):
                self._client_said(client, message, account, now)
            case WorkerSaid(peer, message, owner, not_at):
                self._members.said(peer, message, now, owner, not_at)
            case WorkerDisconnected() | KeyRevoked():
                self._worker_missed(event, now)
            case ClientUnreachable() | ClientStuck():
                self._client_missed(event, now)
            case AssetPartArrived():
                self._members.asset_part_arrived(event, now)
            case MessageRefused():
                self._message_refused(event, now)
            case Tick():
                self._tick(now)
            case DoorClosed() | DescriptorsCounted():
                self._doors.handle(event, now)
            case _:
                self._journal_said(event, now)

    def _journal_said(self, event: Event, now: float) -> None:
        match event:
            case AcceptanceWritten(request_id, sequences):
                self._requests.accepted(request_id, sequences)
            case EpochWritten(epoch):
                self._procedure.epoch_written(epoch, now)
            case EndWritten(sequence):
                self._requests.durability.end_was_written(sequence)
            case EndNotWritten(sequence):
                self._requests.durability.end_was_not_written(sequence)
            case RequestRead(request_id, record, problem):
                self._requests.read(request_id, record, problem, now)
            case DoorTried(epoch, problem):
                self._procedure.tried(epoch, problem, now)
            case RulesChanged(rules):
                self._procedure.ruled(rules, now)
            case ListRead() | Solved():
                self._inquiries.found(event, now)
            case JournalFigures(values):
                self.state.journal_figures = values
            case ProcessFigures(values):
                self.state.process_figures = values
            case _:
                self._journal_is(event, now)

    def _journal_is(self, event: Event, now: float) -> None:
        match event:
            case JournalBroke(reason):
                self._requests.durability.journal_broke(reason, now)
            case JournalMended():
                self._requests.durability.journal_mended()
            case JournalRenewed(note, next_sequence):
                self._journal_renewed(note, next_sequence, now)
            case JournalRewritten():
                self._out.note("journal_rewritten", requests=len(self.state.requests))

    def _journal_renewed(self, note: str, next_sequence: int, now: float) -> None:
        """Write what the new journal needs from memory, the epoch last: with that it is complete."""
        self.state.count("journals_renewed")
        self.state.journal_notes = (*self.state.journal_notes, note)[-MAX_NOTES:]
        self._out.note("journal_begun_anew", "error", what=note)
        self._requests.durability.journal_renewed(next_sequence, now)
        self._out.append(WriteAnew(self._procedure.as_written(), self.state.next_sequence))

    def _message_refused(self, refused: MessageRefused, now: float) -> None:
        self.state.count(f"malformed_{refused.door}")
        if refused.foreign:
            self._members.entry.not_understood(refused.peer, refused.foreign)
        if refused.door == "data":  # most likely the last stage's answer to a step, which is not sent again
            self._members.damaged(now)

    def _fill_pipe(self, now: float) -> None:
        while (step := scheduler.next_step(self.state, self.settings.scheduler, now)) is not None:
            self.state.count("steps")
            self.state.count("rows", len(step.rows))
            self.state.count("positions", len(step.tokens))
            self.state.book.gauge.dispatched(step.step, step.rows)
            self._statistics.dispatched(step, len(self.state.flights), len(self.state.waiting))
            self._out.append(Dispatch(step))
        for sequence in self.state.take_hopeless():
            self._requests.ends.too_late(sequence, now)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step_finished(self, done: StepDone, now: float) -> None:
        current = self.state.book.current
        counts = current is not None and current.epoch == done.epoch and done.lineage == self.state.lineage
        flight = self.state.landed(done.step) if counts else None
        if flight is None:
            self.state.count("stale_steps")
            return
        self.state.setbacks.step_came_through()
        if self.state.evidence.steps:
            self._members.blame.came_through(done.kv, now)
        self.state.count("step_seconds", now - flight.sent_at)
        self.state.book.gauge.finished(done.step, done.hops, now - flight.sent_at)
        self._tracer.finished(flight.sent_at, now, done)
        if self._statistics.finished(now - flight.sent_at, done) and self._statistics.is_due(
            self.settings.profile_every
        ):
            self._out.note("profile", "info", **self._statistics.profile())
        self.state.costs.step_done(flight.num_tokens, flight.sent_at, now)
        scheduler.acknowledge(self.state, done.kv, flight, keeps_kv=self.settings.scheduler.kv_cache)
        if recovery := self.state.recoveries.step_done(rebuilding=not self.state.rebuilding.is_idle, now=now):
            self._procedure.recovered(recovery)
        self._requests.growth.sampled(done.sampled, done.hops, now)
        for failure in done.failed:
            sequence = self.state.sequences.get(failure.sequence)
            if sequence is not None:
                self._requests.ends.end(sequence, "failed", now, failure.reason)
        scheduler.put_off(self.state, done.late, flight)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client_said(self, client: bytes, message: ClientMessage, account: Account | None, now: float) -> None:
        self._procedure.look_again(now)
        match message:
            case Submit() | Recall() | LookUp() | Attach() | Ack() | Stop() | Cancel() | Detach():
                self._about_request(client, message, account, now)
            case Describe():
                self._inquiries.describe(client)
            case GetAsset():
                self._inquiries.send_asset(client, message)
            case Query():
                self._inquiries.query(client, message, account, now)
            case Join():
                self._hosts.join(client, message)
            case HostHello():
                self._hosts.hello(client, message)
            case HostDone():
                self._hosts.done(message)
            case StopWorker():
                self._inquiries.stop_worker(client, message)
            case Steer():
                self._inquiries.steer(client, message)
            case ShowSettings():
                self._inquiries.show_settings(client, message)

    def _worker_missed(self, event: WorkerDisconnected | KeyRevoked, now: float) -> None:
        if isinstance(event, KeyRevoked):
            self._members.key_revoked(event.key, now)
        else:
            self._members.disconnected(event.peer, now)

    def _client_missed(self, event: ClientUnreachable | ClientStuck, now: float) -> None:
        if isinstance(event, ClientStuck):
            self._requests.stuck(event.client, now)
            return
        self._requests.unreachable(event.client, now)
        self._hosts.unreachable(event.client)

    def _about_request(self, client: bytes, message: RequestMessage, account: Account | None, now: float) -> None:
        match message:
            case Submit():
                self._requests.submit(client, message, account, now)
            case Recall() | LookUp():
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

    # --- time --------------------------------------------------------------------------------------------------------

    def judgements(self, now: float) -> dict[str, Judgement]:
        """Return the verdict on every worker, with its evidence."""
        return self._members.vigil.judgements(now)

    def _tick(self, now: float) -> None:
        self._members.tick(now)
        self._lost_steps.tick(now)
        self._requests.tick(now)
        self._tracer.forget_old(now)
        self._doors.tick(now)
        self._procedure.rebuilder.tick(now)
        if not self.state.running and (recovery := self.state.recoveries.nothing_runs(now)):
            self._procedure.recovered(recovery)
        self._procedure.tick(now)
        self.state.ticked_at = now
        for wrong in self.state.check() if self.settings.check_rules else ():
            self.state.count("rules_broken")
            self._out.note("rule_broken", "error", what=wrong)

    def _notice_own_pause(self, event: Event, now: float) -> None:
        """If the broker itself stood still, move every deadline with consequences by the length of the pause. Many
        short pauses between two ticks count as one long one: waiting messages are handled before a tick, and verdicts
        are given only at ticks."""
        self._forgive_since(self.state.now, now)
        if isinstance(event, Tick):
            self._forgive_since(self.state.ticked_at, now)

    def _forgive_since(self, last_at: float, now: float) -> None:
        if now - last_at > PAUSE_S:
            self.state.count("own_pauses")
            self.state.forgive(now - last_at - USUAL_GAP_S, now)
