"""The broker's process: its core with its timer, its journal and its links.

It dies and is started again; the disk stays. Simulated links replace the sockets of the production shell; nothing is
decided here.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from swarm.broker import actions as broker_act
from swarm.broker import events as broker_event
from swarm.broker.core import BrokerCore, CoreSettings
from swarm.broker.planning.plan_query import answer_query
from swarm.broker.speculation.depth import DepthControl
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.sim.actors.draft import SimDraft
from swarm.sim.actors.environment import Environment
from swarm.sim.actors.guesses import SimProposer
from swarm.sim.actors.routes import RELAY
from swarm.sim.checks import effects, fates
from swarm.sim.checks.sender_check import BROKER
from swarm.sim.journal import SimDisk, SimJournal, SimJournalFact
from swarm.sim.network import FakeListener, SimLink, fake_public_key
from swarm.sim.views import CONNECT_TIMEOUT_S, TICK_S
from swarm.wire.messages import Activate, Prepare, Rejected, Step

DESCRIPTORS = 1024  # limit of the process's descriptors
JOURNAL_DELAY_S = (0.0, 0.001)  # from the journal's thread to the loop
SOLVE_S = 0.3  # for computing a plan in another process
RESTART_S = (0.3, 2.0)  # a supervisor's back-off and a process's start


@dataclass(slots=True)
class BrokerTrap:
    """Point at which the broker dies: before or after the ``left``-th event, action or message of a kind, or point of
    its journal."""

    when: str
    kind: str
    left: int
    power: bool  # its machine loses power, too


def type_name(what: broker_event.Event | broker_act.Action) -> str:
    """Return the type name of the message in the event or action, or of the event or action itself."""
    match what:
        case broker_event.ClientMessageReceived(_, message) | broker_event.WorkerMessageReceived(_, message):
            return type(message).__name__
        case broker_act.SendToClient(_, message, _) | broker_act.SendToWorker(_, message):
            return type(message).__name__
        case _:
            return type(what).__name__


class BrokerNode:
    """Simulated process of the broker."""

    core: BrokerCore

    def __init__(self, cluster: Environment, settings: CoreSettings) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._settings = settings
        # its state directory, and another one for swaps
        self.disk, self._other_disk = SimDisk(self._world), SimDisk(self._world, 1)
        self.traps: list[BrokerTrap] = []
        self.closed_listeners: set[str] = set()
        self.short_until = 0.0  # no descriptors are free before this time
        self.is_alive = self.is_frozen = False  # ``is_frozen``: stopped as by SIGSTOP
        self.key = fake_public_key("broker") if cluster.uses_keys else None
        self.life = 0  # number of the process, from 1 on
        self._continued_at = -1.0  # end of its last standstill or absence
        self._frozen_at = 0.0
        self._longest_pause_s = 0.0  # longest standstill so far
        self._repeats_writes = False  # the current event makes it repeat writes of an earlier moment
        self._retention_check = fates.RetentionCheck(settings.requests.client_grace_s)
        self._wake_at = inf  # as the core wanted at last
        self._unwritten: set[tuple[int, ...]] = set()  # sequences of requests that wait for the journal
        self.started_at = 0.0
        self._held_back: list[broker_event.Event] = []  # events received while frozen
        self._draft: SimDraft | None = None
        self._pipeline: SimLink | None = None  # link to the first stage
        self._pipeline_endpoint = ""
        self._start()

    @property
    def has_journal(self) -> bool:
        return self._settings.requests.has_journal

    @property
    def is_away(self) -> bool:
        """Whether the broker is frozen or dead, so that it can see nothing."""
        return self.is_frozen or not self.is_alive

    @property
    def longest_pause_s(self) -> float:
        """The longest single standstill."""
        return max(self._longest_pause_s, self._world.now - self._frozen_at if self.is_frozen else 0.0)

    def accepts_connections(self, door: str) -> bool:
        """Whether the broker is alive and accepts new connections at this listener."""
        return self.is_alive and door not in self.closed_listeners

    def accepts_key(self, door: str, key: str | None) -> bool:
        """Whether this key is accepted at this listener, for heartbeats or data."""
        return self._listeners[door].accepts(key)

    def relays(self, ticket: str) -> bool:
        """Whether the relay accepts this ticket. The relay runs in the broker's process, so it needs a live broker."""
        return self.is_alive and ticket in self._tickets

    def close_listener(self, door: str, for_s: float) -> None:
        """Make accepting fail for lack of descriptors, for ``for_s`` seconds."""
        self.short_until = max(self.short_until, self._world.now + for_s)
        if self.accepts_connections(door):
            self.closed_listeners.add(door)
            self.feed(broker_event.AcceptStopped(door, errno.EMFILE, DESCRIPTORS))

    def open_door(self, door: str) -> None:
        self.closed_listeners.discard(door)

    # --- coming and going --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        past = self.disk.open(self._settings.requests.retain_s) if self.life else None
        settings = replace(
            self._settings, lineage=self.disk.start_lineage(), key=self.key, relay=RELAY if self.key else ""
        )
        self._listeners = {door: FakeListener(uses_keys=self._cluster.uses_keys) for door in ("beat", "data")}
        self._tickets: frozenset[str] = frozenset()
        self.life += 1
        self.is_alive = True
        news = self._cluster.network.link("broker", "disk", "client", JOURNAL_DELAY_S)
        self.journal = SimJournal(self.disk, news, self._on_facts, self.spring_trap)
        self.core = self._make_core(settings, past)
        self.core.state.images.room = self._cluster.image_room
        self._retention_check.on_broker_restarted(self.core.state, self._world.now)
        self._unwritten = set()
        self.started_at = self._world.now
        life = self.life
        self._draft = (
            SimDraft(self._cluster, lambda event: self._feed_life(life, event)) if settings.has_draft else None
        )
        self._world.schedule(0.0, lambda: self._tick(life))

    def _feed_life(self, life: int, event: broker_event.Event) -> None:
        """Feed an event of a process that ends with this broker process."""
        if life == self.life:
            self.feed(event)

    def _make_core(self, settings: CoreSettings, past: JournalSnapshot | None) -> BrokerCore:
        conditions, now = self._cluster.speculation, self._world.now
        if conditions is None:
            return BrokerCore(settings, now, past)
        proposer = SimProposer(conditions, self._cluster.manifest, self._world.speculation_random)
        control = DepthControl() if conditions.is_limited else None
        return BrokerCore(settings, now, past, proposers=(proposer,), control=control)

    def crash(self, *, power: bool = False) -> None:
        """Kill the process, as by SIGKILL or a power cut; its supervisor restarts it.

        A broker without a journal is left alone: it would forget everything, as its users accept.
        """
        if not self.is_alive or not self.has_journal:
            return
        self.is_alive = self.is_frozen = False
        self._held_back.clear()
        self.closed_listeners.clear()
        self.journal.kill()
        self._close_pipeline()
        lost = self.disk.lose_power() if power else 0
        self._world.tell("world", f"** the broker dies{f', {lost} transactions with it' if power else ''}")
        self._cluster.on_broker_gone(power=power)
        self._world.schedule(self._world.draw(RESTART_S), self._restart)

    def restore_backup(self, share: float) -> None:
        """Kill the broker, and replace its journal with a backup."""
        if self.is_alive and self.has_journal:
            self.crash()
            self.disk.restore_backup(share)
            self._cluster.on_journal_changed()

    def swap_journals(self) -> bool:
        """Kill the broker, and restart it with the other state directory. Return whether that was possible."""
        if not self.is_alive or not self.has_journal:
            return False
        self.crash()
        self.disk, self._other_disk = self._other_disk, self.disk
        self.disk.is_full = False
        self._cluster.on_journal_changed()
        return True

    def _restart(self) -> None:
        self._world.tell("world", "** the broker starts again")
        self._continued_at = self._world.now
        self._start()
        self._cluster.on_broker_back()

    def spring_trap(self, when: str, kind: str) -> bool:
        """Spring a matching trap; return whether the broker dies here."""
        for trap in self.traps:
            if trap.when == when and trap.kind == kind and self.is_alive:
                trap.left -= 1
                if trap.left <= 0:
                    self.traps.remove(trap)
                    self._world.tell("world", f"** {when} {kind}:")
                    self._cluster.fault_counts[f"broker_crash {when} {kind}"] += 1
                    self.crash(power=trap.power)
                    return True
        return False

    def freeze(self) -> None:
        if not self.is_frozen:
            self.is_frozen, self._frozen_at = self.is_alive, self._world.now

    def thaw(self) -> None:
        """Continue after a freeze. Events that arrived meanwhile come in a random order of connections and timer."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        self._continued_at = self._world.now
        self._longest_pause_s = max(self._longest_pause_s, self._world.now - self._frozen_at)
        self._cluster.verdict_check.on_broker_paused(self._frozen_at)
        held, self._held_back = self._held_back, []
        if self._world.random.random() < 0.5:
            held.insert(0, broker_event.Tick())
        for event in held:
            self.feed(event)

    def has_paused_since(self, moment: float) -> bool:
        return self._continued_at >= moment

    # --- events and actions ------------------------------------------------------------------------------------------

    def feed(self, event: broker_event.Event) -> None:
        """Pass an event to the core, if the broker lives; a frozen one gets it later."""
        if not self.is_alive:
            return
        if self.is_frozen:
            if not isinstance(event, broker_event.Tick):
                self._held_back.append(event)
            return
        kind = type_name(event) if self.traps else ""
        if kind and self.spring_trap("before", kind):
            return
        self._world.tell("broker", event)
        if isinstance(event, broker_event.AcceptanceWritten):
            self._unwritten.discard(event.sequences)
        elif isinstance(event, broker_event.JournalBroke):
            self._unwritten.clear()
        self._repeats_writes = isinstance(event, broker_event.JournalRenewed | broker_event.EndNotWritten)
        if isinstance(event, broker_event.StepFinished):
            self._cluster.audit.check_step(event.done, self.core.state)
        snapshot = effects.take_snapshot(event, self.core.state)
        fates_before = fates.snapshot_fates(event, self.core.state, self._world.now)
        actions = self.core.handle(event, self._world.now)
        fates.check_fates(fates_before, self.core.state)
        self._retention_check.update(event, self.core.state, self._world.now)
        for action in actions:
            if not self._perform_or_die(action):
                return
        if actions or not isinstance(event, broker_event.Tick | broker_event.HeartbeatReceived):
            self._cluster.check_after_broker(snapshot)
        if kind:
            self.spring_trap("after", kind)
        if self.is_alive and self.core.wake_at != self._wake_at:
            self._wake_at = self.core.wake_at
            self._wake_later(self._wake_at)

    def _wake_later(self, at: float) -> None:
        """Feed ``WaitExpired`` at the time that the core wants, unless it has come to want another one."""
        if at < inf:
            life = self.life
            self._world.schedule(max(0.0, at - self._world.now), lambda: self._wake(at, life))

    def _wake(self, at: float, life: int) -> None:
        if self.is_alive and self.life == life and self._wake_at == at:
            self._wake_at = inf
            self.feed(broker_event.WaitExpired())

    def _on_facts(self, facts: Sequence[SimJournalFact]) -> None:
        for fact in facts:
            if isinstance(fact, broker_event.JournalRewritten) and self.is_alive:
                self._cluster.promise_check.on_journal_rewritten(self.core.state)
                self._cluster.audit.on_journal_rewritten(self.disk)
            self.feed(fact)

    def _tick(self, life: int) -> None:
        if self.is_alive and life == self.life:
            self.journal.poll()
            self.feed(broker_event.Tick())
            self._world.schedule(TICK_S * self._cluster.stride, lambda: self._tick(life))

    def _perform_or_die(self, action: broker_act.Action) -> bool:
        kind = type_name(action) if self.traps else ""
        if kind and self.spring_trap("before", kind):
            return False
        self._perform(action)
        return not (kind and self.spring_trap("after", kind))

    def _perform(self, action: broker_act.Action) -> None:
        if not isinstance(action, broker_act.WriteLog):
            self._world.tell("broker ->", action)
        self._audit(action)
        match action:
            case broker_act.SendToClient(client, message, _):
                self._cluster.send_to_client(client, message)
            case broker_act.SendToWorker(peer, message):
                self._cluster.send_to_worker(peer, message)
            case broker_act.Dispatch(step):
                self._dispatch(step)
            case broker_act.ConnectPipeline(_, endpoint):
                self._close_pipeline()
                self._pipeline, self._pipeline_endpoint = (
                    self._cluster.routes.open_link("broker", endpoint, self.key),
                    endpoint,
                )
            case broker_act.DisconnectPipeline():
                self._close_pipeline()
            case broker_act.WriteLog() | broker_act.ShowOwnSettings() | broker_act.StopDraft():
                self._world.tell("broker ##", action)
            case broker_act.ReadRequest() | broker_act.ReadList():
                self.journal.read(action, self.feed)
            case broker_act.CountDescriptors():
                used = DESCRIPTORS if self._world.now < self.short_until else 0
                self._feed_later(0.0, broker_event.DescriptorsCounted(used, DESCRIPTORS))
            case (
                broker_act.SetAllowedKeys()
                | broker_act.ResumeAccepting()
                | broker_act.ProbeRoute()
                | broker_act.SetRelayTickets()
            ):
                self._perform_on_listener(action)
            case broker_act.Solve() | broker_act.AskDraft():
                self._perform_elsewhere(action)
            case _:
                self.journal.write(action)

    def _perform_elsewhere(self, action: broker_act.Solve | broker_act.AskDraft) -> None:
        """Pass work to another process of the broker."""
        if isinstance(action, broker_act.Solve):
            self._feed_later(SOLVE_S, broker_event.Solved(action.number, answer_query(action.query)))
        elif self._draft is not None:
            self._draft.ask(action.request)

    def _perform_on_listener(
        self,
        action: broker_act.SetAllowedKeys
        | broker_act.ResumeAccepting
        | broker_act.ProbeRoute
        | broker_act.SetRelayTickets,
    ) -> None:
        match action:
            case broker_act.SetRelayTickets(tickets):
                self._tickets = tickets
            case broker_act.SetAllowedKeys(door, keys):
                self._listeners[door].set_allowed(keys)
            case broker_act.ResumeAccepting(door):
                self.open_door(door)
            case broker_act.ProbeRoute(epoch, endpoint):
                if not self._cluster.routes.can_reach("broker", endpoint):
                    self._feed_later(CONNECT_TIMEOUT_S, broker_event.RouteTested(epoch, "nothing answers"))

    def _feed_later(self, delay: float, event: broker_event.Event) -> None:
        """Feed an event later, unless the broker has been restarted by then."""
        life = self.life
        self._world.schedule(delay, lambda: self.feed(event) if self.life == life else None)

    def _audit(self, action: broker_act.Action) -> None:
        """Check that a request rejected as too large is too large at this moment, and similar claims."""
        audit, state = self._cluster.audit, self.core.state
        self._cluster.promise_check.check_action(action)
        self._cluster.adapter_check.on_action(action, state, is_repeated=self._repeats_writes)
        if isinstance(action, broker_act.SendToWorker | broker_act.Dispatch):
            self._cluster.spill_check.on_action(action, state)
        if isinstance(action, broker_act.Dispatch):
            self._cluster.image_check.on_step(action.step, state)
        self._cluster.speculation_check.on_action(action, state, is_repeated=self._repeats_writes)
        if isinstance(action, broker_act.SendToWorker) and isinstance(action.message, Prepare):
            self._cluster.sender_check.on_plan(state)
        if isinstance(action, broker_act.SendToWorker) and isinstance(action.message, Activate):
            assert state.plans.current is not None
            self._cluster.routes.check_plan(state.plans.current)
        if self._repeats_writes and isinstance(action, broker_act.WriteAcceptance | broker_act.WriteEnd):
            return  # a repeated write, of an earlier moment: the stages may hold more by now
        if isinstance(action, broker_act.WriteEnd):
            audit.on_sequence_end(action.sequence)
        match action:
            case broker_act.SendToClient(_, Rejected(code="too_large", request_id=request_id)):
                audit.check_too_large(request_id, state)
            case broker_act.SendToClient(_, Rejected(code="overloaded", request_id=request_id)):
                at_door = sum(map(len, self._unwritten))
                audit.check_rejected(request_id, state, self._settings.requests.max_queue, at_door)
            case broker_act.WriteAcceptance(_, sequences):
                self._unwritten.add(sequences)
            case broker_act.WriteEnd():
                self._audit_end(action)
            case _:
                pass

    def _audit_end(self, action: broker_act.WriteEnd) -> None:
        """Check that a sequence that ends without an answer ends for the reason that the broker gives."""
        audit, state = self._cluster.audit, self.core.state
        match action:
            case broker_act.WriteEnd(sequence, "failed") if "the stages hold" in state.sequences[sequence].detail:
                audit.check_too_large(state.sequences[sequence].request.id, state)
            case broker_act.WriteEnd(sequence, "failed") if "the deadline" in state.sequences[sequence].detail:
                audit.check_deadline(state.sequences[sequence].request, state, self._world.now)
            case broker_act.WriteEnd(sequence, "cancelled", _, detail) if "did not come back" in detail:
                self._retention_check.check_given_up(
                    state.sequences[sequence].request, self._world.now, self._continued_at
                )
            case broker_act.WriteEnd(sequence, "failed") if "was dropped" in state.sequences[sequence].detail:
                self._cluster.adapter_check.check_given_up(state.sequences[sequence].request, state)
            case broker_act.WriteEnd(sequence, "failed") if "quarantined" in state.sequences[sequence].detail:
                ended = state.sequences[sequence]
                if for_its_steps := "its steps failed" in ended.detail:
                    self._cluster.blame_check.on_request_convicted()
                audit.check_quarantined(ended.request, for_its_steps=for_its_steps)
            case _:
                pass

    def _dispatch(self, step: Step) -> None:
        endpoint = self._pipeline_endpoint
        if self._pipeline is not None:
            self._pipeline.send(lambda: self._cluster.send_to_stage(endpoint, step, None, BROKER))

    def drop_pipeline(self, for_s: float) -> None:
        """Break the connection to the first stage for a while."""
        if self._pipeline is not None:
            self._pipeline.drop(for_s, keeps=True)

    def _close_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
