"""Store of files, batches and answers, used by one thread of one gateway.

Every change is one synced transaction. Input files are stored line by line. Output and error files are the answers of
their batch in the order of its lines, so an answer is stored once. A file that is being uploaded is invisible until it
is whole; the next start deletes the rest of an interrupted upload.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import SwarmError
from swarm.gateway.batches.database import Database
from swarm.gateway.batches.lines import LineChecker, is_blank, read_custom_id
from swarm.gateway.batches.objects import (
    PAGE_BYTES,
    TIMES,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineError,
    NewBatch,
    StoredLine,
)
from swarm.gateway.batches.runner import BatchAdded, BatchChecked, Write

MAX_UNFINISHED = 100  # batches of an owner
MAX_QUEUED = 2 << 20  # requests of all unfinished batches: their line numbers are in memory

_FILE_COLUMNS = "id, filename, purpose, bytes, created_at, expires_at"
_BATCH_COLUMNS = (
    "id, owner, tenant, endpoint, input, completion_window, metadata, status, created_at, expires_at, errors, output, "
    "error, total, completed, failed, times, models"
)
_UNFINISHED = "status NOT IN ('completed', 'failed', 'expired', 'cancelled')"
# Error of a line that has no answer when its batch ends early.
_CLOSED = {
    BatchStatus.expired: ("batch_expired", "This request could not be executed before the completion window expired."),
    BatchStatus.cancelled: ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


class StoreFull(SwarmError):
    """The files of all owners together would exceed the store's limit."""

    hint_status = 413


class StoreConflict(SwarmError):
    """The record is in a state that does not allow this."""

    hint_status = 409


class TooManyBatches(SwarmError):
    """The owner has as many unfinished batches as it may."""

    hint_status = 429


