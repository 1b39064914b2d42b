"""Who is a member: workers join, beat, fall silent, leave, and are called back.

One rule for every way of going: the worker is ``OUT``, the planner hears of it, and what is under way with it no longer
counts. A worker that was declared out and lives is fenced and may say Hello again.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import Action, Note, OrderWorker
from swarm.broker.events import AssetPartArrived
from swarm.broker.health import HealthSettings, Judgement, Pulse, Verdict, judge
from swarm.broker.partition import DEVICES, is_supported
from swarm.broker.planning import QUARANTINE_AFTER, Planner
from swarm.broker.requests import Requests
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.uploads import Uploads
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Activated,
    Alive,
    Beat,
    Denied,
    Dismiss,
    Fence,
    Hello,
    Leaving,
    LoadProgress,
    Prepared,
    Probe,
    Probed,
    Refused,
    Rejoin,
    Release,
    ReplayDone,
    ReplayMissing,
    Stats,
    Trouble,
    Welcome,
    WorkerMessage,
)
from swarm.wire.schema import schema

MAX_STRANGERS = 64  # incarnations that are remembered so as not to be called too often
CALL_AGAIN_S = 2.0  # an order may be lost; asking at every beat would make the worker join over and over


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What workers are told when they join, and by which rules they are judged."""

    beat_endpoint: str
    data_endpoint: str
    beat_interval_s: float
    lease_s: float
    health: HealthSettings


