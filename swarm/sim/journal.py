"""The journal of a simulated broker: a disk that survives the broker, and the thread that writes.

As in ``broker.journal.writer``, waiting writes are committed together; acceptances and epochs are synced before their
facts are reported, other writes are not. A process that dies loses the writes that wait in its memory. A power cut also
loses any number of the last transactions since the last sync; a half-written one is dropped by its checksum, so nothing
is ever missing in the middle. A full disk has a reserve for some epochs. A file that was deleted or damaged, or whose
sync failed, is detected by the rules of ``broker.journal.integrity``, and a new file is started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from swarm.broker.actions import FinishJournalRewrite, ReadList, ReadRequest, WriteEnd, WriteEpoch
from swarm.broker.events import EndNotWritten, JournalBroke, JournalMended, JournalRenewed, ListRead, RequestRead
from swarm.broker.journal import DurableWrite, JournalWrite, WriteConfirmed, confirm
from swarm.broker.journal.database import UnsyncedJournal
from swarm.broker.journal.integrity import FileState, FileStates, JournalIntegrity
from swarm.broker.journal.reader import DEFAULT_LISTED
from swarm.broker.reports.ended_requests import build_row
from swarm.broker.state.ended_requests import can_see
from swarm.broker.state.journal_snapshot import JournalSnapshot, next_lineage
from swarm.sim.checks.ledger import Ledger
from swarm.wire.messages import NO_LINEAGE, Lineage

if TYPE_CHECKING:
    from swarm.sim.network import SimLink
    from swarm.sim.world import World

RETRY_S = 1.0
CHECK_S = 0.5  # between two checks of the file
RESERVE = 4  # epochs that still fit on a full disk
# writes in one transaction: large enough for any simulated disk, small enough that deaths fall between two of them
MAX_BATCH = 64

SimJournalFact = WriteConfirmed | EndNotWritten | JournalBroke | JournalMended | JournalRenewed


class SimDisk:
    """Transactions of the simulated journal, in order.

    The file may be lost while the broker runs (``lose_file``). Until a new file has everything that the broker has, a
    restarted broker would not find everything, and the swarm promises nothing for that case. So a broker that dies in
    this time finds the file as if it had not been lost (``_whole``).
    """

    def __init__(self, world: World, number: int = 0) -> None:
        self._world = world
        self.ledger, self.safe = Ledger(), Ledger()  # what a reader finds now, and what a power cut leaves at least
        self.is_full = self.fails_to_sync = self.fails_to_read = False
        self.reserve = RESERVE
        self.integrity = JournalIntegrity(Path("journal.db"))
        self._number = 0  # number of the current file; a new file gets another one
        self._whole: Ledger | None = None  # the content without the accident; None: no file is lost
        self.was_lost = False  # ever; entries that only the file had may be gone
        self.forgotten: set[str] = set()  # requests that had ended, without a reader, and that only the lost file had
        self._base = Ledger()  # what the current file began with
        # committed transactions that are not synced, with their times
        self._unsafe: deque[tuple[float, Sequence[JournalWrite]]] = deque()
        self._safe_writes: list[tuple[float, Sequence[JournalWrite]]] = []  # synced transactions, with their times
        # number of synced transactions at each start of a broker, and its lineage
        self._openings: list[tuple[int, Lineage]] = [(0, NO_LINEAGE)]
        self._chance = Random(f"journal {number}")
        self.integrity.record(self._file_states)

    def heal(self) -> None:
        """End the disk's faults: there is space, and reads succeed."""
        self.is_full = self.fails_to_read = False

    @property
    def is_damaged(self) -> bool:
        return self._whole is not None

    @property
    def _file_states(self) -> FileStates:
        return {"journal.db": FileState((0, self._number), 0, 0)}

    def check(self) -> bool:
        """Check the file, and return whether it can be trusted."""
        self.integrity.compare(self._file_states)
        return not self.integrity.reason

    def lose_file(self, how: str) -> None:
        """Lose the file. Deleted, it stays complete for the process that has it open; damaged, it gives a part;
        garbled, nothing."""
        if self.is_damaged:
            return
        self._whole, self.ledger, self.was_lost = self.ledger, deepcopy(self.ledger), True
        if how == "deleted":
            self._number += 1
            return
        self.integrity.distrust("the journal is damaged")
        if how == "damaged":
            self.ledger.lose_pages(lambda: self._world.random.random() < 0.5)
        else:
            self.ledger = Ledger()

    def start_new_file(self) -> None:
        """Start a new file with what the current one still gives, synced."""
        if self._whole is None:
            self._whole = deepcopy(self.ledger)
        self._start_file(self.ledger)

    def on_rewritten(self) -> None:
        """Record that the new file has everything that the broker has."""
        for request_id, request in self._whole.requests.items() if self._whole is not None else ():
            if request.ended_at is not None and request_id not in self.ledger.requests:
                self.forgotten.add(request_id)
        self._whole = None

    def commit(self, writes: Sequence[JournalWrite]) -> set[int]:
        """Append writes to the file, perhaps only in the machine's memory. Return the sequences whose ends were not
        accepted."""
        if self._whole is not None:
            self._whole.write(writes, self._world.now)
        self._unsafe.append((self._world.now, writes))
        return self.ledger.write(writes, self._world.now)

    def sync(self) -> bool:
        """Make all commits durable. Returns False if that is uncertain from now on."""
        if self.fails_to_sync:
            self.fails_to_sync = False
            self.integrity.record_error(UnsyncedJournal("a sync failed"))
        if self.integrity.reason:
            return False
        while self._unsafe:
            at, writes = self._unsafe.popleft()
            self._safe_writes.append((at, writes))
            self.safe.write(writes, at)
        return True

    def lose_power(self) -> int:
        """Drop a random number of the last unsynced transactions, and return it."""
        if self.is_damaged:
            return 0
        keep = self._world.random.randint(0, len(self._unsafe))
        lost = len(self._unsafe) - keep
        self._unsafe = deque(islice(self._unsafe, keep))
        self.integrity.record_renewal(0.0, 0.0, done=True)
        self.sync()
        self._reread()
        return lost

    def restore_backup(self, share: float) -> None:
        """Replace the file with a backup that has this share of its transactions."""
        self._close()
        del self._safe_writes[round(share * len(self._safe_writes)) :]
        self._openings = [opening for opening in self._openings if opening[0] <= len(self._safe_writes)]
        self.safe = deepcopy(self._base)
        for at, writes in self._safe_writes:
            self.safe.write(writes, at)
        self._reread()

    def _reread(self) -> None:
        self.ledger = deepcopy(self._base)
        for at, writes in self._safe_writes:
            self.ledger.write(writes, at)

    def open(self, retained_s: float) -> JournalSnapshot:
        """Return what a broker finds in the journal at its start. The content becomes durable, because the broker
        builds on it."""
        self._close()
        self.integrity.record(self._file_states)
        return self.ledger.snapshot(self._world.now, retained_s)

    def _close(self) -> None:
        """Close the file: no process has it open any more."""
        self.fails_to_sync = False
        if self._whole is not None:
            self._start_file(self._whole)
            self._whole = None
        self.integrity.record_renewal(0.0, 0.0, done=True)
        self.sync()

    def _start_file(self, ledger: Ledger) -> None:
        self._number += 1
        self._unsafe.clear()
        self._safe_writes.clear()
        self._openings = [(0, self._openings[-1][1])]
        self.ledger, self._base, self.safe = ledger, deepcopy(ledger), deepcopy(ledger)
        self.integrity.record_renewal(0.0, 0.0, done=True)
        self.integrity.record(self._file_states)

    def start_lineage(self) -> Lineage:
        """Start the lineage of a new broker process."""
        lineage = next_lineage(self._openings[-1][1], self._chance)
        self._openings.append((len(self._safe_writes), lineage))
        return lineage


