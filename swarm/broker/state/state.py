"""The broker's state: requests and their sequences, workers, the plan. Plain values with their questions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.broker.state.archive import Archive, Gone, Shelf
from swarm.broker.state.costs import StepCosts
from swarm.broker.state.evidence import Evidence
from swarm.broker.state.newcomers import Newcomers
from swarm.broker.state.plans import PlanBook, Rebuilding, Rechecks, Return, Steering
from swarm.broker.state.prefix import PrefixCache, PrefixRules
from swarm.broker.state.queue import Queue, Timers, TurnedAway, Unwritten
from swarm.broker.state.recoveries import Recoveries
from swarm.broker.state.running import Running
from swarm.broker.state.sequences import Request, Sequence
from swarm.broker.state.standing import SequenceState
from swarm.broker.state.workers import Ways, Worker
from swarm.wire.messages import BLOCK, NOBODYS, Asset, HostHello, Json, Lineage, Manifest, SequencePosition


@dataclass(slots=True)
class Flight:
    """A step in the pipe."""

    sequences: tuple[tuple[Sequence, int], ...]  # with the position each row ends at
    sent_at: float
    num_tokens: int = 0
    stays: dict[int, int] = field(default_factory=dict)  # sequence -> its ``stay`` when the step was sent


@dataclass(slots=True)
class Decided:
    """What the scheduler decided last, for whoever looks."""

    mode: str = ""  # in force: "batch" or "overlapped"
    depth: int = 0  # steps that may be in flight
    budget: int = 0  # tokens that a step may have beside running answers' next ones
    prefill: int = 0  # of those, tokens of prompts
    throttle: str = "none"  # what holds prompts back: "none", "pending" (shared out over the pipe), "kv" or "time"


@dataclass(slots=True)
class DoorBook:
    """What is told of doors that keep newcomers waiting. ``problem`` is there while one is closed."""

    problem: str = ""
    reason: str = ""  # the last problem's
    times: int = 0
    closed_s: float = 0.0  # in all, without the time that runs now
    opened_at: float = 0.0
    closed: set[str] = field(default_factory=set)  # which
    closed_at: float = 0.0
    look_at: float = 0.0  # when there may be descriptors again
    pause_s: float = 0.0  # between two looks

    def notes(self, now: float) -> list[str]:
        """For as long as this broker lives; while a door is closed, ``problem`` says more."""
        if self.problem or not self.times:
            return []
        often = "once" if self.times == 1 else f"{self.times} times"
        ago_s = now - self.opened_at
        return [
            f"newcomers were kept waiting {often}, {self.closed_s:.1f} s in all, until {ago_s:.0f} s ago: {self.reason}"
        ]


@dataclass(slots=True)
class Ticket:
    """A join that is under way. ``host`` is the connection it was sent to."""

    asker: bytes
    host: bytes


@dataclass(slots=True)
class HostBook:
    """Who can start workers, by their connections, and who has asked them for some."""

    connected: dict[bytes, HostHello] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    next_ticket: int = 1

    def promise(self, asker: bytes, host: bytes) -> int:
        """A host is asked; the number by which it answers."""
        number, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.tickets[number] = Ticket(asker, host)
        return number

    def check(self) -> str | None:
        """The first rule that does not hold, in words."""
        if any(ticket.host not in self.connected for ticket in self.tickets.values()):
            return "somebody waits for a host that is gone"
        return None


@dataclass(slots=True)
class KeyBook:
    """Whose keys the broker's own doors know (``members.keyring``), and what those doors were told last."""

    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    has_changed: bool = False
    heard_at: dict[str, frozenset[str]] = field(default_factory=dict)  # by door
    passed_on: frozenset[str] = frozenset()  # the relay's tickets


@dataclass(slots=True)
class Upload:
    """A file of the model that the worker ``incarnation`` was asked for."""

    asset: Asset
    incarnation: str
    heard_at: float
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Setbacks:
    """What went wrong since a step came through the last time, though nobody died."""

    lost: int = 0  # times that steps were lost
    damaged: int = 0  # messages that came damaged

    def step_came_through(self) -> None:
        self.lost = self.damaged = 0


