"""The broker's process: its core with its timer, its journal and its links.

It dies and is started again; the disk stays. Simulated links replace the sockets of the production shell; nothing is
decided here.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.broker import actions as broker_act
from swarm.broker import events as broker_event
from swarm.broker.core import BrokerCore
from swarm.broker.core_settings import BrokerSettings
from swarm.broker.drafts.questions import answered
from swarm.sim.actors.surroundings import Surroundings
from swarm.sim.actors.ways import RELAY
from swarm.sim.checks import fates, guard
from swarm.sim.checks.neighbours import BROKER
from swarm.sim.doors import Door, key_of
from swarm.sim.journal import Disk, Fact, Journal
from swarm.sim.network import Link
from swarm.sim.roles import TICK_S, TRY_S
from swarm.wire.messages import Activate, Prepare, Rejected, Step

DESCRIPTORS = 1024  # limit of the process's descriptors
NEWS_S = (0.0, 0.001)  # from the journal's thread to the loop
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


def kind_of(what: broker_event.Event | broker_act.Action) -> str:
    """Return the type name of the message in the event or action, or of the event or action itself."""
    match what:
        case broker_event.ClientSaid(_, message) | broker_event.WorkerSaid(_, message):
            return type(message).__name__
        case broker_act.SayClient(_, message, _) | broker_act.OrderWorker(_, message):
            return type(message).__name__
        case _:
            return type(what).__name__


class BrokerNode:
    """Simulated process of the broker."""

    core: BrokerCore

    def __init__(self, cluster: Surroundings, settings: BrokerSettings) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._settings = settings
        # its state directory, and another one for swaps
        self.disk, self._other_disk = Disk(self._world), Disk(self._world, 1)
        self.traps: list[BrokerTrap] = []
        self.shut_doors: set[str] = set()
        self.short_until = 0.0  # no descriptors are free before this time
        self.alive = self.frozen = False  # ``is_frozen``: stopped as by SIGSTOP
        self.key = key_of("broker") if cluster.uses_keys else None
        self.life = 0  # number of the process, from 1 on
        self._went_on_at = -1.0  # end of its last standstill or absence
        self._frozen_at = 0.0
        self._slept_s = 0.0  # longest standstill so far
        self._writes_again = False  # the current event makes it repeat writes of an earlier moment
        self._keeping = fates.Keeping(settings.requests.client_grace_s)
        self._at_door: set[tuple[int, ...]] = set()  # sequences of requests that wait for the journal
        self.started_at = 0.0
        self._held_back: list[broker_event.Event] = []  # events received while frozen
        self._pipe: Link | None = None  # link to the first stage
        self._pipe_to = ""
        self._start()

    @property
    def has_journal(self) -> bool:
        return self._settings.requests.has_journal

    @property
    def is_away(self) -> bool:
        """Whether the broker is frozen or dead, so that it can see nothing."""
        return self.frozen or not self.alive

    @property
    def longest_sleep_s(self) -> float:
        """The longest single standstill."""
        return max(self._slept_s, self._world.now - self._frozen_at if self.frozen else 0.0)

    def lets_in(self, door: str) -> bool:
        """Whether the broker is alive and accepts new connections at this listener."""
        return self.alive and door not in self.shut_doors

    def hears(self, door: str, key: str | None) -> bool:
        """Whether this key is accepted at this listener, for heartbeats or data."""
        return self._doors[door].hears(key)

    def passes_on(self, ticket: str) -> bool:
        """Whether the relay, which lives in the broker's process, accepts this ticket."""
        return self.alive and ticket in self._tickets

    def shut_door(self, door: str, for_s: float) -> None:
        """Make accepting fail for lack of descriptors, for ``for_s`` seconds."""
        self.short_until = max(self.short_until, self._world.now + for_s)
        if self.lets_in(door):
            self.shut_doors.add(door)
            self.feed(broker_event.DoorClosed(door, errno.EMFILE, DESCRIPTORS))

    def open_door(self, door: str) -> None:
        self.shut_doors.discard(door)

    # --- coming and going --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        past = self.disk.open(self._settings.requests.retain_s) if self.life else None
        settings = replace(self._settings, lineage=self.disk.begin(), key=self.key, relay=RELAY if self.key else "")
        self._doors = {door: Door(uses_keys=self._cluster.uses_keys) for door in ("beat", "data")}
        self._tickets: frozenset[str] = frozenset()
        self.life += 1
        self.alive = True
        news = self._cluster.network.link("broker", "disk", "client", NEWS_S)
        self.journal = Journal(self.disk, news, self._take, self.springs)
        self.core = BrokerCore(settings, self._world.now, past)
        self._keeping.restarted(self.core.state, self._world.now)
        self._at_door = set()
        self.started_at = self._world.now
        life = self.life
        self._world.at(0.0, lambda: self._tick(life))

    def crash(self, *, power: bool = False) -> None:
        """Kill the process, as by SIGKILL or a power cut; its supervisor restarts it.

        A broker without a journal is left alone: it would forget everything, as its users accept.
        """
        if not self.alive or not self.has_journal:
            return
        self.alive = self.frozen = False
        self._held_back.clear()
        self.shut_doors.clear()
        self.journal.kill()
        self._close_pipe()
        lost = self.disk.lose_power() if power else 0
        self._world.tell("world", f"** the broker dies{f', {lost} transactions with it' if power else ''}")
        self._cluster.broker_gone(power=power)
        self._world.at(self._world.draw(RESTART_S), self._come_back)

    def put_back(self, share: float) -> None:
        """Kill the broker, and replace its journal with a backup."""
        if self.alive and self.has_journal:
            self.crash()
            self.disk.put_back(share)
            self._cluster.journal_changed()

    def swap_journals(self) -> bool:
        """Kill the broker, and restart it with the other state directory. Return whether that was possible."""
        if not self.alive or not self.has_journal:
            return False
        self.crash()
        self.disk, self._other_disk = self._other_disk, self.disk
        self.disk.is_full = False
        self._cluster.journal_changed()
        return True

    def _come_back(self) -> None:
        self._world.tell("world", "** the broker starts again")
        self._went_on_at = self._world.now
        self._start()
        self._cluster.broker_back()

    def springs(self, when: str, kind: str) -> bool:
        """Spring a matching trap; return whether the broker dies here."""
        for trap in self.traps:
            if trap.when == when and trap.kind == kind and self.alive:
                trap.left -= 1
                if trap.left <= 0:
                    self.traps.remove(trap)
                    self._world.tell("world", f"** {when} {kind}:")
                    self._cluster.struck[f"broker_crash {when} {kind}"] += 1
                    self.crash(power=trap.power)
                    return True
        return False

    def freeze(self) -> None:
        if not self.frozen:
            self.frozen, self._frozen_at = self.alive, self._world.now

    def thaw(self) -> None:
        """Continue after a freeze. Events that arrived meanwhile come in a random order of connections and timer."""
        if not self.frozen:
            return
        self.frozen = False
        self._went_on_at = self._world.now
        self._slept_s = max(self._slept_s, self._world.now - self._frozen_at)
        self._cluster.watch.broker_slept(self._frozen_at)
        held, self._held_back = self._held_back, []
        if self._world.random.random() < 0.5:
            held.insert(0, broker_event.Tick())
        for event in held:
            self.feed(event)

    def stood_still_since(self, moment: float) -> bool:
        return self._went_on_at >= moment

    # --- events and actions ------------------------------------------------------------------------------------------

    def feed(self, event: broker_event.Event) -> None:
        """Pass an event to the core, if the broker lives; a frozen one gets it later."""
        if not self.alive:
            return
        if self.frozen:
            if not isinstance(event, broker_event.Tick):
                self._held_back.append(event)
            return
        kind = kind_of(event) if self.traps else ""
        if kind and self.springs("before", kind):
            return
        self._world.tell("broker", event)
        if isinstance(event, broker_event.AcceptanceWritten):
            self._at_door.discard(event.sequences)
        elif isinstance(event, broker_event.JournalBroke):
            self._at_door.clear()
        self._writes_again = isinstance(event, broker_event.JournalRenewed | broker_event.EndNotWritten)
        if isinstance(event, broker_event.StepFinished):
            self._cluster.audit.step_came(event.done, self.core.state)
        guarded = guard.before(event, self.core.state)
        was = fates.before(event, self.core.state, self._world.now)
        actions = self.core.handle(event, self._world.now)
        fates.after(was, self.core.state)
        self._keeping.look(event, self.core.state, self._world.now)
        for action in actions:
            if not self._perform_or_die(action):
                return
        if actions or not isinstance(event, broker_event.Tick | broker_event.BeatHeard):
            self._cluster.after_broker(guarded)
        if kind:
            self.springs("after", kind)

    def _take(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            if isinstance(fact, broker_event.JournalRewritten) and self.alive:
                self._cluster.promises.rewritten(self.core.state)
                self._cluster.audit.rewritten(self.disk)
            self.feed(fact)

    def _tick(self, life: int) -> None:
        if self.alive and life == self.life:
            self.journal.look()
            self.feed(broker_event.Tick())
            self._world.at(TICK_S * self._cluster.stride, lambda: self._tick(life))

    def _perform_or_die(self, action: broker_act.Action) -> bool:
        kind = kind_of(action) if self.traps else ""
        if kind and self.springs("before", kind):
            return False
        self._perform(action)
        return not (kind and self.springs("after", kind))

    def _perform(self, action: broker_act.Action) -> None:
        if not isinstance(action, broker_act.Note):
            self._world.tell("broker ->", action)
        self._audit(action)
        match action:
            case broker_act.SayClient(client, message, _):
                self._cluster.to_client(client, message)
            case broker_act.OrderWorker(peer, message):
                self._cluster.to_worker(peer, message)
            case broker_act.Dispatch(step):
                self._dispatch(step)
            case broker_act.OpenPipe(_, endpoint):
                self._close_pipe()
                self._pipe, self._pipe_to = self._cluster.ways.link("broker", endpoint, self.key), endpoint
            case broker_act.ClosePipe():
                self._close_pipe()
            case broker_act.Note() | broker_act.ShowOwnSettings():
                self._world.tell("broker ##", action)
            case broker_act.ReadRequest() | broker_act.ReadList():
                self.journal.read(action, self.feed)
            case broker_act.CountDescriptors():
                used = DESCRIPTORS if self._world.now < self.short_until else 0
                self._after(0.0, broker_event.DescriptorsCounted(used, DESCRIPTORS))
            case broker_act.Admit() | broker_act.OpenDoor() | broker_act.TryDoor() | broker_act.Relay():
                self._see_to_door(action)
            case broker_act.Solve(number, question):
                self._after(SOLVE_S, broker_event.Solved(number, answered(question)))
            case _:
                self.journal.write(action)

    def _see_to_door(
        self, action: broker_act.Admit | broker_act.OpenDoor | broker_act.TryDoor | broker_act.Relay
    ) -> None:
        match action:
            case broker_act.Relay(tickets):
                self._tickets = tickets
            case broker_act.Admit(door, keys):
                self._doors[door].admit(keys)
            case broker_act.OpenDoor(door):
                self.open_door(door)
            case broker_act.TryDoor(epoch, endpoint):
                if not self._cluster.ways.reaches("broker", endpoint):
                    self._after(TRY_S, broker_event.DoorTried(epoch, "nothing answers"))

    def _after(self, delay: float, event: broker_event.Event) -> None:
        """Feed an event later, unless the broker has been restarted by then."""
        life = self.life
        self._world.at(delay, lambda: self.feed(event) if self.life == life else None)

    def _audit(self, action: broker_act.Action) -> None:
        """Check that a request rejected as too large is too large at this moment, and similar claims."""
        audit, state = self._cluster.audit, self.core.state
        self._cluster.promises.performs(action)
        if isinstance(action, broker_act.OrderWorker) and isinstance(action.message, Prepare):
            self._cluster.neighbours.planned(state)
        if isinstance(action, broker_act.OrderWorker) and isinstance(action.message, Activate):
            assert state.book.current is not None
            self._cluster.ways.begin(state.book.current)
        if self._writes_again and isinstance(action, broker_act.WriteAcceptance | broker_act.WriteEnd):
            return  # a repeated write, of an earlier moment: the stages may hold more by now
        if isinstance(action, broker_act.WriteEnd):
            audit.ends(action.sequence)
        match action:
            case broker_act.SayClient(_, Rejected(code="too_large", request_id=request_id)):
                audit.refused_for_size(request_id, state)
            case broker_act.SayClient(_, Rejected(code="overloaded", request_id=request_id)):
                at_door = sum(map(len, self._at_door))
                audit.sent_away(request_id, state, self._settings.requests.max_queue, at_door)
            case broker_act.WriteAcceptance(_, sequences):
                self._at_door.add(sequences)
            case broker_act.WriteEnd():
                self._audit_end(action)
            case _:
                pass

    def _audit_end(self, action: broker_act.WriteEnd) -> None:
        """Check that a sequence that ends without an answer ends for the reason that the broker gives."""
        audit, state = self._cluster.audit, self.core.state
        match action:
            case broker_act.WriteEnd(sequence, "failed") if "the stages hold" in state.sequences[sequence].detail:
                audit.refused_for_size(state.sequences[sequence].request.id, state)
            case broker_act.WriteEnd(sequence, "failed") if "the deadline" in state.sequences[sequence].detail:
                audit.too_late(state.sequences[sequence].request, state, self._world.now)
            case broker_act.WriteEnd(sequence, "cancelled", _, detail) if "did not come back" in detail:
                self._keeping.given_up(state.sequences[sequence].request, self._world.now, self._went_on_at)
            case broker_act.WriteEnd(sequence, "failed") if "quarantined" in state.sequences[sequence].detail:
                ended = state.sequences[sequence]
                if for_its_steps := "its steps failed" in ended.detail:
                    self._cluster.blame.convicted()
                audit.quarantined(ended.request, for_its_steps=for_its_steps)
            case _:
                pass

    def _dispatch(self, step: Step) -> None:
        endpoint = self._pipe_to
        if self._pipe is not None:
            self._pipe.carry(lambda: self._cluster.to_stage(endpoint, step, None, BROKER))

    def drop_pipe(self, for_s: float) -> None:
        """Break the connection to the first stage for a while."""
        if self._pipe is not None:
            self._pipe.drop(for_s, keeps=True)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.cut()
            self._pipe = None
