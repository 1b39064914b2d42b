"""The broker's whole state: requests, sequences, workers, the plan. Plain values with queries."""

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
    """A step in the pipeline."""

    sequences: tuple[tuple[Sequence, int], ...]  # sequence, and position at which its row ends
    sent_at: float
    num_tokens: int = 0
    stays: dict[int, int] = field(default_factory=dict)  # sequence -> its ``residency`` when the step was sent


@dataclass(slots=True)
class Decided:
    """The scheduler's last decision, for reports."""

    mode: str = ""  # active mode: "batch" or "overlapped"
    depth: int = 0  # maximum number of steps in flight
    budget: int = 0  # tokens that a step may have in addition to the next tokens of running answers
    prefill: int = 0  # prompt tokens within ``step_budget``
    throttle: str = "none"  # what limits prompts: "none", "pending" (shared out over the pipeline), "kv" or "time"


@dataclass(slots=True)
class DoorBook:
    """Listeners that do not accept new connections, for reports. ``problem`` is set while one is closed."""

    problem: str = ""
    reason: str = ""  # text of the last problem
    times: int = 0  # how often listeners were closed
    closed_s: float = 0.0  # seconds in total, without the current period
    opened_at: float = 0.0  # time at which the last listener was opened again
    closed: set[str] = field(default_factory=set)  # names of the closed listeners
    closed_at: float = 0.0
    look_at: float = 0.0  # time at which free file descriptors are checked for again
    pause_s: float = 0.0  # seconds between two checks

    def notes(self, now: float) -> list[str]:
        """Return a note about past closures, kept while this broker lives. While a listener is closed, ``problem``
        covers it."""
        if self.problem or not self.times:
            return []
        often = "once" if self.times == 1 else f"{self.times} times"
        ago_s = now - self.opened_at
        return [
            f"new connections were kept waiting {often}, {self.closed_s:.1f} s in all, until {ago_s:.0f} s ago: "
            f"{self.reason}"
        ]


@dataclass(slots=True)
class Ticket:
    """A ``swarmctl join`` in progress."""

    asker: bytes  # routing id of the client that asked
    host: bytes  # routing id of the host that was asked to start a worker


@dataclass(slots=True)
class HostBook:
    """Hosts that can start workers, by connection, and the clients that have asked for workers."""

    connected: dict[bytes, HostHello] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    next_ticket: int = 1

    def promise(self, asker: bytes, host: bytes) -> int:
        """Register a join; return the ticket number that the host puts into its answer."""
        number, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.tickets[number] = Ticket(asker, host)
        return number

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        if any(ticket.host not in self.connected for ticket in self.tickets.values()):
            return "a join waits for a host that is gone"
        return None


@dataclass(slots=True)
class KeyBook:
    """Public keys that the broker's own listeners accept (``members.keyring``), and the keys last sent to each."""

    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    has_changed: bool = False  # the listeners must be sent the keys again
    heard_at: dict[str, frozenset[str]] = field(default_factory=dict)  # by listener: keys it was last sent
    passed_on: frozenset[str] = frozenset()  # relay tickets it was last sent


@dataclass(slots=True)
class Upload:
    """A file of the model that the broker has requested from the worker ``incarnation``."""

    asset: Asset
    incarnation: str
    heard_at: float  # time at which its last part arrived
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Setbacks:
    """Failures of the data path since the last completed step, without the loss of a worker."""

    lost: int = 0  # number of times that steps were lost
    damaged: int = 0  # number of damaged messages

    def step_came_through(self) -> None:
        self.lost = self.damaged = 0


