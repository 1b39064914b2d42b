"""Membership: workers join, send heartbeats, fall silent, leave, and are called back.

One rule covers every way of going: the worker is ``OUT``, the reconfiguration is notified, and its work in flight no
longer counts. A worker that was declared out and lives is fenced and may send Hello again.
"""

from __future__ import annotations

from swarm.broker.actions import OrderWorker, Outbox
from swarm.broker.events import AssetPartArrived
from swarm.broker.members.assets import Uploads
from swarm.broker.members.blame import Blame
from swarm.broker.members.entry import Entry, MemberSettings, remember
from swarm.broker.members.keyring import Keyring
from swarm.broker.members.recheck import Rechecker
from swarm.broker.members.trust import Finding, Lies
from swarm.broker.members.vigil import Vigil
from swarm.broker.planner.problem import Shortage
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.requests.requests import Requests
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.newcomers import Claim
from swarm.broker.state.workers import Judgement, Verdict
from swarm.wire.messages import (
    Activated,
    Alive,
    Beat,
    Denied,
    Digested,
    Fence,
    Hello,
    Kept,
    Leaving,
    LoadProgress,
    NotFinite,
    Prepared,
    Probe,
    Probed,
    Rechecked,
    Refused,
    Rejoin,
    Release,
    ReplayDone,
    ReplayMissing,
    SelfTested,
    Shun,
    Stats,
    StepFailure,
    Trouble,
    WorkerMessage,
)

REVOKED = "its key was revoked"
CALL_AGAIN_S = 2.0  # An order may be lost; but an order at every heartbeat would make the worker join over and over.


class Members:
    """Handles members' messages and their losses. Owns ``state.workers``; appends actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: MemberSettings,
        procedure: Procedure,
        requests: Requests,
        *,
        out: Outbox,
        now: float,
    ) -> None:
        self._state = state
        self._settings = settings
        self._procedure = procedure
        self._requests = requests
        self._out = out
        self._uploads = Uploads(state)
        self.keyring = Keyring(state, settings.key)
        self.lies = Lies(state)
        self.blame = Blame(state)
        self._rechecker = Rechecker(state, settings.recheck, out)
        self.vigil = Vigil(state, settings.health)
        self.entry = Entry(
            state, settings, procedure, requests, out, keyring=self.keyring, uploads=self._uploads, lose=self._lose
        )
        state.leases_renewed_at = now

    # --- workers' messages -------------------------------------------------------------------------------------------

    def said(self, peer: bytes, message: WorkerMessage, now: float, owner: str = "", not_at: str = "") -> None:
        if isinstance(message, Hello):
            self.entry.hello(Claim(peer, message, owner, now, not_at), now)
            return
        if isinstance(message, Probe):
            self._out.append(OrderWorker(peer, Probed(epoch=self._state.book.written, ticket=message.ticket)))
            return
        if isinstance(message, SelfTested):
            self._tested(peer, message, now)
            return
        worker = self._member(peer)
        if worker is None:
            self._stranger_said(peer, message)
        elif message.lineage != self._state.lineage and not isinstance(message, Leaving | Stats):
            self._state.count("stale_control")  # from the epochs of an earlier broker, which may have the same numbers
        else:
            self._member_said(worker, message, now)

    def _member_said(self, worker: Worker, message: WorkerMessage, now: float) -> None:
        match message:
            case Prepared():
                self._procedure.prepared(message, now)
            case Refused():
                self._procedure.refused(worker, message, now)
            case Activated():
                self._procedure.activated(message, now)
                self._end_the_dangerous(now)
            case ReplayDone() | ReplayMissing() | Rechecked() | Digested():
                self._answered(worker, message, now)
            case LoadProgress() | Kept():
                self._procedure.loads(worker, message, now)
            case Stats():
                worker.stats = message.values
            case Trouble():
                self._trouble(worker, message, now)
            case Leaving() if worker.wants_to_leave:
                self._state.count("unexpected_control")  # a repeated Leaving: the first one is still being worked on
            case Leaving():
                worker.wants_to_leave = True
                self._out.note("worker_leaves", worker=worker.name, reason=message.reason)
                self.let_go(worker, now)
            case _:
                self._state.count("unexpected_control")

    def _answered(self, worker: Worker, message: ReplayDone | ReplayMissing | Rechecked | Digested, now: float) -> None:
        """Pass on the result of a computation that the broker ordered: a replay or a recheck."""
        if isinstance(message, Rechecked | Digested):
            self._rechecker.said(worker, message)
            return
        if isinstance(message, ReplayDone):
            self.blame.replayed(message, now)
        self._procedure.rebuilder.answered(message, now)

    def _stranger_said(self, peer: bytes, message: WorkerMessage) -> None:
        """Answer a non-member. If it asks to leave, release it immediately: no plan depends on it."""
        self._state.count("strangers")
        if isinstance(message, Leaving):
            self._out.append(OrderWorker(peer, Release(epoch=self._state.book.written, reason="no plan needs it")))

    def _trouble(self, worker: Worker, message: Trouble, now: float) -> None:
        """Handle a break of the active plan's data path at this worker; reports about an older plan are stale."""
        current = self._state.book.current
        if current is None or message.epoch != current.epoch:
            self._state.count("stale_control")
            return
        self._out.note("trouble", "error", worker=worker.name, reason=message.reason)
        self._state.count("troubles")
        if message.damaged:
            self.damaged(now)
        elif message.failed is not None:
            self._step_failed(worker, message.failed, message.reason, now)
        elif message.not_finite is None or not self._judge(worker, message.not_finite, now):
            self._procedure.trouble(now, blame=True)
            self._end_the_dangerous(now)

    def damaged(self, now: float) -> None:
        """Handle a message damaged in transit: the network's fault. If no step is in flight, nothing is lost."""
        if self._procedure.awaits_steps and self.lies.is_loss():
            self._procedure.trouble(now, blame=False)

    def _judge(self, reporter: Worker, found: NotFinite, now: float) -> bool:
        """Handle hidden states that are not finite: the previous stage is put out, or the request that causes them
        fails."""
        suspect = self.lies.sender_to(reporter, found)
        if suspect is None:
            return False
        is_needed = self._procedure.wanted.shortage_without(suspect) is not None
        self._act_on(self.lies.judge(reporter, suspect, found, is_needed=is_needed), Verdict.LIED, now)
        return True

    def _step_failed(self, worker: Worker, failed: StepFailure, reason: str, now: float) -> None:
        """Handle a step that raised at this worker: the worker is put out, or the request to blame fails, or the step
        is retried."""
        is_needed = self._procedure.wanted.shortage_without(worker) is not None
        self._act_on(self.blame.judge(worker, failed, reason, is_needed=is_needed), Verdict.FAILED, now)

    def _act_on(self, finding: Finding, verdict: Verdict, now: float) -> None:
        for sequence, detail in finding.poisonous:
            self._out.note("request_quarantined", "error", request_id=sequence.request.id, reason=detail)
            self._requests.ends.end(sequence, "failed", now, detail)
        if finding.out is None:
            cause = "a step failed" if verdict is Verdict.FAILED else "hidden states were not finite"
            self._procedure.trouble(now, blame=False, cause=cause)
        else:
            self._lose(finding.out, finding.evidence, now, verdict=verdict)

    def _tested(self, peer: bytes, message: SelfTested, now: float) -> None:
        """Record the device test of a worker whose step failed; if it passed, the worker's Hello follows."""
        worker = self._state.workers.get(peer.decode(errors="replace"))
        is_out = worker is not None and worker.state is WorkerState.OUT and not worker.is_revoked
        if worker is None or not is_out or message.lineage != self._state.lineage:
            self._state.count("stale_control")
            return
        self.blame.tested(worker, message.problem)
        if message.problem:
            worker.fail_test(message.problem, now)
            self._out.note("device_test_failed", "error", worker=worker.name, reason=message.problem)
            self._procedure.look_again(now)

    def asset_part_arrived(self, event: AssetPartArrived, now: float) -> None:
        self._uploads.take(self._member(event.peer), event, now)

    def leave(self, worker: Worker, now: float) -> None:
        """Start a graceful leave: first a plan is made without the worker."""
        if worker.state is not WorkerState.LEAVING and not worker.is_gone:
            worker.start_leaving()
            self._procedure.leaving(worker, now)

    def let_go(self, worker: Worker, now: float) -> None:
        """Release a worker: gracefully, or immediately if no other worker can take its layers. The next plan, made
        without it, shows which; so this takes no longer than making that plan."""
        self.leave(worker, now)
        if not worker.is_gone and isinstance(self._procedure.wanted.now(), Shortage):
            self._procedure.release(worker, "it was asked to leave", now)
            self._procedure.lost(worker, now, blame=False)

    def disconnected(self, peer: bytes, now: float) -> None:
        """Put a worker out whose connection closed. If the worker lives and only lost its connection, it sends Hello
        over the next one by itself; it is called back only if that takes long, since an answer to the call would be a
        second Hello."""
        self._state.newcomers.gone(peer)
        worker = self._member(peer)
        if worker is not None:
            self._lose(worker, "its connection closed", now, blame=True)
            worker.be_called(now)
            self.entry.settle(now)

    def key_revoked(self, key: str, now: float) -> None:
        """Put a worker out whose key was revoked, whatever it is doing, and do not call it back. Its requests continue
        at the others, which block its key immediately: the next plan's fence may come late, or never for lack of its
        layers."""
        others = [worker for worker in self._state.workers.values() if not worker.is_gone and worker.hello.key != key]
        if self.keyring.revoke(key):
            self._out += [OrderWorker(each.peer, Shun(epoch=self._state.book.written, key=key)) for each in others]
        for worker in [worker for worker in self._state.workers.values() if worker.hello.key == key]:
            worker.revoke()
            if not worker.is_gone:
                self._out.append(OrderWorker(worker.peer, Denied(reason=REVOKED)))
                self._lose(worker, REVOKED, now)

    def _lose(
        self, worker: Worker, evidence: str, now: float, *, blame: bool = False, verdict: Verdict = Verdict.DEAD
    ) -> None:
        if worker.is_gone:
            return
        self._put_out(worker, evidence, verdict, now)
        self._procedure.lost(worker, now, blame=blame and worker.state is WorkerState.OUT)
        self._end_the_dangerous(now)

    def _lose_the_late(self, now: float) -> None:
        """Put out workers that have not answered by a plan's deadline; the next plan is made without any of them."""
        late = self._procedure.late(now)
        for worker, evidence in late:
            self._put_out(worker, evidence, Verdict.DEAD, now)
        for worker, _ in late:
            self._procedure.lost(worker, now, blame=False)

    def _put_out(self, worker: Worker, evidence: str, verdict: Verdict, now: float) -> None:
        """Mark a worker as out: counted, logged, and recorded. Every departure that is not a release ends here."""
        self._uploads.forget(worker.incarnation)
        if worker.wants_to_leave:
            worker.leave(evidence)
            self._out.note("worker_left", worker=worker.name, evidence=evidence)
        else:
            worker.fall_out(evidence)
            self._state.count("workers_lost")
            self._out.note("worker_out", "warning", worker=worker.name, evidence=evidence)
        worker.be_judged(Judgement(verdict, worker.reason, now))
        self._record_loss(worker, evidence, now)

    def _record_loss(self, worker: Worker, evidence: str, now: float) -> None:
        """Record the loss for the report on recoveries, if there is something to recover from."""
        book, recoveries = self._state.book, self._state.recoveries
        held = None if book.current is None else book.current.stage_of(worker.incarnation)
        is_coming = book.coming is not None and worker.incarnation in book.coming.members
        if held is not None or (is_coming and recoveries.current is not None):
            layers = None if held is None else held.layers
            recoveries.lost(worker.name, evidence, layers, worker.pulse.heard_at, now)

    def _end_the_dangerous(self, now: float) -> None:
        for sequence, detail in self.lies.dangerous():
            self._requests.ends.end(sequence, "failed", now, detail)

    def _member(self, peer: bytes) -> Worker | None:
        for worker in self._state.workers.values():
            if worker.peer == peer and not worker.is_gone:
                return worker
        return None

    # --- health ------------------------------------------------------------------------------------------------------

    def beat(self, beat: Beat, now: float, key: str = "") -> None:
        """Handle a heartbeat. ``key``: the sender's. One for another worker or with a revoked key is ignored."""
        worker = self._state.workers.get(beat.incarnation)
        if worker is not None and (worker.is_revoked or self.keyring.tells_apart(key, worker.hello.key)):
            self._state.count("foreign_beats")
            return
        if worker is None:
            self._state.count("strangers")
            self._call_stranger(beat.incarnation, now)
            return
        self._state.count("beats")
        worker.pulse.take(beat, now)
        was_called = worker.called_at is not None and now - worker.called_at <= CALL_AGAIN_S
        if worker.is_gone and not was_called and self.lies.may_be_called(worker):
            worker.be_called(now)
            self._call(worker)

    def _call(self, worker: Worker) -> None:
        """Call back a worker that was declared out and lives: it is fenced, and may send Hello and join again. A worker
        that was released has missed its Release, and gets it again."""
        epoch, reason = self._state.book.written, worker.reason
        if worker.state is WorkerState.LEFT:
            self._out.append(OrderWorker(worker.peer, worker.told_to_go(epoch)))
            return
        self._out.append(OrderWorker(worker.peer, Fence(epoch=epoch)))
        self._out.append(OrderWorker(worker.peer, Rejoin(epoch=epoch, reason=reason)))

    def _call_stranger(self, incarnation: str, now: float) -> None:
        """Invite the sender of a heartbeat that the broker has no record of (any more) to send Hello."""
        told_at = self._state.strangers.get(incarnation)
        if told_at is not None and now - told_at <= CALL_AGAIN_S:
            return
        remember(self._state.strangers, incarnation, now)
        reason = "the broker has no record of this worker"
        self._out.append(OrderWorker(incarnation.encode(), Rejoin(epoch=self._state.book.written, reason=reason)))

    def tick(self, now: float) -> None:
        """Carry out verdicts and deadlines, and renew leases."""
        for incarnation, judgement in self.vigil.judgements(now).items():
            worker = self._state.workers[incarnation]
            if judgement.verdict.is_out and not worker.is_gone:
                blame = judgement.verdict is Verdict.HUNG and self.vigil.computes(incarnation)
                self._lose(worker, judgement.evidence, now, blame=blame, verdict=judgement.verdict)
        self._lose_the_late(now)
        self.entry.settle(now)
        for worker, names in self._uploads.ask_others(now):
            self.entry.welcome(worker, names)
        self._rechecker.tick(now)
        self._forget_the_long_gone()
        self._renew_leases(now)

    def _renew_leases(self, now: float) -> None:
        if now - self._state.leases_renewed_at < self._settings.lease_s / 5:
            return
        self._state.leases_renewed_at = now
        for worker in self._state.workers.values():
            if not worker.is_gone:
                self._out.append(OrderWorker(worker.peer, Alive(epoch=self._state.book.written)))

    def _forget_the_long_gone(self) -> None:
        """Keep the last 16 departed workers, for ``swarmctl nodes``; a crash loop must not fill the memory."""
        gone = [i for i, w in self._state.workers.items() if w.is_gone]
        for incarnation in gone[: max(0, len(gone) - 16)]:
            self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        del self._state.workers[incarnation]
        self._state.ways.avoid(incarnation, "")