@dataclass(slots=True)
class State:
    """Everything that the broker knows. Only ``core`` and its parts touch it."""

    lineage: Lineage = NOBODYS  # of this broker's life
    manifest: Manifest | None = None
    assets: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)  # of those that are on their way, by name
    requests: dict[str, Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    shelf: Shelf = field(default_factory=Shelf)  # which of the requests have ended
    archive: Archive = field(default_factory=Archive)  # what is asked about requests that are not here
    gone: Gone = field(default_factory=Gone)  # what is told of requests that are nowhere
    stuck: dict[bytes, float] = field(default_factory=dict)  # clients that did not read, and when they are tried again
    timers: Timers = field(default_factory=Timers)  # when requests are to be looked at
    unwritten: Unwritten = field(default_factory=Unwritten)  # who waits for the journal
    turned_away: TurnedAway = field(default_factory=TurnedAway)
    waiting: Queue = field(default_factory=Queue)
    running: Running = field(default_factory=Running)
    hopeless: list[Sequence] = field(default_factory=list)  # whose deadline can't be kept any more: to be ended
    costs: StepCosts = field(default_factory=StepCosts)
    decided: Decided = field(default_factory=Decided)
    to_release: list[int] = field(default_factory=list)
    to_retire: list[SequencePosition] = field(default_factory=list)
    journal_notes: tuple[str, ...] = ()  # what was wrong with the journal
    journal_problem: str = ""  # why nothing can be written at the moment
    journal_figures: Json = field(default_factory=dict)
    process_figures: dict[str, float] = field(default_factory=dict)
    doors: DoorBook = field(default_factory=DoorBook)
    keys: KeyBook = field(default_factory=KeyBook)
    hosts: HostBook = field(default_factory=HostBook)
    setbacks: Setbacks = field(default_factory=Setbacks)
    evidence: Evidence = field(default_factory=Evidence)
    recoveries: Recoveries = field(default_factory=Recoveries)
    prefix: PrefixCache = field(default_factory=lambda: PrefixCache(PrefixRules(is_kept=False)))
    workers: dict[str, Worker] = field(default_factory=dict)
    strangers: dict[str, float] = field(default_factory=dict)  # incarnation -> when it was last told something
    newcomers: Newcomers = field(default_factory=Newcomers)
    replaced: dict[str, str] = field(default_factory=dict)  # incarnation -> why it was told to end
    leases_renewed_at: float = 0.0
    ways: Ways = field(default_factory=Ways)
    steering: Steering = field(default_factory=Steering)
    book: PlanBook = field(default_factory=PlanBook)
    back: Return = field(default_factory=Return)  # from the broker's own death
    rebuilding: Rebuilding = field(default_factory=Rebuilding)
    rechecks: Rechecks = field(default_factory=Rechecks)
    flights: dict[int, Flight] = field(default_factory=dict)
    next_step: int = 1
    next_sequence: int = 1
    counters: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    now: float = 0.0  # of the event that is being handled
    ticked_at: float = 0.0  # when the last tick came

    def check(self) -> Iterator[str]:
        """Tell every rule that does not hold: between two events there is none."""
        num_running = 0
        for sequence in self.sequences.values():
            num_running += sequence.state is SequenceState.RUNNING
            if wrong := sequence.check():
                yield wrong
        if num_running != len(self.running) or any(s.state is not SequenceState.RUNNING for s in self.running):
            yield f"{num_running} sequences run, {len(self.running)} are in the list"
        waiting = sum(s.state is SequenceState.WAITING and s.request.accepted for s in self.sequences.values())
        if waiting != len(self.waiting) + len(self.hopeless):
            yield f"{waiting} accepted sequences wait for room, {len(self.waiting)} are in the queue"
        if any(s.state is not SequenceState.WAITING for s in self.waiting):
            yield "somebody waits for room who has it or has ended"
        if len({s.id for s in self.waiting}) != len(self.waiting):
            yield "somebody waits twice"
        if self.running.blocks != sum(s.blocks for s in self.running):
            yield f"{self.running.blocks} blocks are counted, and should be {sum(s.blocks for s in self.running)}"
        if self.flights and self.book.current is None:
            yield "steps are under way without a plan"
        if self.book.serving and (wrong := self.running.check()):
            yield wrong
        if self.book.serving and self.running.blocks + self.prefix.num_blocks > self.book.kv_blocks:
            yield f"{self.running.blocks + self.prefix.num_blocks} blocks are promised of {self.book.kv_blocks}"
        if self.book.serving and len(self.running) > self.book.max_sequences:
            yield f"{len(self.running)} sequences run, the stages hold {self.book.max_sequences}"
        yield from self._wrong_books()

    def _wrong_books(self) -> Iterator[str]:
        """Tell every rule that does not hold of what is kept beside sequences."""
        current, rebuilding = self.book.current, self.rebuilding
        gone = {i for i in current.members if i not in self.workers or self.workers[i].is_gone} if current else set()
        if gone:
            yield f"the plan in force counts on {sorted(gone)}, who are gone"
        if current is None and not rebuilding.is_idle:
            yield "layers are brought level without a plan"
        if len({s.id for s in rebuilding.under_way}) != len(rebuilding.under_way):
            yield "somebody's layers are brought level twice"
        strange = [i for i in self.shelf.weights if i not in self.requests or not self.requests[i].ended]
        if strange:
            yield f"{strange} stand among the ended, and are not"
        if bool(self.doors.closed) is not bool(self.doors.problem):
            yield f"the doors {sorted(self.doors.closed)} are closed, and it is told: {self.doors.problem!r}"
        if wrong := self.book.check() or self.hosts.check() or self.shelf.check() or self.archive.check():
            yield wrong

    def forgive(self, pause_s: float, now: float) -> None:
        """The broker itself stood still: that is nobody's lateness. What is waited for may come so much later, and what
        was heard or sent is so much younger.

        Moments stay at which something is only tried again (a refused load, a shut way, a door, a file that another
        worker is asked for, an order that is said again), or a comparison is given up: a pause brings them on early,
        and nobody loses anything by it."""
        self.ticked_at += pause_s
        self.back.forgive(pause_s)
        self.book.deadline += pause_s
        self.book.changed_at += pause_s
        self.rebuilding.ordered_at += pause_s
        self.timers.forgive(pause_s)
        self.archive.forgive(pause_s)
        self.newcomers.forgive(pause_s)
        for worker in self.workers.values():
            worker.forgive(pause_s, now)
        for flight in self.flights.values():
            flight.sent_at = min(now, flight.sent_at + pause_s)
        for request in self.requests.values():
            request.forgive(pause_s)

    def learn(self, manifest: Manifest | None) -> None:
        """Take this as the model; None: another one than it was."""
        self.manifest = manifest

    def steer(self, steering: Steering) -> None:
        """Plans are made by this from now on."""
        self.steering = steering

    def give_up(self, sequence: Sequence) -> None:
        """Hand a sequence whose deadline can't be kept any more to the core, which ends it."""
        self.hopeless.append(sequence)

    def take_hopeless(self) -> list[Sequence]:
        """Take those that were given up, the last of them first: whoever does ends them."""
        found, self.hopeless = self.hopeless[::-1], []
        return found

    def dispatched(self, num_tokens: int, ends: tuple[tuple[Sequence, int], ...], now: float) -> None:
        """The next step is in the pipe, and has told the stages whom to let go of."""
        stays = {sequence.id: sequence.stay for sequence, _ in ends}
        self.flights[self.next_step] = Flight(ends, now, num_tokens, stays)
        self.next_step += 1
        self.to_release.clear()
        self.to_retire.clear()
        for sequence, _ in ends:
            self.running.refresh(sequence)

    def landed(self, step: int) -> Flight | None:
        """A step came through; None if nobody waits for it."""
        return self.flights.pop(step, None)

    def evict(self, blocks: int, places: int) -> None:
        """Let retired sequences go, so that so much room is free."""
        self.to_release.extend(self.prefix.evict(blocks, places))

    def leave_stages(self, sequence: Sequence) -> None:
        """A running sequence ended: its room goes back with the next step, or its beginning is kept for others."""
        self.running.remove(sequence)
        sequence.stop_rebuilding()
        self.unfork(sequence)
        retired = self.prefix.retire(sequence.id, self.book.kv_blocks)
        if retired is None:
            self.to_release.append(sequence.id)
            return
        self.evict(self.prefix.blocks_beyond(self.book.kv_blocks), 0)
        if sequence.id in self.prefix.retired:
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
        """Let go of the copy that it was to begin from, or has begun from."""
        if sequence.fork_of is not None:
            self.prefix.unpin(sequence.fork_of)
            sequence.fork_of = None

    def empty_stages(self) -> None:
        """A new epoch: nothing is in the pipe, and the stages keep only what they are told to."""
        self.flights.clear()
        self.to_release.clear()
        self.to_retire.clear()
        self.prefix.clear()
        self.waiting.bring_back()

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount
