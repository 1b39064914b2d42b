"""Membership: workers join, send heartbeats, fall silent, leave, and are called back.

One rule covers every way of going: the worker is ``OUT``, the reconfiguration is notified, and its work in flight no
longer counts. A worker that was declared out and lives is fenced and may send Hello again.
"""

from __future__ import annotations

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.events import AssetPartArrived
from swarm.broker.members.adapters import AdapterManager
from swarm.broker.members.admission import MemberSettings, WorkerAdmission, remember_bounded
from swarm.broker.members.assets import Uploads
from swarm.broker.members.blame import StepFailureJudge
from swarm.broker.members.differences import DifferenceJudge
from swarm.broker.members.integrity import FaultRuling, IntegrityMonitor
from swarm.broker.members.keyring import Keyring
from swarm.broker.members.monitor import HealthMonitor
from swarm.broker.members.recheck import RecheckCoordinator
from swarm.broker.planner.problem import Shortage
from swarm.broker.recovery.reconfiguration import Reconfiguration
from swarm.broker.requests.requests import RequestHandler
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.newcomers import NameClaim
from swarm.broker.state.workers import Judgement, Verdict
from swarm.wire.messages import (
    Activated,
    AdaptersSet,
    BlockKey,
    DataPathError,
    Denied,
    Fence,
    Heartbeat,
    Hello,
    KeptWarm,
    KvHeld,
    KvRestored,
    LeaseRenewed,
    Leaving,
    LoadProgress,
    LogDigest,
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
    Stats,
    StepFailure,
    WorkerMessage,
)

REVOKED = "its key was revoked"
CALL_INTERVAL_S = 2.0  # An order may be lost; but an order at every heartbeat would make the worker join over and over.


class WorkerMembership:
    """Handles members' messages and their losses. Owns ``state.workers``; appends actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: MemberSettings,
        reconfiguration: Reconfiguration,
        requests: RequestHandler,
        *,
        out: Outbox,
        now: float,
    ) -> None:
        self._state = state
        self._settings = settings
        self._reconfiguration = reconfiguration
        self._requests = requests
        self._out = out
        self._uploads = Uploads(state)
        self.adapters = AdapterManager(state, out)
        self.keyring = Keyring(state, settings.key)
        self.integrity = IntegrityMonitor(state)
        self.failure_judge = StepFailureJudge(state)
        self._difference_judge = DifferenceJudge(state)
        self._rechecker = RecheckCoordinator(state, settings.recheck, out)
        self.monitor = HealthMonitor(state, settings.health)
        self.admission = WorkerAdmission(
            state,
            settings,
            reconfiguration,
            requests,
            out,
            adapters=self.adapters,
            keyring=self.keyring,
            uploads=self._uploads,
            on_worker_lost=self._remove,
        )
        state.leases_renewed_at = now

    # --- workers' messages -------------------------------------------------------------------------------------------

    def on_message(
        self, peer: bytes, message: WorkerMessage, now: float, owner: str = "", address_error: str = ""
    ) -> None:
        if isinstance(message, Hello):
            self.admission.on_hello(NameClaim(peer, message, owner, now, address_error), now)
            return
        if isinstance(message, Probe):
            self._out.append(SendToWorker(peer, Probed(epoch=self._state.plans.journaled_epoch, ticket=message.ticket)))
            return
        if isinstance(message, SelfTested):
            self._on_self_test(peer, message, now)
            return
        worker = self._find_member(peer)
        is_ours = worker is None or message.lineage == self._state.lineage
        if isinstance(message, AdaptersSet) and is_ours:
            self.adapters.on_answer(peer, worker, message, now)
        elif worker is None:
            self._on_stranger_message(peer, message)
        elif message.lineage != self._state.lineage and not isinstance(message, Leaving | Stats):
            self._state.count("stale_control")  # from the epochs of an earlier broker, which may have the same numbers
        else:
            self._on_member_message(worker, message, now)

    def _on_member_message(self, worker: Worker, message: WorkerMessage, now: float) -> None:
        match message:
            case Prepared():
                self._reconfiguration.on_prepared(message, now)
            case Refused():
                self._reconfiguration.on_refused(worker, message, now)
            case Activated():
                self._reconfiguration.on_activated(message, now)
                self._end_quarantined(now)
            case ReplayDone() | ReplayMissing() | Rechecked() | LogDigest():
                self._on_recomputed(worker, message, now)
            case KvHeld():
                self._reconfiguration.on_kv_held(worker, message, now)
            case KvRestored():
                self._reconfiguration.restorer.on_restored(worker, message, now)
            case LoadProgress() | KeptWarm():
                self._reconfiguration.on_load_progress(worker, message, now)
            case Stats():
                worker.stats = message.values
            case DataPathError():
                self._on_data_path_error(worker, message, now)
            case Leaving() if worker.wants_to_leave:
                self._state.count("unexpected_control")  # a repeated Leaving: the first one is still being worked on
            case Leaving():
                worker.wants_to_leave = True
                self._out.note("worker_leaves", worker=worker.name, reason=message.reason)
                self.release(worker, now)
            case _:
                self._state.count("unexpected_control")

    def _on_recomputed(
        self, worker: Worker, message: ReplayDone | ReplayMissing | Rechecked | LogDigest, now: float
    ) -> None:
        """Pass on the result of a computation that the broker ordered: a replay or a recheck."""
        if isinstance(message, Rechecked | LogDigest):
            self._rechecker.on_result(worker, message)
            return
        if isinstance(message, ReplayDone):
            self.failure_judge.record_replay(message, now)
        self._reconfiguration.rebuilder.on_answer(message, now)

    def _on_stranger_message(self, peer: bytes, message: WorkerMessage) -> None:
        """Answer a non-member. If it asks to leave, release it immediately: no plan depends on it."""
        self._state.count("strangers")
        if isinstance(message, Leaving):
            self._out.append(
                SendToWorker(peer, Release(epoch=self._state.plans.journaled_epoch, reason="no plan needs it"))
            )

    def _on_data_path_error(self, worker: Worker, message: DataPathError, now: float) -> None:
        """Handle this worker's report that the active plan's data path is broken. Reports about an older plan are
        ignored."""
        current = self._state.plans.current
        if current is None or message.epoch != current.epoch:
            self._state.count("stale_control")
            return
        self._out.note("trouble", "error", worker=worker.name, reason=message.reason)
        self._state.count("troubles")
        if message.damaged:
            self.on_damaged_message(now)
        elif message.failed is not None:
            self._judge_step_failure(worker, message.failed, message.reason, now)
        elif message.kv_overfull or message.misplaced:
            ruling = self._difference_judge.judge(worker, message.reason)
            self._apply_ruling(
                ruling, Verdict.DIFFERS, now, cause="a worker's sequences or memory differ from the plan"
            )
        elif message.not_finite is None or not self._judge_not_finite(worker, message.not_finite, now):
            self._reconfiguration.on_data_path_broken(now, blame=True)
            self._end_quarantined(now)

    def on_damaged_message(self, now: float) -> None:
        """Handle a message damaged in transit: the network's fault. If no step is in flight, nothing is lost."""
        if self._state.has_work_in_flight and self.integrity.record_damage():
            self._reconfiguration.on_data_path_broken(now, blame=False)

    def _judge_not_finite(self, reporter: Worker, report: NotFinite, now: float) -> bool:
        """Handle hidden states that are not finite: the previous stage, or the request that causes them, must go."""
        suspect = self.integrity.find_accused(reporter, report)
        if suspect is None:
            return False
        is_needed = self._reconfiguration.target.shortage_without(suspect) is not None
        ruling = self.integrity.judge(reporter, suspect, report, is_needed=is_needed)
        self._apply_ruling(ruling, Verdict.CORRUPT, now, cause="hidden states were not finite")
        return True

    def _judge_step_failure(self, worker: Worker, failed: StepFailure, reason: str, now: float) -> None:
        """Handle a step that raised here: the worker is put out, the request to blame fails, or the step is retried."""
        is_needed = self._reconfiguration.target.shortage_without(worker) is not None
        ruling = self.failure_judge.judge(worker, failed, reason, is_needed=is_needed)
        self._apply_ruling(ruling, Verdict.FAILED, now, cause="a step failed")

    def _apply_ruling(self, ruling: FaultRuling, verdict: Verdict, now: float, *, cause: str) -> None:
        for sequence, detail in ruling.poisonous:
            self._out.note("request_quarantined", "error", request_id=sequence.request.id, reason=detail)
            self._requests.completer.end(sequence, "failed", now, detail)
        if ruling.out is None:
            self._reconfiguration.on_data_path_broken(now, blame=False, cause=cause)
        else:
            self._remove(ruling.out, ruling.evidence, now, verdict=verdict)

    def _on_self_test(self, peer: bytes, message: SelfTested, now: float) -> None:
        """Record the result of the device test of a worker whose step failed. If the test passed, the worker then sends
        Hello."""
        incarnation = peer.decode(errors="replace")
        worker = self._state.workers.get(incarnation)
        if worker is None and message.lineage == self._state.lineage:
            if not self.failure_judge.record_late_test(incarnation, message.problem):
                self._state.count("stale_control")
            return
        is_out = worker is not None and worker.state is WorkerState.OUT and not worker.is_revoked
        if worker is None or not is_out or message.lineage != self._state.lineage:
            self._state.count("stale_control")
            return
        self.failure_judge.record_test(worker, message.problem)
        if message.problem:
            worker.fail_test(message.problem, now)
            self._out.note("device_test_failed", "error", worker=worker.name, reason=message.problem)
            self._reconfiguration.refresh_wait_reason(now)

    def on_asset_part(self, event: AssetPartArrived, now: float) -> None:
        self._uploads.add_part(self._find_member(event.peer), event, now)

    def start_leave(self, worker: Worker, now: float) -> None:
        """Start a graceful leave: first a plan is made without the worker."""
        if worker.state is not WorkerState.LEAVING and not worker.is_gone:
            worker.start_leaving()
            self._reconfiguration.on_worker_leaving(worker, now)

    def release(self, worker: Worker, now: float) -> None:
        """Release a worker: gracefully, or immediately if no plan without it is possible. This takes as long as
        searching for such a plan."""
        self.start_leave(worker, now)
        if not worker.is_gone and isinstance(self._reconfiguration.target.propose(), Shortage):
            self._reconfiguration.release(worker, "it was asked to leave", now)
            self._reconfiguration.on_worker_lost(worker, now, blame=False)

    def on_disconnected(self, peer: bytes, now: float) -> None:
        """Put a worker out whose connection closed. If the worker lives and only lost its connection, it sends Hello
        over the next one by itself; it is called back only if that takes long, since an answer to the call would be a
        second Hello."""
        self._state.newcomers.drop_connection(peer)
        worker = self._find_member(peer)
        if worker is not None:
            self._remove(worker, "its connection closed", now, blame=True)
            worker.record_call(now)
            self.admission.settle_claims(now)

    def on_key_revoked(self, key: str, now: float) -> None:
        """Put out the worker with a revoked key, whatever it is doing, and do not call it back.

        Its requests continue at the other workers. These block its key immediately, without waiting for the next plan's
        fence, which may come late, or never if layers are missing.
        """
        others = [worker for worker in self._state.workers.values() if not worker.is_gone and worker.hello.key != key]
        if self.keyring.revoke(key):
            self._out += [
                SendToWorker(each.peer, BlockKey(epoch=self._state.plans.journaled_epoch, key=key)) for each in others
            ]
        for worker in [worker for worker in self._state.workers.values() if worker.hello.key == key]:
            worker.revoke()
            if not worker.is_gone:
                self._out.append(SendToWorker(worker.peer, Denied(reason=REVOKED)))
                self._remove(worker, REVOKED, now)

    def _remove(
        self, worker: Worker, evidence: str, now: float, *, blame: bool = False, verdict: Verdict = Verdict.DEAD
    ) -> None:
        if worker.is_gone:
            return
        self._mark_out(worker, evidence, verdict, now)
        self._reconfiguration.on_worker_lost(worker, now, blame=blame and worker.state is WorkerState.OUT)
        self._end_quarantined(now)

    def _remove_overdue(self, now: float) -> None:
        """Declare workers dead that have not answered a plan's order by its deadline. All are removed before the next
        plan is made, so that it contains none of them."""
        overdue = self._reconfiguration.overdue_workers(now)
        for worker, evidence in overdue:
            self._mark_out(worker, evidence, Verdict.DEAD, now)
        for worker, _ in overdue:
            self._reconfiguration.on_worker_lost(worker, now, blame=False)

    def _mark_out(self, worker: Worker, evidence: str, verdict: Verdict, now: float) -> None:
        """Mark a worker as out: counted, logged, and recorded. Every departure that is not a release ends here."""
        self._uploads.drop(worker.incarnation)
        if worker.wants_to_leave:
            worker.leave(evidence)
            self._out.note("worker_left", worker=worker.name, evidence=evidence)
        else:
            worker.put_out(evidence)
            self._state.count("workers_lost")
            self._out.note("worker_out", "warning", worker=worker.name, evidence=evidence)
        worker.set_judgement(Judgement(verdict, worker.reason, now))
        self._record_loss(worker, evidence, now)

    def _record_loss(self, worker: Worker, evidence: str, now: float) -> None:
        """Record the loss for the report on recoveries, if there is something to recover from."""
        plans, recoveries = self._state.plans, self._state.recoveries
        held = None if plans.current is None else plans.current.stage_of(worker.incarnation)
        is_coming = plans.upcoming is not None and worker.incarnation in plans.upcoming.members
        if held is not None or (is_coming and recoveries.current is not None):
            layers = None if held is None else held.layers
            recoveries.record_loss(worker.name, evidence, layers, worker.heartbeats.received_at, now)

    def _end_quarantined(self, now: float) -> None:
        for sequence, detail in self.integrity.sequences_to_quarantine():
            self._requests.completer.end(sequence, "failed", now, detail)

    def _find_member(self, peer: bytes) -> Worker | None:
        for worker in self._state.workers.values():
            if worker.peer == peer and not worker.is_gone:
                return worker
        return None

    # --- health ------------------------------------------------------------------------------------------------------

    def on_heartbeat(self, beat: Heartbeat, now: float, key: str = "") -> None:
        """Handle a heartbeat. ``key``: the sender's. One for another worker or with a revoked key is ignored."""
        worker = self._state.workers.get(beat.incarnation)
        if worker is not None and (worker.is_revoked or self.keyring.is_other_key(key, worker.hello.key)):
            self._state.count("foreign_beats")
            return
        if worker is None:
            self._state.count("strangers")
            self._invite_stranger(beat.incarnation, now)
            return
        self._state.count("beats")
        worker.heartbeats.record(beat, now)
        was_called = worker.called_at is not None and now - worker.called_at <= CALL_INTERVAL_S
        if worker.is_gone and not was_called and self.integrity.may_rejoin(worker):
            worker.record_call(now)
            self._call_back(worker)

    def _call_back(self, worker: Worker) -> None:
        """Answer a worker that was declared out but is alive: send a Fence, and the request to join again with Hello.

        A worker that was released has missed its Release message; send that again instead.
        """
        epoch, reason = self._state.plans.journaled_epoch, worker.reason
        if worker.state is WorkerState.LEFT:
            self._out.append(SendToWorker(worker.peer, worker.build_release(epoch)))
            return
        self._out.append(SendToWorker(worker.peer, Fence(epoch=epoch)))
        self._out.append(SendToWorker(worker.peer, Rejoin(epoch=epoch, reason=reason)))

    def _invite_stranger(self, incarnation: str, now: float) -> None:
        """Invite the sender of a heartbeat that the broker has no record of (any more) to send Hello."""
        invited_at = self._state.non_members.get(incarnation)
        if invited_at is not None and now - invited_at <= CALL_INTERVAL_S:
            return
        remember_bounded(self._state.non_members, incarnation, now)
        reason = "the broker has no record of this worker"
        self._out.append(
            SendToWorker(incarnation.encode(), Rejoin(epoch=self._state.plans.journaled_epoch, reason=reason))
        )

    def tick(self, now: float) -> None:
        """Carry out verdicts and deadlines, and renew leases."""
        for incarnation, judgement in self.monitor.judgements(now).items():
            worker = self._state.workers[incarnation]
            if judgement.verdict.is_out and not worker.is_gone:
                blame = judgement.verdict is Verdict.HUNG and self.monitor.is_computing(incarnation)
                self._remove(worker, judgement.evidence, now, blame=blame, verdict=judgement.verdict)
        self._remove_overdue(now)
        self.admission.settle_claims(now)
        for worker, names in self._uploads.reassign(now):
            self.admission.welcome(worker, names)
        self._rechecker.tick(now)
        self._prune_departed()
        self._renew_leases(now)

    def _renew_leases(self, now: float) -> None:
        if now - self._state.leases_renewed_at < self._settings.lease_s / 5:
            return
        self._state.leases_renewed_at = now
        for worker in self._state.workers.values():
            if not worker.is_gone:
                self._out.append(SendToWorker(worker.peer, LeaseRenewed(epoch=self._state.plans.journaled_epoch)))

    def _prune_departed(self) -> None:
        """Keep the last 16 departed workers, for ``swarmctl nodes``; a crash loop must not fill the memory."""
        gone = [i for i, w in self._state.workers.items() if w.is_gone]
        for incarnation in gone[: max(0, len(gone) - 16)]:
            self._drop(incarnation)

    def _drop(self, incarnation: str) -> None:
        del self._state.workers[incarnation]
        self._state.routes.set_relay_only(incarnation, "")