class BatchStore(Database):
    """The store in ``directory``. Every method may raise StoreFailed."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        super().__init__(directory)
        self._max_bytes = max_bytes

    # --- files

    def begin_file(self, owner: str, filename: str, now: float) -> str:
        """Begin an upload and return the file's id."""
        file_id = f"file-{secrets.token_hex(12)}"
        with self._transaction() as db:
            db.execute(
                "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, is_whole) "
                "VALUES (?, ?, ?, 'batch', 0, ?, 0)",
                (file_id, owner, filename, int(now)),
            )
        return file_id

    def add_lines(self, file_id: str, first: int, lines: Sequence[bytes]) -> None:
        """Add lines to an upload. Raises StoreFull."""
        num_bytes = sum(map(len, lines))
        with self._transaction() as db:
            if self._num_bytes(db) + num_bytes > self._max_bytes:
                raise StoreFull(
                    f"files and answers of batches may take {self._max_bytes} bytes (batch.max_stored), and this file "
                    "would exceed them: delete files that are not needed any more"
                )
            number = db.execute("SELECT number FROM files WHERE id = ?", (file_id,)).fetchone()[0]
            rows = [(number, first + place, is_blank(line), line) for place, line in enumerate(lines)]
            db.executemany("INSERT INTO lines (file, number, is_blank, content) VALUES (?, ?, ?, ?)", rows)
            db.execute(
                "UPDATE files SET bytes = bytes + ?, num_requests = num_requests + ? WHERE number = ?",
                (num_bytes, sum(not row[2] for row in rows), number),
            )

    def finish_file(self, file_id: str, filename: str, expires_at: float) -> FileRecord:
        with self._transaction() as db:
            db.execute(
                "UPDATE files SET is_whole = 1, filename = ?, expires_at = ? WHERE id = ?",
                (filename, int(expires_at), file_id),
            )
            return FileRecord(*db.execute(f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ?", (file_id,)).fetchone())

    def drop_upload(self, file_id: str) -> None:
        """Delete an upload that did not become whole."""
        with self._transaction() as db:
            row = db.execute("SELECT number FROM files WHERE id = ? AND NOT is_whole", (file_id,)).fetchone()
            if row is not None:
                self._delete_content(db, row[0], None, None)

    def file(self, file_id: str, owner: str) -> FileRecord | None:
        with self._errors():
            row = self._opened.execute(
                f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND owner = ? AND is_whole", (file_id, owner)
            ).fetchone()
        return None if row is None else FileRecord(*row)

    def list_files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> tuple[list[FileRecord], bool] | None:
        """Return a page of files, and whether there are more; None if there is no file ``after``."""
        with self._errors():
            rows = self._page("files", _FILE_COLUMNS, owner, after, limit, ascending=ascending, purpose=purpose)
        return None if rows is None else ([FileRecord(*row) for row in rows[:limit]], len(rows) > limit)

    def read_content(self, file_id: str, owner: str, after: int) -> tuple[bytes, int] | None:
        """Return the lines of a file behind the line ``after``, about ``PAGE_BYTES`` of them, and the last one's
        number; empty at the end. None if there is no such file."""
        with self._errors():
            db = self._opened
            row = _find_content(db, file_id, owner)
            if row is None:
                return None
            number, batch, is_error = row
            if batch is None:
                rows = db.execute(
                    "SELECT number, content FROM lines WHERE file = ? AND number > ? ORDER BY number", (number, after)
                )
            else:
                rows = db.execute(
                    "SELECT number, content FROM answers WHERE batch = ? AND number > ? AND is_error = ? "
                    "ORDER BY number",
                    (batch, after, is_error),
                )
            parts, size, last = [], 0, after
            for last, content in rows:  # noqa: B007 (the last number is the result)
                parts.append(content)
                size += len(content)
                if size >= PAGE_BYTES:
                    break
            rows.close()
        return b"".join(parts), last

    def delete_file(self, file_id: str, owner: str) -> bool:
        """Delete a file; return whether there was one. Raises StoreConflict while a batch reads it."""
        with self._transaction() as db:
            row = _find_content(db, file_id, owner)
            if row is None:
                return False
            reader = db.execute(f"SELECT id FROM batches WHERE input = ? AND {_UNFINISHED}", (file_id,)).fetchone()
            if reader is not None:
                raise StoreConflict(f"{reader[0]} reads this file: cancel the batch first, or wait for its end")
            self._delete_content(db, *row)
        self._vacuum()
        return True

    def delete_expired(self, now: float) -> bool:
        """Delete one expired file, unless an unfinished batch reads it; return whether there may be more. Without one,
        delete the records of batches whose files have expired."""
        with self._transaction() as db:
            row = db.execute(
                "SELECT number, batch, is_error FROM files WHERE is_whole AND expires_at <= ? AND NOT EXISTS "
                f"(SELECT 1 FROM batches WHERE input = files.id AND {_UNFINISHED}) LIMIT 1",
                (now,),
            ).fetchone()
            if row is None:
                db.execute(
                    f"DELETE FROM batches WHERE NOT ({_UNFINISHED}) AND expires_at + output_age_s <= ? "
                    "AND NOT EXISTS (SELECT 1 FROM files WHERE batch = batches.number)",
                    (now,),
                )
                return False
            self._delete_content(db, *row)
        self._vacuum()
        return True

    def _vacuum(self) -> None:
        with self._errors():
            self._opened.execute("PRAGMA incremental_vacuum").fetchall()

    def _delete_content(self, db: sqlite3.Connection, number: int, batch: int | None, is_error: int | None) -> None:
        db.execute("DELETE FROM files WHERE number = ?", (number,))
        if batch is None:
            db.execute("DELETE FROM lines WHERE file = ?", (number,))
            return
        db.execute("DELETE FROM answers WHERE batch = ? AND is_error = ?", (batch, is_error))
        column = "error_bytes" if is_error else "output_bytes"
        db.execute(f"UPDATE batches SET {column} = 0 WHERE number = ?", (batch,))

    # --- batches

    def create_batch(self, new: NewBatch, now: float) -> BatchRecord | None:
        """Create a batch in the status ``validating``; None if there is no such input file. Raises TooManyBatches."""
        batch_id = f"batch_{secrets.token_hex(12)}"
        created_at = int(now)
        with self._transaction() as db:
            source = db.execute(
                "SELECT num_requests FROM files WHERE id = ? AND owner = ? AND is_whole AND purpose = 'batch'",
                (new.input_file_id, new.owner),
            ).fetchone()
            if source is None:
                return None
            num_unfinished = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE owner = ? AND {_UNFINISHED}", (new.owner,)
            ).fetchone()[0]
            if num_unfinished >= MAX_UNFINISHED:
                raise TooManyBatches(
                    f"you have {num_unfinished} unfinished batches, which is the limit: wait until one has ended, or "
                    "cancel one"
                )
            num_queued = db.execute(
                f"SELECT COALESCE(SUM(num_requests), 0) FROM batches JOIN files ON files.id = input WHERE {_UNFINISHED}"
            ).fetchone()[0]
            if num_queued + source[0] > MAX_QUEUED:
                raise TooManyBatches(
                    f"{num_queued} requests of unfinished batches wait, and all callers together may have "
                    f"{MAX_QUEUED}: wait until one has ended"
                )
            db.execute(
                "INSERT INTO batches (id, owner, tenant, endpoint, input, completion_window, metadata, status, "
                "created_at, expires_at, output_age_s, errors, times, models) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?, ?, ?)",
                (
                    batch_id,
                    new.owner,
                    new.tenant,
                    new.endpoint,
                    new.input_file_id,
                    new.window,
                    msgspec.json.encode(new.metadata),
                    created_at,
                    created_at + new.window_s,
                    new.output_age_s,
                    b"[]",
                    b"{}",
                    msgspec.json.encode(new.models),
                ),
            )
            return self._batch(db, batch_id)

    def cancel_batch(self, batch_id: str, owner: str, now: float) -> BatchRecord | None:
        """Record that a batch is cancelled; None if there is none. Raises StoreConflict if it has ended."""
        with self._transaction() as db:
            record = self._find_batch(db, batch_id, owner)
            if record is None:
                return None
            if record.status in (BatchStatus.cancelling, BatchStatus.cancelled):
                return record
            if record.status.is_final:
                raise StoreConflict(f"the batch is {record.status.value} and can't be cancelled any more")
            self._set_status(db, record, BatchStatus.cancelling, now)
            return self._batch(db, batch_id)

    def batch(self, batch_id: str, owner: str) -> BatchRecord | None:
        with self._errors():
            return self._find_batch(self._opened, batch_id, owner)

    def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool] | None:
        """Return a page of batches, the newest first, and whether there are more; None if there is no batch
        ``after``."""
        with self._errors():
            rows = self._page("batches", _BATCH_COLUMNS, owner, after, limit, ascending=False)
        return None if rows is None else ([_to_batch(row) for row in rows[:limit]], len(rows) > limit)

    # --- running

    def load_batches(self) -> list[BatchAdded]:
        """Return the unfinished batches with their unanswered lines."""
        with self._errors():
            rows = self._opened.execute(
                f"SELECT id, owner, status, expires_at FROM batches WHERE {_UNFINISHED} ORDER BY number"
            ).fetchall()
            return [
                BatchAdded(batch_id, owner, BatchStatus(status), expires_at, self._pending(batch_id))
                for batch_id, owner, status, expires_at in rows
            ]

    def _pending(self, batch_id: str) -> tuple[int, ...]:
        rows = self._opened.execute(
            "SELECT l.number FROM batches b JOIN files f ON f.id = b.input JOIN lines l ON l.file = f.number "
            "WHERE b.id = ? AND NOT l.is_blank "
            "AND NOT EXISTS (SELECT 1 FROM answers a WHERE a.batch = b.number AND a.number = l.number) "
            "ORDER BY l.number",
            (batch_id,),
        )
        return tuple(number for (number,) in rows)

    def check_batch(self, batch_id: str, max_lines: int) -> Iterator[BatchChecked | None]:
        """Check the lines of a batch in portions: yields None after each, and the result at the end."""
        with self._errors():
            record = self._batch(self._opened, batch_id)
        checker, last, size = LineChecker(record.endpoint, max_lines), 0, 1
        while size and not checker.is_full:
            size = 0
            with self._errors():
                rows = self._opened.execute(
                    "SELECT l.number, l.is_blank, l.content FROM files f JOIN lines l ON l.file = f.number "
                    "WHERE f.id = ? AND l.number > ? ORDER BY l.number",
                    (record.input_file_id, last),
                )
                for last, blank, content in rows:
                    if not blank:
                        checker.check(last, content)
                    size += len(content)
                    if size >= PAGE_BYTES or checker.is_full:
                        break
                rows.close()
            yield None
        errors = checker.finish()
        with self._errors():
            pending = () if errors else self._pending(batch_id)
        with self._transaction() as db:
            db.execute("UPDATE batches SET total = ? WHERE id = ?", (0 if errors else checker.num_lines, batch_id))
        yield BatchChecked(batch_id, pending, errors)

    def read_line(self, batch_id: str, number: int) -> StoredLine:
        with self._errors():
            record = self._batch(self._opened, batch_id)
            content = self._opened.execute(
                "SELECT l.content FROM files f JOIN lines l ON l.file = f.number WHERE f.id = ? AND l.number = ?",
                (record.input_file_id, number),
            ).fetchone()[0]
        return StoredLine(record, number, content)

    def write(self, write: Write, now: float) -> list[BatchRecord]:
        """Write answers and moves in one transaction. An answer that a line already has stays. Returns the batches that
        moved."""
        with self._transaction() as db:
            for batch_id, number, answer in write.answers:
                done = db.execute(
                    "INSERT OR IGNORE INTO answers SELECT number, ?, ?, ? FROM batches WHERE id = ?",
                    (number, answer.is_error, answer.content, batch_id),
                ).rowcount
                if done:
                    self._count(db, batch_id, answer.is_error, 1, len(answer.content))
            for move in write.moves:
                record = self._batch(db, move.id)
                if record.status.is_final:
                    continue  # written before
                status = move.status
                if record.status is BatchStatus.cancelling:
                    status = BatchStatus.cancelled if status.is_final else BatchStatus.cancelling
                if status in _CLOSED:
                    self._close_lines(db, move.id, status)
                self._set_status(db, record, status, now, move.errors)
            return [self._batch(db, move.id) for move in write.moves]

    def _close_lines(self, db: sqlite3.Connection, batch_id: str, status: BatchStatus) -> None:
        """Give every line without an answer the error of a batch that ended early."""
        code, message = _CLOSED[status]
        key, file = db.execute(
            "SELECT b.number, f.number FROM batches b JOIN files f ON f.id = b.input WHERE b.id = ?", (batch_id,)
        ).fetchone()
        for number in self._pending(batch_id):
            line = db.execute("SELECT content FROM lines WHERE file = ? AND number = ?", (file, number)).fetchone()[0]
            content = encode_answer(batch_id, number, read_custom_id(line), None, {"code": code, "message": message})
            db.execute("INSERT INTO answers VALUES (?, ?, 1, ?)", (key, number, content))
            self._count(db, batch_id, True, 1, len(content))
        db.execute("UPDATE batches SET total = completed + failed WHERE number = ?", (key,))

    def _count(self, db: sqlite3.Connection, batch_id: str, is_error: bool, num: int, num_bytes: int) -> None:
        counted, measured = ("failed", "error_bytes") if is_error else ("completed", "output_bytes")
        db.execute(
            f"UPDATE batches SET {counted} = {counted} + ?, {measured} = {measured} + ? WHERE id = ?",
            (num, num_bytes, batch_id),
        )

    def _set_status(
        self,
        db: sqlite3.Connection,
        record: BatchRecord,
        status: BatchStatus,
        now: float,
        errors: Sequence[LineError] = (),
    ) -> None:
        times = dict(record.times)
        if f"{status.value}_at" in TIMES:
            times.setdefault(f"{status.value}_at", int(now))
        if status is BatchStatus.completed:
            times.setdefault("in_progress_at", int(now))
        if status.is_final and status is not BatchStatus.failed:
            times.setdefault("finalizing_at", int(now))
            self._publish(db, record.id, now)
        db.execute(
            "UPDATE batches SET status = ?, errors = ?, times = ? WHERE id = ?",
            (status.value, msgspec.json.encode(errors), msgspec.json.encode(times), record.id),
        )

    def _publish(self, db: sqlite3.Connection, batch_id: str, now: float) -> None:
        """Create the output and error files of a batch that ends."""
        number, owner, age_s, completed, failed, *sizes = db.execute(
            "SELECT number, owner, output_age_s, completed, failed, output_bytes, error_bytes FROM batches "
            "WHERE id = ?",
            (batch_id,),
        ).fetchone()
        for column, is_error, count, size in (("output", 0, completed, sizes[0]), ("error", 1, failed, sizes[1])):
            if not count:
                continue
            file_id = f"file-{secrets.token_hex(12)}"
            db.execute(
                "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at, is_whole, batch, "
                "is_error) VALUES (?, ?, ?, 'batch_output', ?, ?, ?, 1, ?, ?)",
                (file_id, owner, f"{batch_id}_{column}.jsonl", size, int(now), int(now) + age_s, number, is_error),
            )
            db.execute(f"UPDATE batches SET {column} = ? WHERE number = ?", (file_id, number))

    # --- inside

    def _num_bytes(self, db: sqlite3.Connection) -> int:
        """Return the bytes of all files, those being uploaded included, and of all answers."""
        uploads = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE batch IS NULL").fetchone()[0]
        answers = db.execute("SELECT COALESCE(SUM(output_bytes + error_bytes), 0) FROM batches").fetchone()[0]
        return int(uploads + answers)

    def _page(
        self,
        table: str,
        columns: str,
        owner: str,
        after: str | None,
        limit: int,
        *,
        ascending: bool,
        purpose: str | None = None,
    ) -> list[tuple[Any, ...]] | None:
        wanted, values = ["owner = ?"], [owner]
        if table == "files":
            wanted.append("is_whole")
        if purpose is not None:
            wanted.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            row = self._opened.execute(
                f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)
            ).fetchone()
            if row is None:
                return None
            wanted.append(f"number {'>' if ascending else '<'} ?")
            values.append(row[0])
        order = "ASC" if ascending else "DESC"
        return self._opened.execute(
            f"SELECT {columns} FROM {table} WHERE {' AND '.join(wanted)} ORDER BY number {order} LIMIT ?",
            (*values, limit + 1),
        ).fetchall()

    def _find_batch(self, db: sqlite3.Connection, batch_id: str, owner: str) -> BatchRecord | None:
        row = db.execute(
            f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        return None if row is None else _to_batch(row)

    def _batch(self, db: sqlite3.Connection, batch_id: str) -> BatchRecord:
        return _to_batch(db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone())


def _find_content(db: sqlite3.Connection, file_id: str, owner: str) -> tuple[int, int | None, int | None] | None:
    """Return a whole file's number, the batch whose answers it has, and whether they are errors; None without one."""
    query = "SELECT number, batch, is_error FROM files WHERE id = ? AND owner = ? AND is_whole"
    row: tuple[int, int | None, int | None] | None = db.execute(query, (file_id, owner)).fetchone()
    return row


def _to_batch(row: tuple[Any, ...]) -> BatchRecord:
    """Return the record of a row with ``_BATCH_COLUMNS``, which are the record's fields in their order."""
    values = dict(zip((field.name for field in fields(BatchRecord)), row, strict=True))
    for name in ("metadata", "errors", "times", "models"):
        values[name] = msgspec.json.decode(values[name])
    return msgspec.convert(values, BatchRecord)


def encode_answer(
    batch_id: str,
    number: int,
    custom_id: str,
    response: dict[str, object] | None,
    error: dict[str, object] | None,
) -> bytes:
    """Return a line of an output or error file."""
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
