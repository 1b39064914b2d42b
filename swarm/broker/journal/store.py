"""The journal's file: an SQLite database in WAL mode, used by one thread.

Each call of :meth:`JournalStore.write` is one transaction: after a crash, all of it is there or nothing. If a write
must be durable (an acceptance, an epoch), the file is synced before the call returns. Without a sync, the death of the
process loses nothing, and a power cut loses the last moments, which are computed again.

When a sequence ends, its tokens are merged into one value. Requests that ended long ago are deleted (``keep_s``). When
the file exceeds its limit, the requests that ended first are deleted. Requests that have not ended are never deleted.
``timestamps`` defines ages.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

from msgspec.structs import replace

from swarm.broker.actions import (
    FinishJournalRewrite,
    WriteAcceptance,
    WriteAdapters,
    WriteEnd,
    WriteEpoch,
    WriteTokens,
)
from swarm.broker.journal import DurableWrite, JournalWrite, records, token_buffer
from swarm.broker.journal.database import (
    FILE,
    DamagedJournal,
    FullDisk,
    UnsyncedJournal,
    log_path,
    open_database,
    open_read_only,
    to_journal_error,
    transaction,
)
from swarm.broker.journal.disk import DiskReserve, LogLengthEstimate, checkpoint_pages
from swarm.broker.journal.timestamps import Timestamp, age_limits
from swarm.broker.journal.values import DamagedValue, RawPart, decode, encode, join_parts
from swarm.broker.state.ended_requests import ClientAccount
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, next_lineage
from swarm.errors import JournalError
from swarm.log import get_logger
from swarm.wire.messages import NO_LINEAGE, Lineage, Submit

__all__ = ["MAX_LISTED", "JournalLimits", "JournalStore", "Timestamp"]

T = TypeVar("T")
D = TypeVar("D")

MAX_LISTED = 1000

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """Limits of the journal. ``keep_s``: seconds for which ended requests are kept; ``max_bytes``: file size."""

    keep_s: float = 86_400.0
    max_bytes: int = 1 << 30


class JournalStore:
    """The journal's file (see the module). Errors are raised as JournalError."""

    def __init__(self, directory: Path, bounds: JournalLimits | None = None) -> None:
        self.path = directory / FILE
        self._limits = bounds or JournalLimits()
        self.reserve = DiskReserve(directory)
        self._db = open_database(self.path, self.reserve)
        self._log_length = LogLengthEstimate(log_path(self.path), checkpoint_pages(directory))
        self._is_durable = False  # whether ``synchronous = FULL`` is set
        # rows in the token buffer, approximately; corrected at the next insertion
        self._num_recent = token_buffer.FLUSH_STEPS
        self._has_earlier_boots = True  # False once no request of an earlier boot is left
        self._facts: dict[str, bytes] = {}  # values written last, for ``examine``
        self._new_facts: dict[str, bytes] = {}  # values written in the current transaction
        self.is_closed = False
        self.lineage: Lineage | None = None  # of this broker process; None before ``begin_lineage``

    # --- opening -----------------------------------------------------------------------------------------------------

    def open_read_only(self) -> JournalStore:
        """Open the same file read-only, with a connection of its own for another thread."""
        other = object.__new__(JournalStore)
        other.path, other._limits, other._is_durable = self.path, self._limits, False
        other.reserve, other.is_closed = self.reserve, False
        other._db = open_read_only(self.path)
        return other

    def close(self) -> None:
        self.is_closed = True
        self._db.close()

    def checkpoint(self) -> None:
        """Checkpoint the whole write-ahead log, synced. Raises JournalError."""
        try:
            is_busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None
        if is_busy:
            raise JournalError(f"another process holds the journal {self.path}: end that process")

    def examine(self) -> None:
        """Check the content after another process has written into the files. Raises DamagedJournal. The log is
        checkpointed first, because its checksums are only verified at the next start."""
        self.checkpoint()
        other = self.open_read_only()
        try:
            other.check(self._facts)
        finally:
            other.close()

    def check(self, facts: Mapping[str, bytes]) -> None:
        """Raise DamagedJournal if pages or values are damaged, or these facts differ."""
        with self.reading() as db:
            problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            stored = dict(db.execute("SELECT name, value FROM facts"))
        if problem == "ok" and any(stored.get(name) != value for name, value in facts.items()):
            problem = "it lacks the values that were written last"
        if problem != "ok":
            raise DamagedJournal(f"the journal {self.path} is damaged ({problem})")
        self.read_snapshot(Timestamp.now(), retained_s=0.0)  # ended requests are verified when they are read

    @contextmanager
    def fill(self) -> Iterator[sqlite3.Connection]:
        """Context manager that lends the database in a durable transaction, to fill a new journal."""
        self._db.execute("PRAGMA synchronous = FULL")
        self._is_durable = True
        with transaction(self._db):
            yield self._db

    def begin_lineage(self) -> Lineage:
        """Begin the lineage of this broker process, which no other process had. It is durable before it is announced,
        and may use the reserve. Raises JournalError."""
        while True:
            try:
                with self.fill() as db:
                    row = db.execute("SELECT value FROM facts WHERE name = 'lineage'").fetchone()
                    lineage = next_lineage(NO_LINEAGE if row is None else decode(row[0], Lineage), SystemRandom())
                    db.execute(_INSERT_FACT, ("lineage", encode(lineage)))
                self.lineage = lineage
                return lineage
            except sqlite3.Error as error:
                problem = to_journal_error(self.path, error)
                if not isinstance(problem, FullDisk) or not self.reserve.release_piece():
                    raise problem from None

    def continue_lineage(self, lineage: Lineage | None) -> None:
        """Continue a lineage that began with another file. Raises JournalError."""
        self.lineage = lineage
        if lineage is None:
            return
        try:
            with self.fill() as db:
                db.execute(_INSERT_FACT, ("lineage", encode(lineage)))
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[JournalWrite], now: Timestamp) -> set[int]:
        """Write everything in one transaction. Raises JournalError; then nothing of it was written. Return the
        sequences whose end was refused because tokens are missing or damaged; they have not ended and will be computed
        again."""
        self._checkpoint_if_due()
        durable = any(isinstance(write, DurableWrite) for write in writes)
        try:
            if durable is not self._is_durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_durable = durable
            if self._num_recent < token_buffer.FLUSH_STEPS and all(isinstance(write, WriteTokens) for write in writes):
                self._add_tokens(writes)  # by far the most frequent case: a single statement is its own transaction
                return set()
            with transaction(self._db):
                if self._num_recent >= token_buffer.FLUSH_STEPS:
                    self._flush_tokens()
                self._new_facts = {}
                refused_ends = {
                    write.sequence
                    for write in writes
                    if not self._write_one(write, now) and isinstance(write, WriteEnd)
                }
            self._facts |= self._new_facts
            return refused_ends
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None

    def _checkpoint_if_due(self) -> None:
        """Checkpoint the log when it is due. Raises JournalError only if earlier writes can't be trusted any more.
        Other problems, such as a full disk, will appear at the next write."""
        if not self._log_length.is_due(self._db.total_changes):
            return
        pages = None
        try:
            _, pages, _ = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            problem = to_journal_error(self.path, error)
            if isinstance(problem, DamagedJournal | UnsyncedJournal):
                raise problem from None
        self._log_length.record_checkpoint(self._db.total_changes, pages)

    def _add_tokens(self, writes: Sequence[JournalWrite]) -> None:
        tokens = (new for write in writes if isinstance(write, WriteTokens) for new in write.tokens)
        self._num_recent = token_buffer.append(self._db, tokens)

    def _flush_tokens(self) -> None:
        token_buffer.flush(self._db)
        self._num_recent = 0

    def _write_one(self, write: JournalWrite, now: Timestamp) -> bool:
        """Execute one write. Return False for an end that was refused."""
        match write:
            case WriteTokens():
                self._add_tokens((write,))
            case WriteEnd():
                return self._end(write, now)
            case WriteAcceptance():
                self._accept(write, now)
            case WriteEpoch():
                self._put_facts(_epoch_facts(write))
            case WriteAdapters(_, adapters, dropped):
                self._put_facts({"adapters": adapters, "dropped_adapters": dropped})
            case FinishJournalRewrite(epoch, next_sequence):
                self._put_facts(_epoch_facts(epoch) | {"next_sequence": max(next_sequence, self.next_sequence)})
        return True

    @property
    def next_sequence(self) -> int:
        """The lowest number that no sequence here has had. It never decreases."""
        row = self._db.execute("SELECT value FROM facts WHERE name = 'next_sequence'").fetchone()
        with suppress(DamagedValue):
            return 1 if row is None else decode(row[0], int)
        return 1

    def _put_facts(self, facts: Mapping[str, object]) -> None:
        encoded = {name: encode(value) for name, value in facts.items()}
        self._db.executemany(_INSERT_FACT, encoded.items())
        self._new_facts |= encoded

    def _accept(self, write: WriteAcceptance, now: Timestamp) -> None:
        submit = write.submit
        self._db.execute("DELETE FROM requests WHERE id = ?", (submit.request_id,))
        made = self._db.execute(
            "INSERT INTO requests (id, submit, tenant, accepted_at, accepted_tick, boot) VALUES (?, ?, ?, ?, ?, ?)",
            (submit.request_id, encode(submit), write.tenant, now.wall - write.age_s, now.tick - write.age_s, now.boot),
        )
        self._db.executemany(
            "INSERT INTO sequences (id, request, place) VALUES (?, ?, ?)",
            ((sequence, made.lastrowid, place) for place, sequence in enumerate(write.sequences)),
        )
        self._put_facts({"next_sequence": max(self.next_sequence, max(write.sequences) + 1)})

    def _end(self, write: WriteEnd, now: Timestamp) -> bool:
        """Store the end of a sequence. Its tokens are merged into one value, without the tokens after a client's stop
        string."""
        self._flush_tokens()
        if self._db.execute(
            "SELECT 1 FROM sequences WHERE id = ? AND reason IS NOT NULL", (write.sequence,)
        ).fetchone():
            return True  # it has its end already; another one would overwrite its tokens
        try:
            whole = join_parts(records.read_stored_parts(self._db, write.sequence, RawPart), RawPart, write.num_tokens)
        except DamagedValue:  # later readers must not fail on it
            self._db.execute("DELETE FROM tokens WHERE sequence = ?", (write.sequence,))
            return False
        # tokens were dropped while the disk was full; or the sequence is not in the journal any more
        if len(whole.ids) < write.num_tokens:
            known = self._db.execute("SELECT 1 FROM sequences WHERE id = ? AND reason IS NULL", (write.sequence,))
            return known.fetchone() is None
        self._db.execute(
            "UPDATE sequences SET reason = ?, detail = ?, tokens = ? WHERE id = ?",
            (write.reason, write.detail, encode(_complete(whole, write)), write.sequence),
        )
        self._db.execute("DELETE FROM tokens WHERE sequence = ?", (write.sequence,))
        self._db.execute(
            "UPDATE requests SET ended_at = ?, ended_tick = CASE WHEN boot = ? THEN ? END "
            "WHERE number = (SELECT request FROM sequences WHERE id = ?) AND NOT "
            "EXISTS (SELECT 1 FROM sequences WHERE request = requests.number AND reason IS NULL)",
            (now.wall, now.boot, now.tick, write.sequence),
        )
        if write.has_pixels:
            self._drop_pixels(write.sequence)
        return True

    def _drop_pixels(self, sequence: int) -> None:
        """Remove the pixels from the submission of a sequence's request, if the whole request has ended."""
        row = self._db.execute(
            "SELECT number, submit FROM requests WHERE ended_at IS NOT NULL "
            "AND number = (SELECT request FROM sequences WHERE id = ?)",
            (sequence,),
        ).fetchone()
        if row is not None:
            with suppress(DamagedValue):  # readers report it
                submit = replace(decode(row[1], Submit), pixels=())
                self._db.execute("UPDATE requests SET submit = ? WHERE number = ?", (encode(submit), row[0]))

    def delete_old(self, now: Timestamp) -> int:
        """Delete requests that ended long ago, and the oldest beyond the size limit. Return the number of deleted
        requests."""
        try:
            with transaction(self._db):
                num_deleted = self._db.execute(_DELETE_OLD, age_limits(now, self._limits.keep_s)).rowcount
            while self.num_bytes > self._limits.max_bytes and (more := self._delete_oldest(now)):
                num_deleted += more
            self._db.execute("PRAGMA incremental_vacuum(256)")
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None
        return num_deleted

    def truncate_log(self) -> bool:
        """Truncate the log by a checkpoint to free disk space. Return whether there is more space now."""
        log = log_path(self.path)
        try:
            before = log.stat().st_size
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return log.stat().st_size < before
        except (sqlite3.Error, OSError):
            return False

    def _delete_oldest(self, now: Timestamp) -> int:
        """Delete some of the oldest requests. Requests of earlier boots go first: they are older, even if the wall
        clock was wrong at the time."""
        with transaction(self._db):
            if self._has_earlier_boots and now.boot:
                num_deleted = self._db.execute(_DELETE_EARLIER, (now.boot,)).rowcount
                self._has_earlier_boots = num_deleted > 0
                if num_deleted:
                    return num_deleted
            return self._db.execute(_DELETE_OLDEST).rowcount

    @property
    def limits(self) -> JournalLimits:
        return self._limits

    @property
    def num_bytes(self) -> int:
        """Used bytes of the file, without free pages. Raises JournalError."""
        names = ("page_count", "freelist_count", "page_size")
        try:
            pages, free, size = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None
        return int((pages - free) * size)

    # --- reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Context manager that lends the database for queries. Raises JournalError."""
        try:
            yield self._db
        except sqlite3.Error as error:
            raise to_journal_error(self.path, error) from None
        except DamagedValue as error:
            raise DamagedJournal(f"the journal {self.path} is damaged ({error})") from None

    def read_snapshot(self, now: Timestamp, *, retained_s: float) -> JournalSnapshot:
        """Read the state that a starting broker needs: see ``records``."""
        with self.reading() as db:
            return records.read_snapshot(db, now, retained_s)

    def read_request(self, request_id: str, now: Timestamp) -> RequestRecord | None:
        """Read one request, however long ago it ended."""
        with self.reading() as db:
            return records.read_request(db, request_id, now)

    def find_by_prefix(
        self, prefix: str, now: Timestamp, limit: int = 2, account: ClientAccount | None = None
    ) -> Iterator[RequestRecord]:
        """Read ended requests whose ids begin with ``prefix``; otherwise like ``list_ended``."""
        return records.find_by_prefix(self._db, prefix, now, limit, account)

    def list_ended(
        self, now: Timestamp, limit: int = MAX_LISTED, account: ClientAccount | None = None
    ) -> Iterator[RequestRecord]:
        """Read ended requests, the latest first; with an account, only its own."""
        return records.list_ended(self._db, now, limit, account)


def _complete(tokens: RawPart, end: WriteEnd) -> RawPart:
    """Return all tokens of a sequence with what its end adds."""
    return replace(
        tokens,
        vector=end.vector,
        num_cached=tokens.num_cached or end.num_cached,
        prompt_logprobs=tokens.prompt_logprobs or end.prompt_logprobs,
    )


def _epoch_facts(write: WriteEpoch) -> dict[str, object]:
    facts: dict[str, object] = {"epoch": write.epoch, "workers": write.workers, "blames": write.blames}
    return facts if write.manifest is None else facts | {"manifest": write.manifest}


_INSERT_FACT = "INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)"
# First by the wall clock, which has an index; then by the clock that counts. Requests that ended in the future were
# written while the wall clock was wrong.
_DELETE_OLD = (
    "DELETE FROM requests WHERE (ended_at < :wall_limit OR ended_at > :wall) AND CASE WHEN boot = :boot AND ended_tick "
    "IS NOT NULL THEN ended_tick < :tick_limit ELSE :knows AND ended_at < :wall_limit END"
)
_DELETE_OLDEST = (
    "DELETE FROM requests WHERE number IN "
    "(SELECT number FROM requests WHERE ended_at IS NOT NULL ORDER BY ended_at LIMIT 32)"
)
_DELETE_EARLIER = _DELETE_OLDEST.replace("ORDER BY", "AND boot <> ? ORDER BY")
