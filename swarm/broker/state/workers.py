"""A worker as the broker tracks it: what it holds, its heartbeats, its verdict, and the routes to it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.wire.door.keys import by_relay
from swarm.wire.messages import Beat, Hello, LayerRange, Release

# Delay after which a worker that refused layers is asked for them again: a full disk or memory may be free by then. If
# the cause lasts, each retry costs the other workers a plan that fails.
RETRY_MIN_S = 30.0
RETRY_MAX_S = 600.0

# A blocked route is tried again after a while, with exponential backoff: firewalls and addresses change.
BROKER = ""  # stands for the broker in routes: it sends steps to the first stage and receives the results of the last
ANYBODY = "*"  # stands for every source
AGAIN_S = 30.0  # seconds until the first retry
AGAIN_MOST_S = 600.0  # maximum seconds between retries
HURRY_S = 3.0  # seconds until the retry if no plan is possible without the route

LATELY_S = 30.0  # seconds: the longest interval between two heartbeats is remembered for one to two such windows
BEATS_TO_KNOW = 15  # heartbeats needed before their regularity is used

RATE_OVER_S = 1.0  # seconds over which the progress rate is averaged
LOAD_BYTES_PER_S = 5e8  # assumed rate of reading and warming weights, until one is measured


class WorkerState(enum.Enum):
    """Membership of a worker."""

    MEMBER = "member"  # may be planned with
    REFUSED = "refused"  # it can't carry out the last plan it was sent; the reason is kept
    LEAVING = "leaving"  # to be released as soon as the plan does not need it
    LEFT = "left"  # released in good order
    OUT = "out"  # dead, frozen, hung or gone: fenced; it must send Hello again


class Verdict(enum.Enum):
    """Health of a worker as judged from its heartbeats and results."""

    WELL = "well"
    SLOW = "slow"
    LOADING = "loading"
    BLOCKED = "blocked"
    SILENT = "silent"
    HUNG = "hung"
    DEAD = "dead"
    LEFT = "left"
    LIED = "lied"  # it sent results that were proven wrong
    FAILED = "failed"  # its steps raised

    @property
    def is_out(self) -> bool:
        return self in (Verdict.SILENT, Verdict.HUNG, Verdict.DEAD, Verdict.LIED, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with the evidence for it."""

    verdict: Verdict
    evidence: str
    since: float = field(default=0.0, compare=False)  # time at which this verdict was first given


@dataclass(slots=True)
class Pulse:
    """Heartbeats of one worker: their times, intervals and progress."""

    heard_at: float  # time of the last heartbeat, moved forward by pauses of the broker
    beat: Beat | None = None
    beat_at: float | None = None  # time at which the last heartbeat really arrived: ``received_at`` without corrections
    moved_at: float = 0.0  # time at which it last made progress, changed its activity or was idle
    rate: float = 0.0  # progress in layers (or tensors) per second
    loop_lag_s: float = 0.0  # seconds for which its control loop has been blocked, confirmed by two heartbeats in a row
    num_beats: int = 0
    # longest interval between two heartbeats: in this window, and in the previous one
    _gaps: tuple[float, float] = (0.0, 0.0)
    _gaps_since: float = 0.0  # start of this window

    @property
    def longest_s(self) -> float:
        """Longest recent interval between two heartbeats, without pauses of the broker."""
        return max(self._gaps)

    @property
    def is_known(self) -> bool:
        """Whether there have been enough heartbeats to judge their regularity."""
        return self.num_beats >= BEATS_TO_KNOW

    def take(self, beat: Beat, now: float) -> None:
        """Record a heartbeat."""
        before = self.beat
        if before is None or (beat.progress, beat.state) != (before.progress, before.state):
            self.moved_at = now
        if beat.state not in ("computing", "loading"):
            self.moved_at = now
        if before is not None:
            # A process that was stopped and resumes reports one blocked loop, so one report does not count.
            self.loop_lag_s = min(before.loop_lag_s, beat.loop_lag_s)
            self._take_rate(beat.progress - before.progress, now)
            self._take_gap(now)
        self.num_beats += 1
        self.beat = beat
        self.heard_at = self.beat_at = now

    def _take_rate(self, moved: int, now: float) -> None:
        passed_s = max(1e-3, now - self.heard_at)
        weight = min(1.0, passed_s / RATE_OVER_S)
        self.rate += weight * (max(0, moved) / passed_s - self.rate)

    def _take_gap(self, now: float) -> None:
        if now - self._gaps_since > LATELY_S:
            self._gaps, self._gaps_since = (0.0, self._gaps[0]), now
        self._gaps = max(self._gaps[0], now - self.heard_at), self._gaps[1]

    def forgive(self, pause_s: float, now: float) -> None:
        """Move the times forward by a pause of the broker, at most to now: a heartbeat may have been read before the
        pause was detected."""
        self.heard_at = min(now, self.heard_at + pause_s)
        self.moved_at = min(now, self.moved_at + pause_s)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process as the broker tracks it."""

    hello: Hello
    peer: bytes  # routing id of its control connection
    joined_at: float
    state: WorkerState = WorkerState.MEMBER
    refusals: list[LayerRange] = field(default_factory=list)  # layers that it is not asked to load until ``retry_at``
    retry_at: float = 0.0
    num_retries: int = 0
    comes_again: bool = False  # when released, it must exit in a way that makes its supervisor restart it
    wants_to_leave: bool = False  # it has asked to leave: when its connection closes, that is no loss
    called_at: float | None = None  # time of the last order to send Hello again, or to go
    num_lies: int = 0  # number of its results that were proven wrong; if any, nothing it holds is used again
    num_faults: int = 0  # how often it was put out, or failed a device test, because its steps raised
    num_confirmed: int = 0  # how often another worker computed the same result
    # worker name -> number of disagreements, in which one of the two was wrong
    disagreed_with: dict[str, int] = field(default_factory=dict)
    belongs_to: str = ""  # the member whose key it used; empty on the broker's own machine
    is_revoked: bool = False  # its key was revoked: its messages are ignored, and it is not called back
    call_after: float = 0.0  # earliest time at which it may be asked to rejoin, if the swarm does not need it
    reason: str = ""  # why it is in this state
    loaded_bytes: int = 0  # weights loaded so far, of ``total_bytes`` under the current order
    total_bytes: int = 0
    pace: float = 1.0  # measured duration of its steps, relative to its benchmark at join
    planned: LayerRange | None = None  # layers that the last active plan assigned to it
    # Sequences it held before its Hello -> positions that may be used. None: it holds what it was ordered to.
    believed: dict[int, int] | None = None
    kept: tuple[LayerRange, ...] = ()  # layers that it reports as warm, in addition to its own
    # layers it was last asked to keep warm under the current plan; None: not asked yet
    asked_to_keep: tuple[LayerRange, ...] | None = None
    warms_since: float = 0.0  # time at which it was last asked to keep layers warm
    warmed_bytes: int = 0  # bytes of weights warmed since then
    load_bytes_per_s: float = LOAD_BYTES_PER_S  # last measured rate
    stats: dict[str, float] = field(default_factory=dict)
    pulse: Pulse = field(init=False)
    # start of the wait for workers started together: ``joined_at`` plus pauses of the broker
    waits_since: float = field(init=False)
    judged: Judgement | None = None  # the last verdict; of a worker that is gone, the reason

    def __post_init__(self) -> None:
        """Start a new heartbeat history at Hello: earlier heartbeats of this process do not count."""
        self.pulse = Pulse(self.joined_at)
        self.waits_since = self.joined_at

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def layers(self) -> LayerRange | None:
        """Layers that the worker has loaded, as far as reported."""
        return self.planned if self.planned is not None else self.hello.held_layers

    @property
    def is_gone(self) -> bool:
        """Whether the worker is excluded from plans and its messages are ignored."""
        return self.state in (WorkerState.LEFT, WorkerState.OUT)

    def forgive(self, pause_s: float, now: float) -> None:
        """Move the worker's times forward by a pause of the broker, during which no messages were read."""
        self.pulse.forgive(pause_s, now)
        self.waits_since = min(now, self.waits_since + pause_s)

    def ask_to_keep(self, layers: tuple[LayerRange, ...], now: float) -> None:
        """Note the layers that the worker must keep warm from now on."""
        self.asked_to_keep, self.warms_since, self.warmed_bytes = layers, now, 0

    def warm(self, layers: tuple[LayerRange, ...], num_bytes: int) -> None:
        """Note the layers that the worker keeps warm by now, and the bytes that are new."""
        self.kept = layers
        self.warmed_bytes += num_bytes

    def hold(self, kept: tuple[LayerRange, ...], believed: dict[int, int] | None) -> None:
        """Note the layers that the worker keeps warm, and the usable positions of the sequences that it held before."""
        self.kept, self.believed = kept, believed

    def be_called(self, now: float) -> None:
        """Note the time at which the worker was sent an order to rejoin, or an answer."""
        self.called_at = now

    def start_leaving(self) -> None:
        """Let the worker serve until a plan no longer needs it."""
        self.state = WorkerState.LEAVING

    def leave(self, reason: str) -> None:
        """Note that the worker was released in good order."""
        self.state, self.reason = WorkerState.LEFT, reason

    def come_again(self) -> None:
        """Note that the worker's supervisor should restart it as a new process."""
        self.comes_again = True

    def told_to_go(self, epoch: int) -> Release:
        """Return the release order for a worker that has left."""
        return Release(epoch=epoch, reason=self.reason, again=self.comes_again)

    def fall_out(self, reason: str) -> None:
        """Put the worker out: it is gone without having been asked to leave."""
        self.state, self.reason = WorkerState.OUT, reason

    def revoke(self) -> None:
        """Note that the worker's key was revoked."""
        self.is_revoked = True

    def be_judged(self, judgement: Judgement) -> None:
        self.judged = judgement

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict; None before the first."""
        return None if self.judged is None else self.judged.verdict

    @property
    def is_believed(self) -> bool:
        """Whether the state that the worker holds may be used: none of its results was wrong, and none of its steps
        raised."""
        return not (self.num_lies or self.num_faults)

    def fail_test(self, problem: str, now: float) -> None:
        """Put the worker out because a test of its device failed."""
        self.fall_out(f"its steps failed, and so did a test of its device: {problem}")
        self.be_judged(Judgement(Verdict.FAILED, self.reason, now))

    def refuse(self, layers: LayerRange, reason: str, now: float) -> None:
        """Note that the worker can't load these layers. It is asked again with exponential backoff."""
        if not self.refusals:
            self.num_retries += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (self.num_retries - 1))
        self.refusals.append(layers)
        self.state = WorkerState.REFUSED
        self.reason = reason

    def refuses(self, layers: LayerRange) -> bool:
        """Whether the worker has refused layers within this range, or a range that is no longer than this one."""
        return any((layers.first <= r.first and r.stop <= layers.stop) or len(r) <= len(layers) for r in self.refusals)

    def forget_refusals(self) -> None:
        self.refusals.clear()
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER

    def comply(self) -> None:
        """Note that the worker can load the layers it was asked to load."""
        if not self.refusals:
            self.num_retries = 0
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER


def failed_in_words(workers: Iterable[Worker]) -> list[str]:
    """Describe the workers that are out until a test of their device passes."""
    failed = [w for w in workers if w.state is WorkerState.OUT and w.verdict is Verdict.FAILED]
    return [f"{worker.name} is out until a test of its device passes: {worker.reason[:500]}" for worker in failed]


def _wait_s(times: int) -> float:
    """Return the seconds until a route that was blocked this many times is tried again."""
    return min(AGAIN_MOST_S, AGAIN_S * 2.0 ** (times - 1))


class Way(enum.Enum):
    """State of a route between two workers."""

    OPEN = "open"  # or not known
    RELAYED = "relayed"  # blocked directly, and the relay is used instead
    SHUT = "shut"


@dataclass(slots=True)
class Shut:
    """Reason why a route is blocked, and the time of the next try."""

    reason: str
    until: float  # time of the next try
    num_times: int  # tries so far, for the backoff
    is_relayed: bool  # the relay is used instead, until a try in the background has succeeded
    is_tried: bool = False  # the next plan uses the direct route, to test it


@dataclass(slots=True)
class Ways:
    """Blocked data routes from worker to worker, by incarnation. ``BROKER`` stands for the broker, which receives the
    results of the last stage. A route counts as open until it was found blocked."""

    relay: str = ""  # address of the relay, for workers that can only connect outwards; empty: there is none
    found: dict[tuple[str, str], Shut] = field(default_factory=dict)  # (source, target) -> blocked route
    avoided: dict[str, str] = field(default_factory=dict)  # workers that are only reachable through the relay -> reason

    def avoid(self, incarnation: str, reason: str) -> None:
        """Mark this worker as reachable through the relay only; without a reason, remove the mark."""
        self.avoided.pop(incarnation, None)
        if reason:
            self.avoided[incarnation] = reason

    def shut(self, source: str, target: Worker | None, reason: str, now: float) -> Way:
        """Record a blocked route (``target`` None: to the broker) and return its new state. If the route went through
        the relay already, the relayed route is blocked too."""
        name = BROKER if target is None else target.incarnation
        known = self.found.get((source, name))
        # a test under a plan was counted when it started
        times = 1 if known is None else known.num_times + (not known.is_tried)
        has_relay = bool(self.relay) and target is not None and bool(target.hello.ticket)
        is_new = known is None or not known.is_relayed or known.is_tried
        is_relayed = has_relay and is_new and name not in self.avoided
        self.found[source, name] = Shut(reason, now + _wait_s(times), times, is_relayed)
        return Way.RELAYED if is_relayed else Way.SHUT

    def to(self, source: str, target: str, now: float) -> Way:
        shut = self.found.get((source, target))
        if shut is not None and shut.is_relayed and not shut.is_tried:
            return Way.RELAYED
        if shut is not None and not shut.is_tried and now < shut.until:
            return Way.SHUT
        return Way.RELAYED if target in self.avoided else Way.OPEN

    def is_due(self, source: str, target: str, now: float) -> bool:
        """Whether a relayed route is to be tried directly now. If so, the next try is postponed."""
        shut = self.found.get((source, target))
        if shut is None or not shut.is_relayed or now < shut.until or target in self.avoided:
            return False
        shut.num_times += 1
        shut.until = now + _wait_s(shut.num_times)
        return True

    def try_directly(self, source: str, target: str) -> None:
        """Let the next plan use the direct route."""
        self.found[source, target].is_tried = True

    def end_trials(self, *, are_open: bool) -> None:
        """End the tests of direct routes; successful ones are no longer blocked."""
        tried = [way for way, shut in self.found.items() if shut.is_tried]
        for way in tried:
            self.found[way].is_tried = False
            if are_open:
                del self.found[way]

    def from_(self, source: str, kind: Way, now: float) -> Mapping[str, str]:
        """Return target -> reason for all routes from ``source`` in this state (not ``OPEN``)."""
        found = {target: why for target, why in self.avoided.items() if target != source}
        found |= {target: shut.reason for (own, target), shut in self.found.items() if own == source}
        return {target: why for target, why in found.items() if self.to(source, target, now) is kind}

    def reason(self, source: str, target: str) -> str:
        """Return why the route from ``source`` to ``target`` is not open."""
        shut = self.found.get((source, target))
        return self.avoided.get(target, "") if shut is None else shut.reason

    def at(self, now: float) -> frozenset[tuple[str, str, Way]]:
        """Return all routes that are not open."""
        ways = ((source, target, self.to(source, target, now)) for source, target in self.found)
        shut = frozenset(way for way in ways if way[2] is not Way.OPEN)
        return shut | {(ANYBODY, target, Way.RELAYED) for target in self.avoided}

    def relay_to(self, worker: Worker) -> str:
        """Return the relay address at which this worker waits for its steps."""
        return f"{self.relay}/{worker.hello.ticket}"

    def endpoint_of(self, worker: Worker) -> str:
        """Return the address to which others send this worker's steps, unless their route to it is blocked."""
        return self.endpoint_by_relay(worker) if worker.incarnation in self.avoided else worker.hello.endpoint

    def endpoint_by_relay(self, worker: Worker) -> str:
        """Return the address to which others send its steps through the relay."""
        return by_relay(worker.hello.endpoint, self.relay, worker.hello.ticket)

    def hurry(self, now: float) -> None:
        """Try blocked routes again soon, because no plan is possible without them."""
        for way in self.found.values():
            if not way.is_relayed:
                way.until = min(way.until, now + HURRY_S)

    def keep(self, living: Collection[str]) -> None:
        """Drop routes of workers that are gone, which bounds the table by the living workers."""
        known = {BROKER, *living}
        self.found = {way: shut for way, shut in self.found.items() if known.issuperset(way)}
        self.avoided = {name: why for name, why in self.avoided.items() if name in known}
