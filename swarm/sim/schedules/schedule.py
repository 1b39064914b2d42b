"""A schedule: who joins when, who asks for what, what goes wrong. ``draw`` makes one from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from swarm.broker.core_settings import BrokerSettings
from swarm.sim.network import CALM, Weather
from swarm.sim.world import Pace
from swarm.wire.messages import Submit

MIB = 1 << 20
FaultKind = Literal[
    "crash",  # SIGKILL; a supervisor starts it again
    "crash_at",  # the next worker that comes to a named point of the protocol dies there
    "crash_loop",  # it dies again and again
    "blackout",  # all workers die
    "shrink",  # it dies, and comes back with less memory
    "freeze",  # SIGSTOP, SIGCONT
    "hang",  # the compute thread stands still, its process beats
    "crawl",  # every computation takes long, and shows progress
    "freeze_broker",
    "leave",
    "terminate",
    "double",  # a second process under a name in use
    "join",
    "client_drop",
    "client_freeze",  # SIGSTOP, SIGCONT: longer than any of its limits
    "control_drop",  # the connection between a living worker and the broker breaks
    "order_lost",  # what a worker is told about a plan does not come, and no connection breaks
    "answer_lost",  # nor its Hello and its answers to that
    "edge_drop",  # a connection between two stages breaks
    "pipe_drop",  # the one between broker and first stage
    "cut_off",  # a worker and the broker don't reach each other
    "cut_to_broker",  # one way only
    "cut_from_broker",
    "cut_between",  # two workers don't reach each other
    "isolate",  # a worker reaches nobody
    "garble",  # bits of tensors flip on their way
    "poison",  # a stage's output is no number
    "broker_crash",  # SIGKILL of the broker; a supervisor starts it again from its journal
    "broker_crash_at",  # it dies at a named point: before or after an event, an action, a moment of its journal
    "broker_loop",  # it dies again and again
    "broker_power",  # its machine loses power, and the journal the last of what was not synced
    "all_crash",  # everything dies at once
    "disk_full",  # the journal can't be written
    "journal_backup",  # the broker dies, and comes back with an older state of its journal
    "journal_other",  # … with another journal, and later with the first one again
    "client_dies",  # for good; others read what it left detached
    "door_shut",  # no descriptors are left for newcomers, at the door of the clients or of the workers
    "read_fails",  # the journal can't be read for a while, only written
    "compute_fails",  # computations fail, or find no memory
    "device_breaks",  # from some computation on all of them fail; tests of the device, too, or not
    "request_fails",  # a request makes steps fail, wherever a certain layer lies
    "key_revoked",  # of a worker; another process with another key takes its place
    "broker_sleeps",  # SIGSTOP, SIGCONT of the broker: for longer than it may be silent to what it has not answered
]
JournalFaultKind = Literal[
    "journal_lost",  # its files are deleted while they are in use, or damaged, or all of them garbled
    "sync_fails",  # what was written before is perhaps never on the disk, whatever the next sync says
]
JOURNAL_FAULT_KINDS: tuple[JournalFaultKind, ...] = get_args(JournalFaultKind)
JOURNAL_FAULTS: tuple[FaultKind, ...] = ("journal_backup", "journal_other")
AWAY_S = 2.5  # for at least so long a changed journal is in use: time for a broker's start, requests and a plan


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    joins_at: float
    memory_bytes: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Machines:
    """What the workers run on. ``slowness``: how many times longer than the quickest each takes, by name; nothing of
    it if they measured nothing."""

    slowness: dict[str, float]
    measure: bool
    together: bool  # on one machine, all of them


@dataclass(frozen=True, slots=True)
class RequestSpec:
    submit: Submit
    at: float
    client: int
    leaves_after: float | None  # the caller cancels then
    stops: dict[int, int]  # continuation -> token index at which a stop string is found
    read_after: float | None = None  # another client attaches then, if it is accepted
    revoked_after: float | None = None  # another client cancels it then


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody looks a request up, so often at once. ``whom``: chance, to choose among the requests. ``reads_s``: reads
    it beside that for so long, in its reader's place."""

    at: float
    whom: int
    times: int
    gives_up: bool
    reads_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """``who`` and ``whom``: chance, to choose among those who are there then."""

    kind: FaultKind | JournalFaultKind
    at: float
    who: int
    for_s: float
    whom: int = 0
    point: tuple[str, str] = ("", "")  # where a worker dies: "before" or "after", and the message
    broker_point: tuple[str, str] = ("", "")  # where the broker does,
    count: int = 1  # and at the how manyth time

    @property
    def ends_at(self) -> float:
        """When it is over, if it lasts."""
        return self.at + self.for_s + (AWAY_S if self.kind in JOURNAL_FAULTS else 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that chance decides before the first event."""

    settings: BrokerSettings
    pace: Pace
    num_layers: int
    workers: tuple[WorkerSpec, ...]
    machines: Machines
    clients: tuple[tuple[float, float], ...]  # how slowly each takes its tokens
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    weather: Weather = CALM
    log_bytes: int = 1 << 20
    keys: bool = False  # doors go by keys
    hidden: tuple[str, ...] = ()  # workers whose doors nobody reaches, since they are behind a router
    elsewhere: tuple[str, ...] = ()  # of these, those that name an address which is not the one they come from
    put_off_every: int = 0  # of the last stage's draws, one in so many is put off; 0: none
    looks: tuple[Look, ...] = ()
    recalls: bool = False  # who reads elsewhere asks first what was submitted

    @property
    def quiet_from(self) -> float:
        """When the last planned thing has happened."""
        times = [w.joins_at for w in self.workers] + [r.at for r in self.requests] + [f.ends_at for f in self.faults]
        times += [look.at for look in self.looks]
        return max(times)
