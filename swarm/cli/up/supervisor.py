"""Decisions of ``swarm up``: which processes to start, when, and when to give up. Events come in, actions go out.

Rules:

* The broker and every worker are *children*. A child that dies is restarted after a delay that doubles from
  ``FIRST_DELAY_S`` to ``MAX_DELAY_S``; after running for ``HEALTHY_S``, the delay starts from the beginning.
* A worker that exits with 0 was dismissed by the broker on a user's request (``swarmctl stop``): it is not restarted. A
  worker that a signal ended is restarted, even after an orderly exit. The broker is always restarted, because the swarm
  can't run without it.
* A worker that the broker wants back as a new process (``EX_TEMPFAIL``) is restarted like one that died.
* A child that exits with ``EX_CONFIG`` can never work (a wrong setting, a model that is refused). A worker is given up;
  a broker ends the swarm. The last worker of a swarm that never served ends it, too: there is no worker left to wait
  for.
* A model that no worker can serve, whatever its machine, ends a swarm that never served at once, with one error. The
  fork server reports that before it forks a worker; without one, or if only a computation shows it, the first worker
  that refuses the model does, by its exit code (``EX_UNSERVED``).
* The gateway, if there is one, is started when the swarm first serves, or after ``GATEWAY_AFTER_S`` if it does not: an
  earlier start would take processor time from the workers and delay serving. Like the broker, it is always restarted,
  but the swarm can run without it: if it can never work, only the gateway is given up.
* A further swarm, of another model, is a child, too: a ``swarm up`` of its own. It is restarted like the broker; if it
  can never work, only it is given up.
* A request for more workers is answered when they have joined, or can never work.
* Stopping: all children are terminated together. The ones that still run after ``GRACE_S`` are killed, and ``REAP_S``
  later the supervisor ends even if the kernel has not ended them. A second request to stop kills immediately. No child
  is started any more.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from swarm.cli.up.joins import JoinOutcome, JoinRequests

FIRST_DELAY_S = 0.05  # first delay before a restart
MAX_DELAY_S = 10.0
HEALTHY_S = 30.0  # a child that ran this long is restarted without an increased delay
GRACE_S = 5.0  # from the request to stop until children are killed
REAP_S = 2.0  # from the kill until the supervisor ends in any case
GATEWAY_AFTER_S = 10.0  # then a user may want to see why nothing serves

EX_CONFIG = 78  # sysexits.h: "something was found in an unconfigured or misconfigured state"
EX_UNSERVED = 65  # sysexits.h: "the input data was incorrect": a worker of ours whose model no worker can serve
EX_TEMPFAIL = 75  # "try again later": a worker that the broker wants back as a new process
SIGNAL_BASE = 128  # the convention of shells: a process that exited in order because of signal n exits with 128 + n
MAX_WORKERS = 64  # on one machine; more than is useful, but few enough to keep a machine usable

_IN_MEMORY = ("cpu", "auto", "mps")  # devices that may use the machine's own memory

BROKER = "broker"
GATEWAY = "gateway"
SWARM_PREFIX = "swarm-"  # of the children that run further swarms, each of its own model


def is_worker(name: str) -> bool:
    """Whether a child is a worker; the broker can't dismiss others."""
    return name not in (BROKER, GATEWAY) and not name.startswith(SWARM_PREFIX)


# --- events: what can happen -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SupervisorStarted:
    """``swarm up`` starts, with this number of workers on this device, with or without a gateway, and with further
    swarms (names of children). ``gpus``: devices that have one worker each, instead of ``num_workers``."""

    num_workers: int
    gateway: bool = False
    swarms: tuple[str, ...] = ()
    device: str = "cpu"
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child ended. ``code`` is that of ``subprocess``: negative for a signal. ``last_line`` is the end of its log."""

    name: str
    code: int
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class ModelRefused:
    """The fork server found that no worker can serve the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChildNotStarted:
    """The machine could not start a process."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersRequested:
    """The broker asks for more workers."""

    ticket: int
    count: int
    memory_limit: int | None = None
    device: str = ""


@dataclass(frozen=True, slots=True)
class WorkersJoined:
    """These workers have joined the broker."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SwarmServing:
    """The swarm serves requests."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C or SIGTERM was received."""


@dataclass(frozen=True, slots=True)
class SupervisorTick:
    """Time has passed; see :meth:`Supervisor.wake_at`."""


Event = (
    SupervisorStarted
    | ChildExited
    | ChildNotStarted
    | ModelRefused
    | WorkersRequested
    | WorkersJoined
    | SwarmServing
    | StopRequested
    | SupervisorTick
)


# --- actions: what can be asked for ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a process. For workers, ``memory_limit`` in bytes and ``device``; None and empty: the common ones."""

    name: str
    memory_limit: int | None = None
    device: str = ""


@dataclass(frozen=True, slots=True)
class TerminateChild:
    name: str


@dataclass(frozen=True, slots=True)
class KillChild:
    name: str


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Report to the broker which of the requested workers have joined, and the errors of the others."""

    ticket: int
    started: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class ShowRestart:
    """Show the user that a child died and when it is restarted."""

    name: str
    reason: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class ShowGivenUp:
    """Show the user that a worker, or the gateway, can't work and is not restarted."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShowLeft:
    """Show the user that a worker left in good order."""

    name: str


@dataclass(frozen=True, slots=True)
class EndSupervisor:
    """End the supervisor. ``error`` is None after a requested stop."""

    error: str | None


Action = StartChild | TerminateChild | KillChild | AnswerRequest | ShowRestart | ShowGivenUp | ShowLeft | EndSupervisor


# --- the policy ------------------------------------------------------------------------------------------------------


class _ChildPhase(Enum):
    RUNNING = "running"
    WAITING = "waiting"  # for its next start
    AWAY = "away"  # left or given up


@dataclass(slots=True)
class _Child:
    start: StartChild  # how it is started, each time
    phase: _ChildPhase
    since: float  # time of its last start
    num_failures: int = 0  # in a row, without a long run between them
    retry_at: float = 0.0  # while WAITING: time of the next start

    @property
    def name(self) -> str:
        return self.start.name


class Supervisor:
    """Deciding core of ``swarm up``: ``handle`` turns events into actions; ``wake_at()`` is the time of the next
    ``SupervisorTick``."""

    def __init__(self) -> None:
        self._device = "cpu"  # of the workers that the machine's memory is divided among
        self._children: dict[str, _Child] = {}
        self._num_named = 0  # workers that were ever named; the next one's number
        self._joins = JoinRequests()
        self._served = False
        self._gateway_at: float | None = None  # time of its start, if it is not started yet
        self._stop_at: float | None = None  # time of the request to stop; after the kill, of the kill
        self._killing = False  # whether the children were killed
        self._ended = False
        self._error: str | None = None  # reason of the end; None: requested

    @property
    def is_stopping(self) -> bool:
        return self._stop_at is not None

    def running(self) -> tuple[str, ...]:
        """Return the running children, in the order of their first start."""
        return tuple(child.name for child in self._children.values() if child.phase is _ChildPhase.RUNNING)

    def workers(self) -> tuple[str, ...]:
        """Return the workers that run or will be restarted."""
        return tuple(c.name for c in self._children.values() if is_worker(c.name) and c.phase is not _ChildPhase.AWAY)

    def wake_at(self) -> float | None:
        """Return the time at which the next ``SupervisorTick`` is due; None if only an event can change anything."""
        if self._ended:
            return None
        if self._stop_at is not None:
            return self._stop_at + (REAP_S if self._killing else GRACE_S)
        due = [child.retry_at for child in self._children.values() if child.phase is _ChildPhase.WAITING]
        due += [at for at in (self._joins.next_due(), self._gateway_at) if at is not None]
        return min(due, default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        if self._ended:
            return []
        return list(self._dispatch(event, now))

    def _dispatch(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case SupervisorStarted():
                yield from self._start_all(event, now)
            case ChildExited(name, code, last_line):
                yield from self._on_exit(self._children[name], code, last_line, now)
            case ChildNotStarted(name, reason):
                yield from self._retry_or_end(self._children[name], f"could not start: {reason}", now)
            case ModelRefused(reason):
                if not self._served and not self.is_stopping:
                    yield from self._stop(reason, now)
            case WorkersRequested():
                yield from self._start_more(event, now)
            case WorkersJoined(names):
                yield from self._answer_requests(self._joins.record_joined(names))
            case SwarmServing():
                self._served = True
                yield from self._start_gateway(now)
            case StopRequested():
                yield from self._kill_all(now) if self.is_stopping else self._stop(None, now)
            case SupervisorTick():
                yield from self._tick(now)

    # starting

    def _start_all(self, wanted: SupervisorStarted, now: float) -> Iterator[StartChild]:
        self._device = wanted.device
        self._gateway_at = now + GATEWAY_AFTER_S if wanted.gateway else None
        yield self._start_new(StartChild(BROKER), now)
        for number, gpu in enumerate(wanted.gpus):
            yield self._start_new(StartChild(f"gpu{number}", device=gpu), now)
        for _ in range(0 if wanted.gpus else wanted.num_workers):
            yield self._start_new(StartChild(self._next_name()), now)
        for name in wanted.swarms:
            yield self._start_new(StartChild(name), now)

    def _next_name(self) -> str:
        name = f"w{self._num_named}"
        self._num_named += 1
        return name

    def _start_new(self, start: StartChild, now: float) -> StartChild:
        self._children[start.name] = _Child(start, _ChildPhase.RUNNING, now)
        return start

    def _start_gateway(self, now: float) -> Iterator[StartChild]:
        if self._gateway_at is not None and not self.is_stopping:
            self._gateway_at = None
            yield self._start_new(StartChild(GATEWAY), now)

    def _start_more(self, request: WorkersRequested, now: float) -> Iterator[Action]:
        if self.is_stopping:
            yield AnswerRequest(request.ticket, (), "this swarm up is stopping")
        elif len(self.workers()) + request.count > MAX_WORKERS:
            yield AnswerRequest(
                request.ticket, (), f"{len(self.workers())} workers run here already; the maximum is {MAX_WORKERS}"
            )
        elif request.device in _IN_MEMORY and request.device != self._device and not request.memory_limit:
            # Without a limit, each would take all free memory of the machine.
            reason = f"--device {request.device} needs --memory-limit SIZE here: the others' device is {self._device}"
            yield AnswerRequest(request.ticket, (), reason)
        else:
            names = tuple(self._next_name() for _ in range(request.count))
            self._joins.add(request.ticket, names, now)
            for name in names:
                yield self._start_new(StartChild(name, request.memory_limit, request.device), now)

    def _answer_requests(self, outcomes: Iterator[JoinOutcome]) -> Iterator[AnswerRequest]:
        for ticket, joined, error in outcomes:
            yield AnswerRequest(ticket, joined, error)

    # losing

    def _on_exit(self, child: _Child, code: int, last_line: str, now: float) -> Iterator[Action]:
        if self.is_stopping:
            child.phase = _ChildPhase.AWAY
            yield from self._end_if_empty()
        elif code == EX_UNSERVED and is_worker(child.name) and not self._served:
            child.phase = _ChildPhase.AWAY
            yield from self._stop(last_line or "its model can't be served", now)
        elif code in (EX_CONFIG, EX_UNSERVED):
            yield from self._give_up(child, last_line or "it gave no reason", now)
        elif code == 0 and is_worker(child.name):
            child.phase = _ChildPhase.AWAY
            yield ShowLeft(child.name)
            yield from self._answer_requests(self._joins.record_gone(child.name, "left"))
        else:
            yield from self._retry_or_end(child, describe_exit(code), now)

    def _give_up(self, child: _Child, reason: str, now: float) -> Iterator[Action]:
        child.phase = _ChildPhase.AWAY
        if child.name == BROKER:
            yield from self._stop(reason, now)
            return
        yield ShowGivenUp(child.name, reason)
        yield from self._answer_requests(self._joins.record_gone(child.name, f"can't work: {reason}"))
        if is_worker(child.name) and not self._served and not self.workers():
            yield from self._stop(reason, now)

    def _retry_or_end(self, child: _Child, reason: str, now: float) -> Iterator[Action]:
        if self.is_stopping:
            child.phase = _ChildPhase.AWAY
            yield from self._end_if_empty()
            return
        if now - child.since >= HEALTHY_S:
            child.num_failures = 0
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(child.num_failures, 16))
        child.num_failures += 1
        child.phase, child.retry_at = _ChildPhase.WAITING, now + delay_s
        yield ShowRestart(child.name, reason, delay_s)

    # time

    def _tick(self, now: float) -> Iterator[Action]:
        due = self.wake_at()
        if due is None or now < due:
            return
        if self._killing:
            yield from self._end(f"could not end {', '.join(self.running())}: the kernel did not end them")
        elif self.is_stopping:
            yield from self._kill_all(now)
        else:
            yield from self._answer_requests(self._joins.tick(now))
            if self._gateway_at is not None and now >= self._gateway_at:
                yield from self._start_gateway(now)
            for child in self._children.values():
                if child.phase is _ChildPhase.WAITING and child.retry_at <= now:
                    child.phase, child.since = _ChildPhase.RUNNING, now
                    yield child.start

    # stopping

    def _stop(self, error: str | None, now: float) -> Iterator[Action]:
        self._stop_at, self._error = now, error
        yield from self._answer_requests(self._joins.stop())
        for child in self._children.values():
            if child.phase is _ChildPhase.WAITING:
                child.phase = _ChildPhase.AWAY
        for name in reversed(self.running()):  # the last first: they may still have a message for the broker
            yield TerminateChild(name)
        yield from self._end_if_empty()

    def _kill_all(self, now: float) -> Iterator[Action]:
        if self._killing:
            return
        self._killing, self._stop_at = True, now
        for name in reversed(self.running()):
            yield KillChild(name)

    def _end_if_empty(self) -> Iterator[Action]:
        if not self.running():
            yield from self._end(self._error)

    def _end(self, error: str | None) -> Iterator[Action]:
        self._ended = True
        yield EndSupervisor(error)


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
    if code == EX_TEMPFAIL:
        return "was asked to restart"
    if code > SIGNAL_BASE:
        return f"ended after {_signal_name(code - SIGNAL_BASE)}"
    return f"ended with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
