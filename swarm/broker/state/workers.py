"""A worker's process as the broker knows it: what it has, what its beats say, what is thought of it, the ways to it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.wire.door.keys import by_relay
from swarm.wire.messages import Beat, Hello, LayerRange, Release

# When a worker that refused layers is asked for them again: a full disk or memory may be free by then, and if the cause
# lasts, asking costs the others a plan that comes to nothing.
RETRY_MIN_S = 30.0
RETRY_MAX_S = 600.0

# A way that was found shut is tried again after a while, the later the more often that was in vain: firewalls and
# addresses change.
BROKER = ""  # who is no worker sends the first stage its steps, and takes what the last one makes of them
ANYBODY = "*"
AGAIN_S = 30.0
AGAIN_MOST_S = 600.0
HURRY_S = 3.0

LATELY_S = 30.0  # over so long the longest time between two beats is remembered, and for as long again
BEATS_TO_KNOW = 15  # before that nobody knows how evenly they come

RATE_OVER_S = 1.0  # the counter's speed is that of about the last second
LOAD_BYTES_PER_S = 5e8  # how quickly weights are read and warmed, until it was seen


class WorkerState(enum.Enum):
    MEMBER = "member"  # may be planned with
    REFUSED = "refused"  # it said that it can't carry out the last plan it was asked to; its reason is kept
    LEAVING = "leaving"  # to be released as soon as the plan can do without it
    LEFT = "left"  # released in good order
    OUT = "out"  # dead, frozen, hung or gone: fenced; it must say Hello again


class Verdict(enum.Enum):
    WELL = "well"
    SLOW = "slow"
    LOADING = "loading"
    BLOCKED = "blocked"
    SILENT = "silent"
    HUNG = "hung"
    DEAD = "dead"
    LEFT = "left"
    LIED = "lied"  # what it sent was proven wrong
    FAILED = "failed"  # its steps raised

    @property
    def is_out(self) -> bool:
        return self in (Verdict.SILENT, Verdict.HUNG, Verdict.DEAD, Verdict.LIED, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    evidence: str
    since: float = field(default=0.0, compare=False)  # when this verdict was first given


@dataclass(slots=True)
class Pulse:
    """What is known of one worker's beats."""

    heard_at: float
    beat: Beat | None = None
    beat_at: float | None = None  # when the last one really came: ``heard_at`` without what was forgiven
    moved_at: float = 0.0  # when it last showed progress, began with what it does, or had nothing to do
    rate: float = 0.0  # the counter's speed, in layers (or tensors) per second
    loop_lag_s: float = 0.0  # for how long its control loop has stood still, as two beats in a row say
    num_beats: int = 0
    _gaps: tuple[float, float] = (0.0, 0.0)  # the longest time between two beats: in this while, and in the one before
    _gaps_since: float = 0.0  # when this while began

    @property
    def longest_s(self) -> float:
        """The longest time between two beats of late. What was forgiven is not in it."""
        return max(self._gaps)

    @property
    def is_known(self) -> bool:
        """Have there been beats enough to say how evenly they come?"""
        return self.num_beats >= BEATS_TO_KNOW

    def take(self, beat: Beat, now: float) -> None:
        before = self.beat
        if before is None or (beat.progress, beat.state) != (before.progress, before.state):
            self.moved_at = now
        if beat.state not in ("computing", "loading"):
            self.moved_at = now
        if before is not None:
            # A process that was stopped and goes on says once that its loop stood still.
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
        """The broker stood still for so long. A beat that was heard before the pause was noticed is no younger than
        now."""
        self.heard_at = min(now, self.heard_at + pause_s)
        self.moved_at = min(now, self.moved_at + pause_s)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's process, as the broker knows it."""

    hello: Hello
    peer: bytes
    joined_at: float
    state: WorkerState = WorkerState.MEMBER
    refusals: list[LayerRange] = field(default_factory=list)  # what it is not asked to load until ``retry_at``
    retry_at: float = 0.0
    num_retries: int = 0
    comes_again: bool = False  # when it is let go, it shall end so that it is started anew
    wants_to_leave: bool = False  # it said so: when its connection closes, that is no loss
    called_at: float | None = None  # when it was last told to say Hello again, or to go
    num_lies: int = 0  # how often what this process sent was proven wrong; nothing that it holds is used again
    num_faults: int = 0  # how often it was put out, or failed a test, because its steps raised
    num_confirmed: int = 0  # how often another worker came to the same
    disagreed_with: dict[str, int] = field(default_factory=dict)  # by name: how often one of the two was wrong
    belongs_to: str = ""  # the member by whose key it was let in; empty: it is on the broker's own machine
    is_revoked: bool = False  # its key was: nothing that it says counts, and it is not called back
    call_after: float = 0.0  # when it may be asked to join anew, if the swarm can do without it
    reason: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    pace: float = 1.0  # how many times longer its steps take than it measured at join, as far as that was seen
    planned: LayerRange | None = None  # what the last plan that served gave it
    # Of what it holds since before its Hello: sequence -> positions that count. None: it holds what it was told to.
    believed: dict[int, int] | None = None
    kept: tuple[LayerRange, ...] = ()  # what it said is warm there beside that
    asked_to_keep: tuple[LayerRange, ...] | None = None  # since the plan in force began
    warms_since: float = 0.0  # when it was last asked to keep layers warm
    warmed_bytes: int = 0  # weights of those that it has loaded since
    load_bytes_per_s: float = LOAD_BYTES_PER_S  # as it was last seen
    stats: dict[str, float] = field(default_factory=dict)
    pulse: Pulse = field(init=False)
    waits_since: float = field(init=False)  # for those that were started with it: ``joined_at``, and our own pauses
    judged: Judgement | None = None  # the last verdict; of one that is gone: why it went

    def __post_init__(self) -> None:
        """It said Hello: whatever its process's beats said before no longer counts."""
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
        """Name the layers that it has loaded, as far as is known."""
        return self.planned if self.planned is not None else self.hello.held_layers

    @property
    def is_gone(self) -> bool:
        """Nothing is planned with it, and nothing it says counts."""
        return self.state in (WorkerState.LEFT, WorkerState.OUT)

    def forgive(self, pause_s: float, now: float) -> None:
        """The broker stood still for so long: it could hear neither its beats nor who was started with it."""
        self.pulse.forgive(pause_s, now)
        self.waits_since = min(now, self.waits_since + pause_s)

    def ask_to_keep(self, layers: tuple[LayerRange, ...], now: float) -> None:
        """Note what it is to keep warm from now on."""
        self.asked_to_keep, self.warms_since, self.warmed_bytes = layers, now, 0

    def warm(self, layers: tuple[LayerRange, ...], num_bytes: int) -> None:
        """Note what it keeps warm by now, and how many bytes of that are new."""
        self.kept = layers
        self.warmed_bytes += num_bytes

    def hold(self, kept: tuple[LayerRange, ...], believed: dict[int, int] | None) -> None:
        """Note what it has beside its layers: warm ones, and what counts of the sequences that it held before."""
        self.kept, self.believed = kept, believed

    def be_called(self, now: float) -> None:
        """Note when it was called: told to join anew, or how things stand."""
        self.called_at = now

    def start_leaving(self) -> None:
        """Let it serve until a plan does without it."""
        self.state = WorkerState.LEAVING

    def leave(self, reason: str) -> None:
        """Note that it has gone in good order."""
        self.state, self.reason = WorkerState.LEFT, reason

    def come_again(self) -> None:
        """Note that it is wanted back, as a new process."""
        self.comes_again = True

    def told_to_go(self, epoch: int) -> Release:
        """Word the order for a worker that has left."""
        return Release(epoch=epoch, reason=self.reason, again=self.comes_again)

    def fall_out(self, reason: str) -> None:
        """Note that it is gone, though nobody asked it to."""
        self.state, self.reason = WorkerState.OUT, reason

    def revoke(self) -> None:
        """Note that its key opens no door any more."""
        self.is_revoked = True

    def be_judged(self, judgement: Judgement) -> None:
        self.judged = judgement

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict; None before the first."""
        return None if self.judged is None else self.judged.verdict

    @property
    def is_believed(self) -> bool:
        """Whether what it holds may be used. It may not once what it sent was wrong, or its steps raised."""
        return not (self.num_lies or self.num_faults)

    def fail_test(self, problem: str, now: float) -> None:
        """Note that it is out, and stays so, because a test of its device failed."""
        self.fall_out(f"its steps failed, and so did a test of its device: {problem}")
        self.be_judged(Judgement(Verdict.FAILED, self.reason, now))

    def refuse(self, layers: LayerRange, reason: str, now: float) -> None:
        """Note that it can't load these layers; it will be asked again, the later the more often that was in vain."""
        if not self.refusals:
            self.num_retries += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (self.num_retries - 1))
        self.refusals.append(layers)
        self.state = WorkerState.REFUSED
        self.reason = reason

    def refuses(self, layers: LayerRange) -> bool:
        """Whether it said that it can't load these layers, or some of them; or other ones, no more than these are."""
        return any((layers.first <= r.first and r.stop <= layers.stop) or len(r) <= len(layers) for r in self.refusals)

    def forget_refusals(self) -> None:
        self.refusals.clear()
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER

    def comply(self) -> None:
        """Note that it can load what it was asked to."""
        if not self.refusals:
            self.num_retries = 0
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER


def failed_in_words(workers: Iterable[Worker]) -> list[str]:
    """Name the workers that are out until a test of their device has passed, and why."""
    failed = [w for w in workers if w.state is WorkerState.OUT and w.verdict is Verdict.FAILED]
    return [f"{worker.name} is out until a test of its device passes: {worker.reason[:500]}" for worker in failed]


def _wait_s(times: int) -> float:
    """How long a way that was found shut so many times is not tried again."""
    return min(AGAIN_MOST_S, AGAIN_S * 2.0 ** (times - 1))


class Way(enum.Enum):
    OPEN = "open"  # or not known
    RELAYED = "relayed"  # shut, and the relay goes around it
    SHUT = "shut"


@dataclass(slots=True)
class Shut:
    """Why a way is shut, and when it is to be tried again. ``is_relayed``: the relay goes around it, until a try that
    nobody waits for has found it open. ``is_tried``: the plan to come goes there directly, to find that out."""

    reason: str
    until: float
    num_times: int
    is_relayed: bool
    is_tried: bool = False


@dataclass(slots=True)
class Ways:
    """Ways to doors for steps, from incarnation (or ``BROKER``) to incarnation (or ``BROKER``, where the last stage
    sends what came out). One that nobody has found shut counts as open. ``relay``: where steps are passed on to workers
    that can only connect outwards; empty: nowhere. ``avoided``: workers that nobody may connect to directly, and why;
    by relay only."""

    relay: str = ""
    found: dict[tuple[str, str], Shut] = field(default_factory=dict)
    avoided: dict[str, str] = field(default_factory=dict)

    def avoid(self, incarnation: str, reason: str) -> None:
        """From now on nobody connects to this worker's own address; without a reason, everybody may."""
        self.avoided.pop(incarnation, None)
        if reason:
            self.avoided[incarnation] = reason

    def shut(self, source: str, target: Worker | None, reason: str, now: float) -> Way:
        """The way (to the broker: None) was found shut: what becomes of it. If that is said of one that is relayed, so
        is the relay's."""
        name = BROKER if target is None else target.incarnation
        known = self.found.get((source, name))
        times = 1 if known is None else known.num_times + (not known.is_tried)  # a try has been counted
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
        """Whether a way that goes by relay is to be tried directly. If so, the next time is later."""
        shut = self.found.get((source, target))
        if shut is None or not shut.is_relayed or now < shut.until or target in self.avoided:
            return False
        shut.num_times += 1
        shut.until = now + _wait_s(shut.num_times)
        return True

    def try_directly(self, source: str, target: str) -> None:
        """Have the next plan go there directly."""
        self.found[source, target].is_tried = True

    def end_trials(self, *, are_open: bool) -> None:
        """Learn what became of the ways that were tried directly."""
        tried = [way for way, shut in self.found.items() if shut.is_tried]
        for way in tried:
            self.found[way].is_tried = False
            if are_open:
                del self.found[way]

    def from_(self, source: str, kind: Way, now: float) -> Mapping[str, str]:
        """To whom its way is of this kind (not open), and why that is."""
        found = {target: why for target, why in self.avoided.items() if target != source}
        found |= {target: shut.reason for (own, target), shut in self.found.items() if own == source}
        return {target: why for target, why in found.items() if self.to(source, target, now) is kind}

    def reason(self, source: str, target: str) -> str:
        """Why it is not open."""
        shut = self.found.get((source, target))
        return self.avoided.get(target, "") if shut is None else shut.reason

    def at(self, now: float) -> frozenset[tuple[str, str, Way]]:
        """List all ways that are not open."""
        ways = ((source, target, self.to(source, target, now)) for source, target in self.found)
        shut = frozenset(way for way in ways if way[2] is not Way.OPEN)
        return shut | {(ANYBODY, target, Way.RELAYED) for target in self.avoided}

    def relay_to(self, worker: Worker) -> str:
        """Tell where this worker waits for its steps, if they come by relay."""
        return f"{self.relay}/{worker.hello.ticket}"

    def endpoint_of(self, worker: Worker) -> str:
        """Tell where others send its steps, unless they found that way shut."""
        return self.endpoint_by_relay(worker) if worker.incarnation in self.avoided else worker.hello.endpoint

    def endpoint_by_relay(self, worker: Worker) -> str:
        """Tell where others send them then."""
        return by_relay(worker.hello.endpoint, self.relay, worker.hello.ticket)

    def hurry(self, now: float) -> None:
        """Nothing goes without a way that is shut: try them again soon."""
        for way in self.found.values():
            if not way.is_relayed:
                way.until = min(way.until, now + HURRY_S)

    def keep(self, living: Collection[str]) -> None:
        """Forget those of whoever is gone: bounded by the workers that are here."""
        known = {BROKER, *living}
        self.found = {way: shut for way, shut in self.found.items() if known.issuperset(way)}
        self.avoided = {name: why for name, why in self.avoided.items() if name in known}
