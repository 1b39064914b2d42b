"""A schedule: the times at which workers join, requests are submitted and faults strike. ``draw`` makes one from a
seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from swarm.broker.core import CoreSettings
from swarm.sim.network import CALM, Weather
from swarm.sim.world import Durations
from swarm.wire.messages import Submit

MIB = 1 << 20
FaultKind = Literal[
    "crash",  # SIGKILL; a supervisor restarts it
    "crash_at",  # the next worker that reaches a named point of the protocol dies there
    "crash_loop",  # it dies again and again
    "blackout",  # all workers die
    "shrink",  # it dies, and returns with less memory
    "freeze",  # SIGSTOP, SIGCONT
    "hang",  # the compute thread stops while the process still sends heartbeats
    "crawl",  # every computation takes long, and shows progress
    "freeze_broker",
    "leave",
    "terminate",
    "double",  # a second process under a name in use
    "join",
    "client_drop",
    "client_freeze",  # SIGSTOP, SIGCONT: longer than any of its timeouts
    "control_drop",  # the connection between a living worker and the broker breaks
    "order_lost",  # orders about a plan do not arrive, without a broken connection
    "answer_lost",  # the worker's Hello or its answers to such orders do not arrive
    "edge_drop",  # a connection between two stages breaks
    "pipe_drop",  # the connection between broker and first stage breaks
    "cut_off",  # a worker and the broker can't reach each other
    "cut_to_broker",  # in one direction only
    "cut_from_broker",
    "cut_between",  # two workers can't reach each other
    "isolate",  # a worker reaches no other process
    "garble",  # bits of tensors flip on their way
    "poison",  # a stage's output has numbers that are not finite
    "broker_crash",  # SIGKILL of the broker; a supervisor starts it again from its journal
    "broker_crash_at",  # it dies at a named point: before or after an event, an action, or a point of its journal
    "broker_loop",  # it dies again and again
    "broker_power",  # its machine loses power, and the journal loses the latest unsynced transactions
    "all_crash",  # everything dies at once
    "disk_full",  # the journal can't be written
    "journal_backup",  # the broker dies, and returns with an older state of its journal
    "journal_other",  # … with another journal, and later with the first one again
    "client_dies",  # for good; other clients read its detached requests
    "door_shut",  # no descriptors are left for new connections, at the listener for clients or for workers
    "read_fails",  # the journal can't be read for a while, only written
    "compute_fails",  # computations fail, or lack memory
    "device_breaks",  # from some computation on all of them fail; tests of the device may fail, too, or pass
    "request_fails",  # a request makes steps fail at a certain layer, on any worker
    "key_revoked",  # of a worker; another process with another key takes its place
    "broker_sleeps",  # SIGSTOP, SIGCONT of the broker: longer than unanswered requests wait for it
    "kv_lag",  # copies of keys and values are late: after a fence, a release, or the worker's death
    "kv_cut",  # their connections break, and parts are lost
    "kv_garble",  # bits of parts flip on their way
    "kv_short",  # memory is short, so that copies are dropped; in half of the cases right before their owner dies
    "kv_lost",  # orders about copies, or reports of them, do not arrive
    "kv_store_fails",  # memory for arrived parts can't be allocated
    "kv_unshared",  # a worker refuses to share memory between sequences; now and then it offers to, all the same
    "kv_crash_at",  # the next worker that reaches a point of a transfer dies there
    "kv_owner",  # a worker dies once a number of parts of copies have arrived
    "kv_pair",  # a worker and a holder of its copies die within a second
    "adapters_fail",  # a worker can't load adapters
    "kv_stale",  # parts are under way while the broker dies, and returns with an older state of its journal
]
JournalFaultKind = Literal[
    "journal_lost",  # its files are deleted while in use, or damaged, or all of them garbled
    "sync_fails",  # earlier writes may never be on the disk, whatever the next sync reports
]
JOURNAL_FAULT_KINDS: tuple[JournalFaultKind, ...] = get_args(JournalFaultKind)
JOURNAL_FAULTS: tuple[FaultKind, ...] = ("journal_backup", "journal_other")
KV_FAULTS_WITH_DEATHS: tuple[FaultKind, ...] = ("kv_pair", "kv_stale")  # a second blow follows
UNLIKE_SOURCE = "/unlike"  # of an adapter, of which each host has other files
AWAY_S = 2.5  # how long a changed journal stays in use, at least: time for a broker's start, requests and a plan


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to be started."""

    name: str
    joins_at: float
    memory_bytes: int
    capacity: int  # positions of KV memory
    share_unit: int = 0  # positions of a chunk that sequences can share; 0: none


