"""A worker as the broker tracks it: what it holds, its heartbeats, its verdict, and the routes to it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.broker.planner.load import ChunkRatio
from swarm.wire.messages import Heartbeat, Hello, LayerRange, Release
from swarm.wire.transport.keys import via_relay

# Delay after which a worker that refused layers is asked for them again: a full disk or memory may be free by then. If
# the cause lasts, each retry costs the other workers a plan that fails.
RETRY_MIN_S = 30.0
RETRY_MAX_S = 600.0

# A blocked route is tried again after a while, with exponential backoff: firewalls and addresses change.
BROKER = ""  # stands for the broker in routes: it sends steps to the first stage and receives the results of the last
ANY_SOURCE = "*"  # stands for every source
ROUTE_RETRY_MIN_S = 30.0  # seconds until the first retry
ROUTE_RETRY_MAX_S = 600.0  # maximum seconds between retries
ROUTE_RETRY_SOON_S = 3.0  # seconds until the retry if no plan is possible without the route

GAP_WINDOW_S = 30.0  # seconds: the longest interval between two heartbeats is remembered for one to two such windows
MIN_HEARTBEATS = 15  # heartbeats needed before their regularity is used

RATE_WINDOW_S = 1.0  # seconds over which the progress rate is averaged


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
    CORRUPT = "lied"  # it sent results that were proven wrong
    FAILED = "failed"  # its steps raised
    DIFFERS = "differs"  # its sequences or memory differed from the plan again and again

    @property
    def is_out(self) -> bool:
        return self in _OUT_VERDICTS


_OUT_VERDICTS = (Verdict.SILENT, Verdict.HUNG, Verdict.DEAD, Verdict.CORRUPT, Verdict.FAILED, Verdict.DIFFERS)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with the evidence for it."""

    verdict: Verdict
    evidence: str
    since: float = field(default=0.0, compare=False)  # time at which this verdict was first given


@dataclass(slots=True)
class HeartbeatHistory:
    """Heartbeats of one worker: their times, intervals and progress."""

    received_at: float  # time of the last heartbeat, moved forward by pauses of the broker
    last: Heartbeat | None = None
    # time at which the last heartbeat really arrived: ``received_at`` without corrections
    last_arrived_at: float | None = None
    progressed_at: float = 0.0  # time at which it last made progress, changed its activity or was idle
    rate: float = 0.0  # progress in layers (or tensors) per second
    loop_lag_s: float = 0.0  # seconds for which its control loop has been blocked, confirmed by two heartbeats in a row
    num_heartbeats: int = 0
    # longest interval between two heartbeats: in this window, and in the previous one
    _gaps: tuple[float, float] = (0.0, 0.0)
    _gaps_since: float = 0.0  # start of this window

    @property
    def longest_gap_s(self) -> float:
        """Longest recent interval between two heartbeats, without pauses of the broker."""
        return max(self._gaps)

    @property
    def has_enough(self) -> bool:
        """Whether there have been enough heartbeats to judge their regularity."""
        return self.num_heartbeats >= MIN_HEARTBEATS

    def record(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        before = self.last
        if before is None or (heartbeat.progress, heartbeat.state) != (before.progress, before.state):
            self.progressed_at = now
        if heartbeat.state not in ("computing", "loading"):
            self.progressed_at = now
        if before is not None:
            # A process that was stopped and resumes reports one blocked loop, so one report does not count.
            self.loop_lag_s = min(before.loop_lag_s, heartbeat.loop_lag_s)
            self._update_rate(heartbeat.progress - before.progress, now)
            self._update_gaps(now)
        self.num_heartbeats += 1
        self.last = heartbeat
        self.received_at = self.last_arrived_at = now

    def _update_rate(self, progress: int, now: float) -> None:
        elapsed_s = max(1e-3, now - self.received_at)
        weight = min(1.0, elapsed_s / RATE_WINDOW_S)
        self.rate += weight * (max(0, progress) / elapsed_s - self.rate)

    def _update_gaps(self, now: float) -> None:
        if now - self._gaps_since > GAP_WINDOW_S:
            self._gaps, self._gaps_since = (0.0, self._gaps[0]), now
        self._gaps = max(self._gaps[0], now - self.received_at), self._gaps[1]

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Move the times forward by a pause of the broker, at most to now: a heartbeat may have been read before the
        pause was detected."""
        self.received_at = min(now, self.received_at + pause_s)
        self.progressed_at = min(now, self.progressed_at + pause_s)


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
    restarts_on_release: bool = False  # when released, it must exit in a way that makes its supervisor restart it
    wants_to_leave: bool = False  # it has asked to leave: when its connection closes, that is no loss
    called_at: float | None = None  # time of the last order to send Hello again, or to go
    num_corrupt_results: int = 0  # number of its results that were proven wrong; if any, nothing it holds is used again
    num_faults: int = 0  # how often it was put out, or failed a device test, because its steps raised
    num_removals: int = 0  # how often it was put out because it differed from the plan
    differences: list[float] = field(default_factory=list)  # recent times at which it differed from the plan
    num_confirmed: int = 0  # how often another worker computed the same result
    # worker name -> number of disagreements, in which one of the two was wrong
    disagreed_with: dict[str, int] = field(default_factory=dict)
    key_owner: str = ""  # the member whose key it used; empty on the broker's own machine
    is_revoked: bool = False  # its key was revoked: its messages are ignored, and it is not called back
    call_after: float = 0.0  # earliest time at which it may be asked to rejoin, if the swarm does not need it
    reason: str = ""  # why it is in this state
    loaded_bytes: int = 0  # weights loaded so far, of ``total_bytes`` under the current order
    total_bytes: int = 0
    pace: float = 1.0  # measured duration of its steps, relative to its benchmark at join
    planned_layers: LayerRange | None = None  # layers that the last active plan assigned to it
    bits: str = field(init=False)  # as it reported last (``Prepared.bits``); empty: it has not loaded anything yet
    # Sequences it held before its Hello -> positions that may be used. None: it holds what it was ordered to.
    trusted_positions: dict[int, int] | None = None
    warm_layers: tuple[LayerRange, ...] = ()  # layers that it reports as warm, in addition to its own
    # layers it was last asked to keep warm under the current plan; None: not asked yet
    ordered_warm_layers: tuple[LayerRange, ...] | None = None
    warming_since: float = 0.0  # time at which it was last asked to keep layers warm
    warmed_bytes: int = 0  # bytes of weights warmed since then
    # last measured rate of loading, besides the time that any load takes; None: not measured yet
    load_bytes_per_s: float | None = None
    chunk_ratio: ChunkRatio = field(default_factory=ChunkRatio)  # of prompts and replays
    stats: dict[str, float] = field(default_factory=dict)
    heartbeats: HeartbeatHistory = field(init=False)
    # start of the wait for workers started together: ``joined_at`` plus pauses of the broker
    waiting_since: float = field(init=False)
    judgement: Judgement | None = None  # the last verdict; of a worker that is gone, the reason

    def __post_init__(self) -> None:
        """Start a new heartbeat history at Hello: earlier heartbeats of this process do not count."""
        self.heartbeats = HeartbeatHistory(self.joined_at)
        self.waiting_since = self.joined_at
        self.bits = self.hello.bits

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def layers(self) -> LayerRange | None:
        """Layers that the worker has loaded, as far as reported."""
        return self.planned_layers if self.planned_layers is not None else self.hello.held_layers

    @property
    def is_gone(self) -> bool:
        """Whether the worker is excluded from plans and its messages are ignored."""
        return self.state in (WorkerState.LEFT, WorkerState.OUT)

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Move the worker's times forward by a pause of the broker, during which no messages were read."""
        self.heartbeats.shift_deadlines(pause_s, now)
        self.waiting_since = min(now, self.waiting_since + pause_s)

    def order_warm(self, layers: tuple[LayerRange, ...], now: float) -> None:
        """Note the layers that the worker must keep warm from now on."""
        self.ordered_warm_layers, self.warming_since, self.warmed_bytes = layers, now, 0

    def record_warm(self, layers: tuple[LayerRange, ...], num_bytes: int) -> None:
        """Note the layers that the worker keeps warm by now, and the bytes that are new."""
        self.warm_layers = layers
        self.warmed_bytes += num_bytes

    def record_bits(self, bits: str) -> None:
        """Record whose bits the worker's kernels compute with everything that it has loaded."""
        self.bits = bits

    def record_held(self, warm_layers: tuple[LayerRange, ...], trusted_positions: dict[int, int] | None) -> None:
        """Note the layers that the worker keeps warm, and the usable positions of the sequences that it held before."""
        self.warm_layers, self.trusted_positions = warm_layers, trusted_positions

    def forget_held(self) -> None:
        """Note that the worker has dropped what it held at its Hello. A worker that is not trusted never is again."""
        if self.is_trusted:
            self.trusted_positions = None

    def record_call(self, now: float) -> None:
        """Record the time at which the broker sent the worker an order to rejoin, or an answer."""
        self.called_at = now

    def start_leaving(self) -> None:
        """Let the worker serve until a plan no longer needs it."""
        self.state = WorkerState.LEAVING

    def leave(self, reason: str) -> None:
        """Note that the worker was released in good order."""
        self.state, self.reason = WorkerState.LEFT, reason

    def request_restart(self) -> None:
        """Note that the worker's supervisor should restart it as a new process."""
        self.restarts_on_release = True

    def build_release(self, epoch: int) -> Release:
        """Return the release order for a worker that has left."""
        return Release(epoch=epoch, reason=self.reason, again=self.restarts_on_release)

    def put_out(self, reason: str) -> None:
        """Put the worker out: it is gone without having been asked to leave."""
        self.state, self.reason = WorkerState.OUT, reason

    def revoke(self) -> None:
        """Note that the worker's key was revoked."""
        self.is_revoked = True

    def set_judgement(self, judgement: Judgement) -> None:
        self.judgement = judgement

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict; None before the first."""
        return None if self.judgement is None else self.judgement.verdict

    @property
    def is_trusted(self) -> bool:
        """Whether the state that the worker holds may be used: none of its results was wrong, and none of its steps
        raised."""
        return not (self.num_corrupt_results or self.num_faults)

    @property
    def may_copies_count(self) -> bool:
        """Whether copies of the keys and values that the worker computed may be used."""
        return self.is_trusted and not self.is_revoked

    def record_difference(self, now: float, window_s: float) -> int:
        """Note that the worker's sequences or memory differ from the plan. Return how often within this window."""
        self.differences = [*(at for at in self.differences if now - at < window_s), now]
        return len(self.differences)

    def fail_test(self, problem: str, now: float) -> None:
        """Put the worker out because a test of its device failed."""
        self.put_out(f"its steps failed, and so did a test of its device: {problem}")
        self.set_judgement(Judgement(Verdict.FAILED, self.reason, now))

    def record_refusal(self, layers: LayerRange, reason: str, now: float) -> None:
        """Note that the worker can't load these layers. It is asked again with exponential backoff."""
        if not self.refusals:
            self.num_retries += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (self.num_retries - 1))
        self.refusals.append(layers)
        self.state = WorkerState.REFUSED
        self.reason = reason

    def has_refused(self, layers: LayerRange) -> bool:
        """Whether the worker has refused a range that lies within ``layers``, or that is no longer than ``layers``."""
        return any((layers.first <= r.first and r.stop <= layers.stop) or len(r) <= len(layers) for r in self.refusals)

    def forget_refusals(self) -> None:
        self.refusals.clear()
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER

    def record_acceptance(self) -> None:
        """Record that the worker can load the layers it was ordered to load."""
        if not self.refusals:
            self.num_retries = 0
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER


def describe_failed(workers: Iterable[Worker]) -> list[str]:
    """Describe the workers that are out until a test of their device passes, or for a pause."""
    until = {Verdict.FAILED: "until a test of its device passes", Verdict.DIFFERS: "for a pause"}
    return [
        f"{worker.name} is out {until[worker.verdict]}: {worker.reason[:500]}"
        for worker in workers
        if worker.state is WorkerState.OUT and worker.verdict in until
    ]


def _backoff_s(num_times: int) -> float:
    """Return the seconds until a route that was blocked this many times is tried again."""
    return min(ROUTE_RETRY_MAX_S, ROUTE_RETRY_MIN_S * 2.0 ** (num_times - 1))


class RouteState(enum.Enum):
    """State of a route between two workers."""

    OPEN = "open"  # or not known
    RELAYED = "relayed"  # blocked directly, and the relay is used instead
    BLOCKED = "shut"


@dataclass(slots=True)
class BlockedRoute:
    """Reason why a route is blocked, and the time of the next try."""

    reason: str
    retry_at: float  # time of the next try
    num_times: int  # tries so far, for the backoff
    is_relayed: bool  # the relay is used instead, until a try in the background has succeeded
    is_tested: bool = False  # the next plan uses the direct route, to test it


@dataclass(slots=True)
class Routes:
    """Blocked data routes from worker to worker, by incarnation. ``BROKER`` stands for the broker, which receives the
    results of the last stage. A route counts as open until it was found blocked."""

    relay: str = ""  # address of the relay, for workers that can only connect outwards; empty: there is none
    blocked: dict[tuple[str, str], BlockedRoute] = field(default_factory=dict)  # (source, target) -> blocked route
    # workers that are only reachable through the relay -> reason
    relay_only: dict[str, str] = field(default_factory=dict)

    def set_relay_only(self, incarnation: str, reason: str) -> None:
        """Mark this worker as reachable through the relay only; without a reason, remove the mark."""
        self.relay_only.pop(incarnation, None)
        if reason:
            self.relay_only[incarnation] = reason

    def block(self, source: str, target: Worker | None, reason: str, now: float) -> RouteState:
        """Record a blocked route (``target`` None: to the broker) and return its new state. If the route went through
        the relay already, the relayed route is blocked too."""
        name = BROKER if target is None else target.incarnation
        former = self.blocked.get((source, name))
        # a test under a plan was counted when it started
        num_times = 1 if former is None else former.num_times + (not former.is_tested)
        has_relay = bool(self.relay) and target is not None and bool(target.hello.ticket)
        is_new = former is None or not former.is_relayed or former.is_tested
        is_relayed = has_relay and is_new and name not in self.relay_only
        self.blocked[source, name] = BlockedRoute(reason, now + _backoff_s(num_times), num_times, is_relayed)
        return RouteState.RELAYED if is_relayed else RouteState.BLOCKED

    def state_of(self, source: str, target: str, now: float) -> RouteState:
        blocked = self.blocked.get((source, target))
        if blocked is not None and blocked.is_relayed and not blocked.is_tested:
            return RouteState.RELAYED
        if blocked is not None and not blocked.is_tested and now < blocked.retry_at:
            return RouteState.BLOCKED
        return RouteState.RELAYED if target in self.relay_only else RouteState.OPEN

    def take_due(self, source: str, target: str, now: float) -> bool:
        """Whether a relayed route is to be tried directly now. If so, the next try is postponed."""
        blocked = self.blocked.get((source, target))
        if blocked is None or not blocked.is_relayed or now < blocked.retry_at or target in self.relay_only:
            return False
        blocked.num_times += 1
        blocked.retry_at = now + _backoff_s(blocked.num_times)
        return True

    def test_directly(self, source: str, target: str) -> None:
        """Let the next plan use the direct route."""
        self.blocked[source, target].is_tested = True

    def end_tests(self, *, are_open: bool) -> None:
        """End the tests of direct routes; successful ones are no longer blocked."""
        tested = [way for way, shut in self.blocked.items() if shut.is_tested]
        for way in tested:
            self.blocked[way].is_tested = False
            if are_open:
                del self.blocked[way]

    def routes_from(self, source: str, kind: RouteState, now: float) -> Mapping[str, str]:
        """Return target -> reason for all routes from ``source`` in this state (not ``OPEN``)."""
        reasons = {target: why for target, why in self.relay_only.items() if target != source}
        reasons |= {target: shut.reason for (own, target), shut in self.blocked.items() if own == source}
        return {target: why for target, why in reasons.items() if self.state_of(source, target, now) is kind}

    def reason_for(self, source: str, target: str) -> str:
        """Return why the route from ``source`` to ``target`` is not open."""
        blocked = self.blocked.get((source, target))
        return self.relay_only.get(target, "") if blocked is None else blocked.reason

    def list_not_open(self, now: float) -> frozenset[tuple[str, str, RouteState]]:
        """Return all routes that are not open."""
        routes = ((source, target, self.state_of(source, target, now)) for source, target in self.blocked)
        not_open = frozenset(way for way in routes if way[2] is not RouteState.OPEN)
        return not_open | {(ANY_SOURCE, target, RouteState.RELAYED) for target in self.relay_only}

    def relay_address(self, worker: Worker) -> str:
        """Return the relay address at which this worker waits for its steps."""
        return f"{self.relay}/{worker.hello.ticket}"

    def endpoint_of(self, worker: Worker) -> str:
        """Return the address to which others send this worker's steps, unless their route to it is blocked."""
        return self.relay_endpoint(worker) if worker.incarnation in self.relay_only else worker.hello.endpoint

    def relay_endpoint(self, worker: Worker) -> str:
        """Return the address to which others send its steps through the relay."""
        return via_relay(worker.hello.endpoint, self.relay, worker.hello.ticket)

    def retry_soon(self, now: float) -> None:
        """Try blocked routes again soon, because no plan is possible without them."""
        for route in self.blocked.values():
            if not route.is_relayed:
                route.retry_at = min(route.retry_at, now + ROUTE_RETRY_SOON_S)

    def retain(self, living: Collection[str]) -> None:
        """Drop routes of workers that are gone, which bounds the table by the living workers."""
        names = {BROKER, *living}
        self.blocked = {way: shut for way, shut in self.blocked.items() if names.issuperset(way)}
        self.relay_only = {name: why for name, why in self.relay_only.items() if name in names}