@dataclass(slots=True)
class State:
    """The complete state of the broker. Only ``core`` and its parts change it."""

    lineage: Lineage = NOBODYS  # of this broker process
    manifest: Manifest | None = None
    assets: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)  # files that are being transferred, by name
    requests: dict[str, Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    shelf: Shelf = field(default_factory=Shelf)  # requests that have ended
    archive: Archive = field(default_factory=Archive)  # messages about requests that are not in memory
    gone: Gone = field(default_factory=Gone)  # reasons for requests that are not available
    # clients whose connection is blocked -> time of the next try
    stuck: dict[bytes, float] = field(default_factory=dict)
    timers: Timers = field(default_factory=Timers)  # when requests must be checked
    unwritten: Unwritten = field(default_factory=Unwritten)  # requests that wait for the journal
    turned_away: TurnedAway = field(default_factory=TurnedAway)
    waiting: Queue = field(default_factory=Queue)
    running: Running = field(default_factory=Running)
    # sequences whose deadline can't be met any more: to be ended
    hopeless: list[Sequence] = field(default_factory=list)
    costs: StepCosts = field(default_factory=StepCosts)
    decided: Decided = field(default_factory=Decided)
    to_release: list[int] = field(default_factory=list)  # sequences that the stages release with the next step
    # ended sequences whose prefix the stages keep with the next step
    to_retire: list[SequencePosition] = field(default_factory=list)
    journal_notes: tuple[str, ...] = ()  # damage found in the journal
    journal_problem: str = ""  # why the journal can't be written at present
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
    # non-members: incarnation -> time of the last message sent to it
    strangers: dict[str, float] = field(default_factory=dict)
    newcomers: Newcomers = field(default_factory=Newcomers)
    replaced: dict[str, str] = field(default_factory=dict)  # incarnation -> why it was ordered to end
    leases_renewed_at: float = 0.0
    ways: Ways = field(default_factory=Ways)
    steering: Steering = field(default_factory=Steering)
    book: PlanBook = field(default_factory=PlanBook)
    back: Return = field(default_factory=Return)  # the start after a restart of the broker
    rebuilding: Rebuilding = field(default_factory=Rebuilding)
    rechecks: Rechecks = field(default_factory=Rechecks)
    flights: dict[int, Flight] = field(default_factory=dict)
    next_step: int = 1
    next_sequence: int = 1
    counters: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    now: float = 0.0  # time of the event being handled
    ticked_at: float = 0.0  # time of the last tick

    def check(self) -> Iterator[str]:
        """Yield every broken invariant. Between two events there is none."""
        num_running = 0
        for sequence in self.sequences.values():
            num_running += sequence.state is SequenceState.RUNNING
            if wrong := sequence.check():
                yield wrong
        if num_running != len(self.running) or any(s.state is not SequenceState.RUNNING for s in self.running):
            yield f"{num_running} sequences run, {len(self.running)} are in the list"
        waiting = sum(s.state is SequenceState.WAITING and s.request.accepted for s in self.sequences.values())
        if waiting != len(self.waiting) + len(self.hopeless):
            yield f"{waiting} accepted sequences wait for blocks, {len(self.waiting)} are in the queue"
        if any(s.state is not SequenceState.WAITING for s in self.waiting):
            yield "a sequence waits that runs or has ended"
        if len({s.id for s in self.waiting}) != len(self.waiting):
            yield "a sequence waits twice"
        if self.running.blocks != sum(s.blocks for s in self.running):
            yield f"{self.running.blocks} blocks are counted, and should be {sum(s.blocks for s in self.running)}"
        if self.flights and self.book.current is None:
            yield "steps are in flight without a plan"
        if self.book.serving and (wrong := self.running.check()):
            yield wrong
        if self.book.serving and self.running.blocks + self.prefix.num_blocks > self.book.kv_blocks:
            yield f"{self.running.blocks + self.prefix.num_blocks} blocks are reserved of {self.book.kv_blocks}"
        if self.book.serving and len(self.running) > self.book.max_sequences:
            yield f"{len(self.running)} sequences run, the stages hold {self.book.max_sequences}"
        yield from self._wrong_books()

    def _wrong_books(self) -> Iterator[str]:
        """Yield every broken invariant outside of sequences."""
        current, rebuilding = self.book.current, self.rebuilding
        gone = {i for i in current.members if i not in self.workers or self.workers[i].is_gone} if current else set()
        if gone:
            yield f"the active plan includes {sorted(gone)}, which are gone"
        if current is None and not rebuilding.is_idle:
            yield "layers are rebuilt without a plan"
        if len({s.id for s in rebuilding.under_way}) != len(rebuilding.under_way):
            yield "the layers of a sequence are rebuilt twice"
        strange = [i for i in self.shelf.weights if i not in self.requests or not self.requests[i].ended]
        if strange:
            yield f"{strange} are listed as ended, but are not"
        if bool(self.doors.closed) is not bool(self.doors.problem):
            yield f"listeners {sorted(self.doors.closed)} are closed, the reported problem is {self.doors.problem!r}"
        if wrong := self.book.check() or self.hosts.check() or self.shelf.check() or self.archive.check():
            yield wrong

    def forgive(self, pause_s: float, now: float) -> None:
        """Shift deadlines by a pause of the broker itself, which must not count as lateness of others. Deadlines move
        into the future; times of past messages are treated as more recent.

        Times at which something is only retried do not move (a refused load, a blocked route, a closed listener, a file
        requested from another worker, a repeated order, the end of a comparison): after a pause they come early, which
        does no harm.
        """
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
        """Set the model; None if it is to be replaced by another one."""
        self.manifest = manifest

    def steer(self, steering: Steering) -> None:
        """Set the operator's constraints for plans."""
        self.steering = steering

    def give_up(self, sequence: Sequence) -> None:
        """Queue a sequence whose deadline can't be met any more; the core ends it."""
        self.hopeless.append(sequence)

    def take_hopeless(self) -> list[Sequence]:
        """Remove and return the sequences to be ended, the last one first."""
        found, self.hopeless = self.hopeless[::-1], []
        return found

    def dispatched(self, num_tokens: int, ends: tuple[tuple[Sequence, int], ...], now: float) -> None:
        """Record the step that has just been sent. It has also carried the releases to the stages."""
        stays = {sequence.id: sequence.stay for sequence, _ in ends}
        self.flights[self.next_step] = Flight(ends, now, num_tokens, stays)
        self.next_step += 1
        self.to_release.clear()
        self.to_retire.clear()
        for sequence, _ in ends:
            self.running.refresh(sequence)

    def landed(self, step: int) -> Flight | None:
        """Remove and return a completed step; None if it is not in flight any more."""
        return self.flights.pop(step, None)

    def evict(self, blocks: int, places: int) -> None:
        """Evict retired sequences until this number of blocks and slots is free."""
        self.to_release.extend(self.prefix.evict(blocks, places))

    def leave_stages(self, sequence: Sequence) -> None:
        """Take an ended sequence out of the stages: with the next step its blocks are freed, or its prefix is kept for
        others."""
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
        """Preempt a running sequence: its blocks are freed with the next step, and it waits to be computed again."""
        self.running.remove(sequence)
        self.unfork(sequence)
        self.prefix.index.forget(sequence.id)
        self.to_release.append(sequence.id)
        sequence.wait_again()
        sequence.num_preempted += 1
        self.waiting.add(sequence)
        self.count("preemptions")

    def unfork(self, sequence: Sequence) -> None:
        """Release the pin on the sequence that this one was to be copied from."""
        if sequence.fork_of is not None:
            self.prefix.unpin(sequence.fork_of)
            sequence.fork_of = None

    def empty_stages(self) -> None:
        """Clear everything in flight at a new epoch: the stages keep only what they are ordered to."""
        self.flights.clear()
        self.to_release.clear()
        self.to_retire.clear()
        self.prefix.clear()
        self.waiting.bring_back()

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount
