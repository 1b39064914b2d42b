"""Thread that writes the journal. All queued writes are written together, in one transaction with one sync.

The broker's event loop queues writes and continues; confirmations are returned as facts. If the disk refuses a write,
nothing is dropped: the writes are kept and retried, and the loop is informed, so that it rejects new requests while
running ones continue. Epochs do not wait, because disk space is reserved for them. A disk that is far too slow is
treated the same. A journal that can't be trusted any more (``integrity``) is replaced by a new one; then the loop
queues everything in memory once more, and the journal counts as broken until that is written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm import failpoints
from swarm.broker.actions import FinishJournalRewrite, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.events import EndNotWritten, JournalBroke, JournalFigures, JournalMended, JournalRenewed
from swarm.broker.journal import DurableWrite, JournalWrite, WriteConfirmed, confirm, salvage
from swarm.broker.journal.database import DamagedJournal, FullDisk
from swarm.broker.journal.integrity import JournalIntegrity, NextAction, stat_files
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.clock import Clock
from swarm.errors import JournalError, report_thread_errors
from swarm.log import get_logger
from swarm.series import SHORT_S, Histogram, RunningStats
from swarm.wire.messages import Json

RETRY_S = 1.0  # seconds between attempts to write a refused batch
CHECK_INTERVAL_S = 0.5  # seconds between checks of the files while there is nothing to write
DELETE_INTERVAL_S = 60.0  # seconds between deletions of old requests
REPORT_INTERVAL_S = 1.0  # minimum seconds between reports of figures
MAX_TOGETHER = 1024  # maximum writes in one transaction
MAX_WAITING = 1 << 16  # beyond, tokens that can't be written are dropped: they can be computed again
STOP_S = 10.0  # seconds to wait for the thread to end

log = get_logger(__name__)

JournalFact = WriteConfirmed | EndNotWritten | JournalBroke | JournalMended | JournalRenewed | JournalFigures


@dataclass(slots=True)
class WriterFigures:
    """Counters and durations of the writer thread, for reports."""

    transactions: RunningStats = field(default_factory=RunningStats)  # durations of transactions without a sync
    durable: RunningStats = field(default_factory=RunningStats)  # durations of transactions with a sync
    # distribution of the durations of all transactions
    spread: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    writes: int = 0
    failures: int = 0
    renewals: int = 0
    num_bytes: int = 0
    computed_s: float = 0.0  # CPU seconds of the thread in total, without waiting for the disk or for the GIL

    def values(self) -> Json:
        num = self.transactions.num + self.durable.num
        return {
            "transactions": num,
            "computed_us": round(self.computed_s / max(1, num) * 1e6, 1),
            "writes": self.writes,
            "transaction_us": round(self.transactions.average * 1e6, 1),
            "durable_us": round(self.durable.average * 1e6, 1),
            "longest_us": round(max(self.transactions.most, self.durable.most) * 1e6, 1),
            "failures": self.failures,
            "renewals": self.renewals,
            "bytes": self.num_bytes,
            "write_s": self.spread.report(),
        }


@dataclass(slots=True)
class JournalWriter:
    """Writes the journal in a thread of its own.

    ``on_facts`` receives facts in order, from the thread or from the caller of ``write``; it must not block.
    ``on_error`` is called from the thread for an error that is a bug; the thread has ended then, and nothing is written
    any more. ``on_reopened`` receives the new store after the journal was replaced, since readers need new connections.
    """

    store: JournalStore
    clock: Clock
    on_facts: Callable[[list[JournalFact]], None]
    on_error: Callable[[BaseException], None]
    on_reopened: Callable[[JournalStore], None] = lambda store: None
    figures: WriterFigures = field(default_factory=WriterFigures)
    _waiting: deque[JournalWrite] = field(default_factory=deque)
    # epochs that must overtake the writes which the disk refuses
    _epochs: list[WriteEpoch] = field(default_factory=list)
    # writes in progress, or refused and to be retried; owned by the thread
    _batch: list[JournalWrite] = field(default_factory=list)
    _work: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _broken_reason: str = ""  # why the journal can't be written; empty while it can
    _is_refused: bool = False  # the last attempt to write the batch failed
    _awaits_rewrite: bool = False  # the journal was replaced, and the content of memory is not in it yet
    _integrity: JournalIntegrity = field(init=False)
    _reported_damage: str = ""  # damage reported by a reader
    _deleted_at: float = 0.0
    _reported_at: float = 0.0
    _has_new_figures: bool = False  # something was written since the last report of figures
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._integrity = JournalIntegrity(self.store.path)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, *writes: JournalWrite) -> None:
        """Queue writes; their facts follow."""
        with self._work:
            for write in writes:
                if len(self._waiting) >= MAX_WAITING:
                    self._set_broken(f"the disk is too slow: {len(self._waiting)} writes wait")
                    self._drop_tokens()
                if self._broken_reason and not self._awaits_rewrite and isinstance(write, WriteEpoch):
                    self._epochs.append(write)
                else:
                    self._waiting.append(write)
            self._work.notify()

    def report_damage(self, reason: str) -> None:
        """Report that a reader has found the file damaged."""
        with self._work:
            self._reported_damage = reason
            self._work.notify()

    def close(self) -> None:
        """Write everything queued, then stop."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join(STOP_S)
        self.store.close()

    def _drop_tokens(self) -> None:
        """Drop queued token writes (these tokens can be drawn again) and keep the rest: the disk has been full or slow
        for long. ``JournalBroke`` was reported before, so the loop does not wait for their facts."""
        self._waiting = deque(write for write in self._waiting if not isinstance(write, WriteTokens))

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with report_thread_errors(self._on_death):
            self._serve()

    def _on_death(self, error: BaseException) -> None:
        log.exception("journal_thread_died")
        self.on_error(error)

    def _serve(self) -> None:
        if not self.store.reserve.fill():
            self._set_broken("the disk is full: the space reserved for epochs was used and can't be reserved again")
        self._integrity.record(stat_files(self.store.path))
        while True:
            self._take_batch()
            if not self._is_sound():
                if self._stopping:
                    self._give_up(self._integrity.reason)
                    return
                continue
            if self._batch:
                self._write()
            elif self._stopping:
                return
            elif self._broken_reason:
                self._set_mended()
            self._report_figures()
            self._delete_old()
            self._integrity.record(stat_files(self.store.path))

    def _take_batch(self) -> None:
        """Take the queued writes; return without any after a timeout. After a refusal, wait before the next attempt."""
        with self._work:
            if self._is_refused or (self._broken_reason and not self._awaits_rewrite):
                self._work.wait_for(lambda: self._stopping or self._epochs, RETRY_S)
            elif not self._waiting and not self._epochs:
                self._work.wait_for(self._has_work, CHECK_INTERVAL_S)
            self._batch += self._epochs  # epochs are taken even if the batch is full
            self._epochs.clear()
            while self._waiting and len(self._batch) < MAX_TOGETHER:
                self._batch.append(self._waiting.popleft())

    def _has_work(self) -> bool:
        return bool(self._waiting or self._epochs or self._batch or self._reported_damage or self._stopping)

    # --- integrity of the file ---------------------------------------------------------------------------------------

    def _is_sound(self) -> bool:
        """Whether the journal may be written: its files look as we left them, or it was just replaced."""
        if self._reported_damage:
            self._integrity.distrust(self._reported_damage)
            self._reported_damage = ""
        self._integrity.compare(stat_files(self.store.path))
        match self._integrity.next_action(self.clock.now()):
            case NextAction.EXAMINE:
                self._examine()
            case NextAction.RENEW:
                self._renew()
            case NextAction.WRITE | NextAction.WAIT:
                pass
        return not self._integrity.reason

    def _examine(self) -> None:
        began = self.clock.now()
        try:
            self.store.examine()
        except DamagedJournal as error:
            self._integrity.record_error(error)
            self._renew()
        except JournalError as error:
            self._integrity.record_error(error)
            self._integrity.record_examination(began, self.clock.now(), done=False)
            log.warning("journal_not_examined", reason=str(error))
        else:
            log.warning(
                "journal_touched", what="another process wrote into the journal's files; their content is intact"
            )
            self._integrity.record_examination(began, self.clock.now(), done=True)

    def _renew(self) -> None:
        """Replace the journal, keeping what can still be read; then ask for the content of memory."""
        self._set_broken(self._integrity.reason)
        began = self.clock.now()
        try:
            renewal = salvage.renew_journal(self.store, self._integrity.reason)
            self.store = renewal.store
            self.on_reopened(self.store)
        except JournalError as error:
            self._integrity.record_renewal(began, self.clock.now(), done=False)
            self.figures.failures += 1
            log.error("journal_not_renewed", reason=str(error), again_in_s=RETRY_S)
            return
        self._integrity.record_renewal(began, self.clock.now(), done=True)
        self.figures.renewals += 1
        with self._work:
            self._is_refused, self._awaits_rewrite = False, True
            self.on_facts([JournalRenewed(renewal.note, self.store.next_sequence)])

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        began = self.clock.now()
        if failpoints.armed:
            failpoints.hit("journal.writes")
        try:
            refused_ends = self._store_batch()
        except JournalError as error:
            self._on_refused(error)
            return
        if refused_ends:
            log.warning(
                "journal_ends_not_taken", sequences=sorted(refused_ends), reason="some of their tokens are missing"
            )
        if failpoints.armed:
            failpoints.hit("journal.written")
        took = self.clock.now() - began
        is_durable = any(isinstance(write, DurableWrite) for write in self._batch)
        (self.figures.durable if is_durable else self.figures.transactions).add(took)
        self.figures.spread.add(took)
        self.figures.writes += len(self._batch)
        self._is_refused = False
        if any(isinstance(write, FinishJournalRewrite) for write in self._batch):
            self._awaits_rewrite = False
        self._set_mended()
        facts: list[JournalFact] = [_confirm_or_refuse(write, refused_ends) for write in self._batch]
        self._batch.clear()
        self.figures.computed_s, self._has_new_figures = time.thread_time(), True
        self.on_facts(facts)

    def _report_figures(self) -> None:
        """Report figures at intervals, and after the last of many writes."""
        now = self.clock.now()
        if self._has_new_figures and now - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at, self._has_new_figures = now, False
            self.on_facts([JournalFigures(self.figures.values())])

    def _store_batch(self) -> set[int]:
        try:
            return self.store.write(self._batch, Timestamp.now())
        except FullDisk:
            if not self.store.truncate_log():
                raise
            return self.store.write(self._batch, Timestamp.now())

    def _on_refused(self, error: JournalError) -> None:
        """Keep a batch that could not be written."""
        self.figures.failures += 1
        self._is_refused = True
        self._integrity.record_error(error)
        self._set_broken(str(error))
        with self._work:  # in order: after the epochs of the batch
            self._batch += self._epochs
            self._epochs.clear()
        if isinstance(error, FullDisk):
            self._write_epochs()
        if self._integrity.reason and self._integrity.next_action(self.clock.now()) is NextAction.RENEW:
            self._renew()
        elif self._stopping:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        if self._batch:
            log.error("journal_not_written", writes=len(self._batch), reason=reason)
            self._batch.clear()

    def _write_epochs(self) -> None:
        """Write the epochs of the batch alone, using the reserved disk space."""
        epochs = [write for write in self._batch if isinstance(write, WriteEpoch)]
        if not epochs or not self.store.reserve.release_piece():
            return
        try:
            self.store.write(epochs, Timestamp.now())
        except JournalError as error:
            log.warning("epoch_not_written", epoch=epochs[-1].epoch, reason=str(error))
            return
        self._batch = [write for write in self._batch if not isinstance(write, WriteEpoch)]
        self.on_facts([confirm(epoch) for epoch in epochs])

    def _set_broken(self, reason: str) -> None:
        """Report, once, that the journal can't be written. From then on, pending epochs are written before all other
        data.

        Both threads may detect the failure, so a lock keeps their reports in order.
        """
        with self._work:
            if not self._broken_reason:
                log.error("journal_broke", reason=reason)
                self._broken_reason = reason
                self._epochs += [write for write in self._waiting if isinstance(write, WriteEpoch)]
                self._waiting = deque(write for write in self._waiting if not isinstance(write, WriteEpoch))
                self.on_facts([JournalBroke(reason)])

    def _set_mended(self) -> None:
        """Report that the journal can be written again. Called only when the disk reserve is complete, too."""
        if self._broken_reason and not self._awaits_rewrite and self.store.reserve.fill():
            with self._work:
                self._broken_reason = ""
                self.on_facts([JournalMended()])

    def _delete_old(self) -> None:
        now = self.clock.now()
        if self._broken_reason or now - self._deleted_at < DELETE_INTERVAL_S:
            return
        self._deleted_at = now
        try:
            num_deleted = self.store.delete_old(Timestamp.now())
            self.figures.num_bytes = self.store.num_bytes
            self.store.reserve.fill()
        except JournalError as error:  # the next write may still succeed; if not, it reports the error
            self.figures.failures += 1
            self._integrity.record_error(error)
            log.warning("journal_not_tidied", reason=str(error), again_in_s=DELETE_INTERVAL_S)
            return
        if num_deleted:
            log.info("journal_tidied", requests=num_deleted)


def _confirm_or_refuse(write: JournalWrite, refused_ends: set[int]) -> JournalFact:
    if isinstance(write, WriteEnd) and write.sequence in refused_ends:
        return EndNotWritten(write.sequence)
    return confirm(write)