@dataclass(frozen=True, slots=True)
class Machines:
    """Speeds and placement of the workers' machines."""

    # time relative to the fastest machine, by worker; without effect if workers measure nothing
    slowness: dict[str, float]
    measure: bool
    together: bool  # all workers on one machine
    unlike: tuple[str, ...] = ()  # workers whose kernels compute other bits than those of the others


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request to be submitted."""

    submit: Submit
    at: float
    client: int
    leaves_after: float | None  # delay after which the caller cancels
    stops: dict[int, int]  # continuation -> token index at which a stop string is found
    read_after: float | None = None  # delay after which another client attaches, if the request is accepted
    revoked_after: float | None = None  # delay after which another client cancels it
    waits_for_adapter: bool = False  # submitted once its adapter is loaded, or all faults are over


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """An operator's command: load an adapter from a source, or drop it."""

    at: float
    verb: Literal["load", "drop"]
    name: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class LookupSpec:
    """A look-up of a request by another client."""

    at: float
    choice: int  # random number that selects the request
    num_questions: int  # questions asked together
    gives_up: bool
    read_for_s: float | None = None  # read the request in its reader's place for this long; None: don't


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to be applied."""

    kind: FaultKind | JournalFaultKind
    at: float
    who: int  # random number that selects the victim among those present
    for_s: float
    whom: int = 0  # random number that selects a second one, or a variant
    point: tuple[str, str] = ("", "")  # where a worker dies: "before" or "after", and the message
    broker_point: tuple[str, str] = ("", "")  # the same for the broker
    count: int = 1  # number of visits of that point until it dies

    @property
    def ends_at(self) -> float:
        """Time at which a lasting fault is over."""
        return self.at + self.for_s + (AWAY_S if self.kind in (*JOURNAL_FAULTS, *KV_FAULTS_WITH_DEATHS) else 0.0)


@dataclass(frozen=True, slots=True)
class KvConditions:
    """Conditions under which workers copy keys and values."""

    turn_s: tuple[float, float] = (0.005, 0.05)  # range of the time between two turns in which a part may be sent
    room_bytes: int = 1 << 20  # memory for copies in each worker


Guess = Literal[
    "right",  # the tokens of an undisturbed run
    "wrong",
    "partly",  # right up to a point
    "nothing",
    "too_long",  # more tokens than were asked for
    "foreign",  # tokens outside of the vocabulary
]
Misreport = Literal[
    "accepts",  # tokens behind the first refused proposal, as if it had been accepted
    "counts",  # positions beyond the accepted ones
    "repeats",  # every token twice
    "forces",  # tokens that the grammar is said to demand
]


DraftBehaviour = Literal[
    "right",  # the tokens of an undisturbed run
    "wrong",
    "partly",  # right up to a point
    "foreign",  # tokens outside of the vocabulary
    "late",  # after the sequences have stopped waiting
    "twice",
    "silent",  # until it is killed
    "dies",
    "behind",  # it reports that it must catch up with a sequence, and then that it has, or that it has dropped it
    "drops",  # sequences, some of which it never had
    "loses",  # all sequences
    "other_lengths",  # more tokens than were asked for
    "other_place",  # tokens of another position
    "other_logprobs",  # fewer log probabilities than tokens
    "other_number",  # first answers a request that was not made
]


@dataclass(frozen=True, slots=True)
class SpeculationConditions:
    """What is proposed, and how the last stage misreports the outcome."""

    guesses: tuple[Guess, ...]  # one of them is drawn for each proposal
    misreports: tuple[Misreport, ...] = ()  # the same for each misreport
    misreported_share: float = 0.0  # of the steps with proposals
    is_limited: bool = False  # the broker limits their number by what was accepted before
    drafts: tuple[DraftBehaviour, ...] = ()  # one of them for each request to the draft model; empty: there is none


@dataclass(frozen=True, slots=True)
class Schedule:
    """All random decisions that are made before the first event."""

    settings: CoreSettings
    pace: Durations
    num_layers: int
    workers: tuple[WorkerSpec, ...]
    machines: Machines
    clients: tuple[tuple[float, float], ...]  # range of the time in which each client takes its tokens
    requests: tuple[ScheduledRequest, ...]
    faults: tuple[Fault, ...]
    weather: Weather = CALM
    log_bytes: int = 1 << 20
    keys: bool = False  # listeners check keys
    hidden: tuple[str, ...] = ()  # workers behind a router, whose listeners cannot be reached
    # the ones of ``hidden`` that report an address other than the one from which they come
    elsewhere: tuple[str, ...] = ()
    put_off_every: int = 0  # the last stage delays one draw in this number; 0: none
    looks: tuple[LookupSpec, ...] = ()
    kv: KvConditions = KvConditions()
    recalls: bool = False  # a second reader first asks for the submitted request
    speculation: SpeculationConditions | None = None  # None: nothing is proposed
    adapters: tuple[AdapterOrder, ...] = ()
    image_room: int = 0  # tokens of images whose features first stages keep; 0: the model reads text only
    state_stride: int = 0  # positions between states that the model's layers keep; 0: they keep none

    @property
    def quiet_from(self) -> float:
        """Time at which the last planned event is over."""
        times = [w.joins_at for w in self.workers] + [r.at for r in self.requests] + [f.ends_at for f in self.faults]
        times += [look.at for look in self.looks] + [order.at for order in self.adapters]
        return max(times)