class Members:
    """Keeps ``state.workers``. Methods append what is to be done to ``out``."""

    def __init__(
        self,
        state: State,
        settings: MemberSettings,
        planner: Planner,
        requests: Requests,
        *,
        out: list[Action],
        now: float,
    ) -> None:
        self._state = state
        self._settings = settings
        self._planner = planner
        self._requests = requests
        self._out = out
        self._uploads = Uploads(state)
        self._pulses: dict[str, Pulse] = {}
        self._strangers: dict[str, float] = {}  # incarnation -> when it was last told something, the latest last
        self._leases_renewed_at = now

    # --- what workers say --------------------------------------------------------------------------------------------

    def said(self, peer: bytes, message: WorkerMessage, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, now)
            return
        if isinstance(message, Probe):
            self._out.append(OrderWorker(peer, Probed(epoch=self._state.book.written, ticket=message.ticket)))
            return
        worker = self._member(peer)
        if worker is None:
            self._stranger_said(peer, message)
            return
        match message:
            case Prepared():
                self._planner.prepared(message, now)
            case Refused():
                self._planner.refused(worker, message, now)
            case Activated():
                self._planner.activated(message, now)
                self._end_the_dangerous(now)
            case ReplayDone() | ReplayMissing():
                self._planner.rebuilder.answered(message, now)
            case LoadProgress():
                self._planner.load_progressed(worker, message, now)
            case Stats():
                worker.stats = message.values
            case Trouble():
                self._trouble(worker, message, now)
            case Leaving():
                worker.wants_to_leave = True
                self._note("worker_leaves", worker=worker.name, reason=message.reason)
                self.leave(worker, now, at_once=self._planner.shortage_without(worker) is not None)
            case _:
                self._state.count("unexpected_control")

    def _stranger_said(self, peer: bytes, message: WorkerMessage) -> None:
        """Nobody counts on it: if it asks to leave, it need not wait."""
        self._state.count("strangers")
        if isinstance(message, Leaving):
            self._out.append(OrderWorker(peer, Release(epoch=self._state.book.written, reason="no plan needs it")))

    def _trouble(self, worker: Worker, message: Trouble, now: float) -> None:
        """The data path of the plan in force broke at this worker; what it says of an older one is settled already."""
        current = self._state.book.current
        if current is None or message.epoch != current.epoch:
            self._state.count("stale_control")
            return
        self._note("trouble", "error", worker=worker.name, reason=message.reason)
        self._state.count("troubles")
        self._planner.trouble(now, blame=True)
        self._end_the_dangerous(now)

    def _hello(self, peer: bytes, hello: Hello, now: float) -> None:
        reason = self._why_not(hello)
        if reason is not None:
            self._note("worker_denied", "warning", worker=hello.name, reason=reason)
            self._out.append(OrderWorker(peer, Denied(reason=reason)))
            return
        known = self._state.workers.get(hello.incarnation)
        if known is not None and known.state is WorkerState.LEFT:
            self._out.append(OrderWorker(peer, Release(epoch=self._state.book.written, reason=known.reason)))
            return
        if known is not None and not known.is_gone:
            self._lose(known, "it said Hello again: what was under way with it is void", now)
        for other in list(self._state.workers.values()):
            if other.name == hello.name and other.incarnation != hello.incarnation:
                self._replace(other, hello, now)
        if self._state.manifest is None:
            self._state.manifest = hello.manifest
        self._state.book.heard_of(hello.epoch)
        worker = self._state.workers[hello.incarnation] = Worker(hello, peer, now)
        self._pulses[hello.incarnation] = Pulse(now)
        self._welcome(worker, self._uploads.ask(worker, now))
        if self._state.book.current is not None:
            # The plan in force was made without it: what it still holds of the sequences is of no use any more.
            self._out.append(OrderWorker(peer, Dismiss(epoch=self._state.book.written)))
        self._planner.changed(now)
        self._note("worker_joined", worker=hello.name, device=hello.device, memory_mib=hello.memory_bytes >> 20)

    def _replace(self, former: Worker, hello: Hello, now: float) -> None:
        """The newest process of a name is the one that counts; the one before, should it live, must end."""
        if not former.is_gone:
            reason = (
                f"another process (pid {hello.pid} on {hello.host}) joined under the name {hello.name}: "
                f"give every worker a name of its own"
            )
            self._out.append(OrderWorker(former.peer, Denied(reason=reason)))
        self._lose(former, f"replaced by a new process (pid {hello.pid})", now)
        self._forget(former.incarnation)
        self._remember_stranger(former.incarnation, now)

    def _why_not(self, hello: Hello) -> str | None:
        if PROTOCOL_VERSION not in hello.wire_versions:
            return (
                f"this broker speaks protocol {PROTOCOL_VERSION}, the worker {hello.wire_versions}: install one version"
            )
        if hello.schema != schema():
            return "the worker's messages are those of another build than the broker's: install one version on both"
        if not is_supported(hello.device):
            return f"device {hello.device!r} is none of {', '.join(DEVICES)}"
        if self._state.manifest is not None:
            difference = self._state.manifest.difference(hello.manifest)
            if difference is not None:
                return f"this swarm serves another model: {difference}"
        return self._planner.why_not(hello)

    def _welcome(self, worker: Worker, wants: tuple[str, ...]) -> None:
        """Tell a worker that it is a member (again: it is how a member is asked for files)."""
        welcome = Welcome(
            epoch=self._state.book.written,
            beat_endpoint=self._settings.beat_endpoint,
            data_endpoint=self._settings.data_endpoint,
            beat_interval_s=self._settings.beat_interval_s,
            lease_s=self._settings.lease_s,
            wants=wants,
        )
        self._out.append(OrderWorker(worker.peer, welcome))

    def asset_part_arrived(self, event: AssetPartArrived, now: float) -> None:
        self._uploads.take(self._member(event.peer), event, now)

    def leave(self, worker: Worker, now: float, *, at_once: bool) -> None:
        """In good order: the plan is made without it first, unless nobody else can take its layers."""
        if at_once:
            self._planner.release(worker, "it was asked to leave", now)
            self._planner.lost(worker, now, blame=False)
        elif not worker.is_gone:
            worker.state = WorkerState.LEAVING
            self._planner.leaving(worker, now)

    def disconnected(self, peer: bytes, now: float) -> None:
        worker = self._member(peer)
        if worker is not None:
            self._lose(worker, "its connection closed", now, blame=True)

    def _lose(self, worker: Worker, evidence: str, now: float, *, blame: bool = False) -> None:
        if worker.is_gone:
            return
        worker.reason = evidence
        self._uploads.forget(worker.incarnation)
        if worker.wants_to_leave:
            worker.state, blame = WorkerState.LEFT, False
            self._note("worker_left", worker=worker.name, evidence=evidence)
        else:
            worker.state = WorkerState.OUT
            self._state.count("workers_lost")
            self._note("worker_out", "warning", worker=worker.name, evidence=evidence)
        self._planner.lost(worker, now, blame=blame)
        self._end_the_dangerous(now)

    def _end_the_dangerous(self, now: float) -> None:
        """A request present at several deaths may be their cause; it must not take the swarm with it."""
        for sequence in [s for s in (*self._state.running, *self._state.waiting) if s.num_deaths >= QUARANTINE_AFTER]:
            detail = f"quarantined: it was in flight at {sequence.num_deaths} worker deaths or losses of steps"
            self._requests.end(sequence, "failed", now, detail)

    def _member(self, peer: bytes) -> Worker | None:
        for worker in self._state.workers.values():
            if worker.peer == peer and not worker.is_gone:
                return worker
        return None

    # --- health ------------------------------------------------------------------------------------------------------

    def beat(self, beat: Beat, now: float) -> None:
        worker = self._state.workers.get(beat.incarnation)
        if worker is None:
            self._state.count("strangers")
            self._call_stranger(beat.incarnation, now)
            return
        self._pulses[beat.incarnation].take(beat, now)
        if worker.is_gone and (worker.called_at is None or now - worker.called_at > CALL_AGAIN_S):
            worker.called_at = now
            self._call(worker)

    def _call(self, worker: Worker) -> None:
        """It was declared out and lives: it is fenced, and may say Hello and join anew. If it was released, it has not
        heard of it, and is told again."""
        epoch, reason = self._state.book.written, worker.reason
        if worker.state is WorkerState.LEFT:
            self._out.append(OrderWorker(worker.peer, Release(epoch=epoch, reason=reason)))
            return
        self._out.append(OrderWorker(worker.peer, Fence(epoch=epoch)))
        self._out.append(OrderWorker(worker.peer, Rejoin(epoch=epoch, reason=reason)))

    def _call_stranger(self, incarnation: str, now: float) -> None:
        """Somebody beats whom the broker does not know (any more): it may say Hello."""
        told_at = self._strangers.get(incarnation)
        if told_at is not None and now - told_at <= CALL_AGAIN_S:
            return
        self._remember_stranger(incarnation, now)
        reason = "the broker does not know this worker"
        self._out.append(OrderWorker(incarnation.encode(), Rejoin(epoch=self._state.book.written, reason=reason)))

    def _remember_stranger(self, incarnation: str, now: float) -> None:
        self._strangers.pop(incarnation, None)
        self._strangers[incarnation] = now
        if len(self._strangers) > MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]

    def judgements(self, usual_step_s: float, now: float) -> dict[str, Judgement]:
        """The verdict on every worker, with its evidence."""
        found: dict[str, Judgement] = {}
        for incarnation, worker in self._state.workers.items():
            if worker.is_gone:
                verdict = Verdict.LEFT if worker.state is WorkerState.LEFT else Verdict.DEAD
                found[incarnation] = Judgement(verdict, worker.reason)
            else:
                pulse = self._pulses[incarnation]
                found[incarnation] = judge(pulse, self._settings.health, usual_step_s, now)
        return found

    def tick(self, usual_step_s: float, now: float) -> None:
        """Verdicts are carried out, leases renewed."""
        for incarnation, judgement in self.judgements(usual_step_s, now).items():
            worker = self._state.workers[incarnation]
            if judgement.verdict.is_out and not worker.is_gone:
                self._lose(worker, judgement.evidence, now, blame=judgement.verdict is Verdict.HUNG)
        for worker, names in self._uploads.ask_others(now):
            self._welcome(worker, names)
        self._forget_the_long_gone()
        self._renew_leases(now)

    def forgive(self, pause_s: float) -> None:
        """The broker itself stood still: that is nobody's lateness."""
        for pulse in self._pulses.values():
            pulse.forgive(pause_s)

    def idle_s(self, incarnation: str) -> float:
        """For how long this worker has had nothing to do, as far as its beats say."""
        pulse = self._pulses.get(incarnation)
        beat = pulse.beat if pulse is not None else None
        return beat.since_s if beat is not None and beat.state == "idle" else 0.0

    def _renew_leases(self, now: float) -> None:
        if now - self._leases_renewed_at < self._settings.lease_s / 5:
            return
        self._leases_renewed_at = now
        for worker in self._state.workers.values():
            if not worker.is_gone:
                self._out.append(OrderWorker(worker.peer, Alive(epoch=self._state.book.written)))

    def _forget_the_long_gone(self) -> None:
        """Keep the last few that went, for ``swarmctl nodes``; a crash loop must not fill the memory."""
        gone = [i for i, w in self._state.workers.items() if w.is_gone]
        for incarnation in gone[: max(0, len(gone) - 16)]:
            self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        del self._state.workers[incarnation]
        self._pulses.pop(incarnation, None)

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields))