class SimJournal:
    """The threads of one broker process that read and write its journal.

    ``link`` carries their facts to the process's loop, where ``on_facts`` handles them. ``on_point`` is called at
    points of a transaction and returns whether the process dies there.
    """

    def __init__(
        self,
        disk: SimDisk,
        link: SimLink,
        on_facts: Callable[[Sequence[SimJournalFact]], None],
        on_point: Callable[[str, str], bool],
    ) -> None:
        self._disk = disk
        self._world = disk._world
        self._link = link
        self._on_facts = on_facts
        self._on_point = on_point
        self._waiting: deque[JournalWrite] = deque()
        self._epochs: list[JournalWrite] = []  # epochs, which must not wait behind writes that the disk refuses
        self._batch: list[JournalWrite] = []  # the transaction being written
        self._not_ended: set[int] = set()  # sequences of the transaction whose ends were not accepted
        self._is_broken = self._awaits_rewrite = self._is_renewing = False
        self.ever_broke = False
        self.num_renewed = 0
        self.alive = True
        self._checked_at = 0.0

    def kill(self) -> None:
        self.alive = False
        self._link.kill()

    def write(self, write: JournalWrite) -> None:
        refuses = self._is_broken and not self._awaits_rewrite
        if refuses and isinstance(write, WriteEpoch):
            self._epochs.append(write)
        else:
            self._waiting.append(write)
        if not self._batch and not refuses:  # otherwise the next attempt includes it
            self._begin()

    def read(self, ask: ReadRequest | ReadList, on_answer: Callable[[RequestRead | ListRead], None]) -> None:
        """Answer a question from the file, as it is when the reader thread runs."""

        def answer() -> None:
            if self.alive:
                result = self._find(ask)
                self._link.send(lambda: on_answer(result))

        self._world.schedule(self._world.draw(self._world.pace.journal), answer)

    def _find(self, ask: ReadRequest | ReadList) -> RequestRead | ListRead:
        ledger, now = self._disk.ledger, self._world.now
        problem = "disk I/O error" if self._disk.fails_to_read else ""
        if isinstance(ask, ReadRequest):
            if problem:
                return RequestRead(ask.request_id, None, problem)
            return RequestRead(ask.request_id, ledger.request(ask.request_id, now))
        if problem:
            return ListRead(ask.client, ask.query, (), problem, ask.account)
        ended = [record for record in ledger.ended_requests(now, DEFAULT_LISTED) if can_see(ask.account, record.tenant)]
        return ListRead(ask.client, ask.query, tuple(map(build_row, ended)), account=ask.account)

    # --- integrity of the file ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Check the file now and then, whether writes are waiting or not. Called at every tick."""
        if self._world.now - self._checked_at >= CHECK_S and not self._batch and not self._is_broken:
            self._checked_at = self._world.now
            self._check_file()

    def _check_file(self) -> bool:
        """Check the file, and start a new one if it is damaged. Return whether no renewal is under way."""
        if not self._disk.check() and not self._is_renewing:
            self._is_renewing = True
            self._break(self._disk.integrity.reason)
            self._world.schedule(self._world.draw(self._world.pace.journal), self._renew)
        return not self._is_renewing

    def _renew(self) -> None:
        if not self.alive or self._on_point("before", "renewal"):
            return
        if self._disk.is_full:
            self._world.schedule(RETRY_S, self._renew)
            return
        self._disk.start_new_file()
        self._is_renewing, self._awaits_rewrite = False, True
        self._report([JournalRenewed("the journal was replaced by a new one", self._disk.ledger.next_sequence)])
        if self._on_point("after", "renewal"):
            return
        self._fill()
        if self._batch:
            self._commit()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._fill()
        if self._batch:
            self._world.schedule(self._world.draw(self._world.pace.journal) / 2, self._commit)

    def _fill(self) -> None:
        self._batch += self._epochs
        self._epochs.clear()
        while self._waiting and len(self._batch) < MAX_BATCH:
            self._batch.append(self._waiting.popleft())

    def _commit(self) -> None:
        if not self.alive or self._on_point("before", "commit") or not self._check_file():
            return
        if self._disk.is_full:
            self._on_disk_full()
            return
        self._not_ended = self._disk.commit(tuple(self._batch))
        if not self._on_point("after", "commit"):
            self._world.schedule(self._world.draw(self._world.pace.journal) / 2, self._done)

    def _break(self, reason: str) -> None:
        if not self._is_broken:
            self._is_broken = self.ever_broke = True
            self._epochs += [write for write in self._waiting if isinstance(write, WriteEpoch)]
            self._waiting = deque(write for write in self._waiting if not isinstance(write, WriteEpoch))
            self._report([JournalBroke(reason)])

    def _on_disk_full(self) -> None:
        self._break("the disk is full")
        self._batch += self._epochs
        self._epochs.clear()
        self._commit_epochs()
        self._fill()
        self._world.schedule(RETRY_S, self._commit)

    def _commit_epochs(self) -> None:
        """Commit epochs without the other writes, into the reserve."""
        epochs = [write for write in self._batch if isinstance(write, WriteEpoch)]
        if not epochs or not self._disk.reserve:
            return
        self._disk.reserve -= 1
        self._batch = [write for write in self._batch if not isinstance(write, WriteEpoch)]
        self._disk.commit(tuple(epochs))
        if not self._disk.sync():
            self._batch += epochs
            return
        self._report([confirm(epoch) for epoch in epochs])

    def _done(self) -> None:
        if not self.alive:
            return
        if any(isinstance(write, DurableWrite) for write in self._batch) and not self._disk.sync():
            self._check_file()  # The sync failed: writes that must be durable are repeated, into another file.
            return
        if self._on_point("after", "sync"):
            return
        if any(isinstance(write, FinishJournalRewrite) for write in self._batch):
            self._awaits_rewrite = False
            self._disk.on_rewritten()
            self.num_renewed += 1
        is_mended = self._is_broken and not self._awaits_rewrite
        facts: list[SimJournalFact] = [JournalMended()] if is_mended else []
        self._is_broken &= not is_mended
        self._disk.reserve = RESERVE
        self._report(facts + [self._fact(write) for write in self._batch])
        self._batch.clear()
        self._begin()

    def _fact(self, write: JournalWrite) -> SimJournalFact:
        if isinstance(write, WriteEnd) and write.sequence in self._not_ended:
            return EndNotWritten(write.sequence)
        return confirm(write)

    def _report(self, facts: list[SimJournalFact]) -> None:
        self._link.send(lambda: self._on_facts(facts))
