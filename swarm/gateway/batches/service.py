"""Batch service: owns the tasks of lines, the timer, and the thread of the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.types import ASGIApp

from swarm.gateway.batches.line_request import Line, LineEnd, give_up, prepare_line, refuse_line, run_line
from swarm.gateway.batches.lines import LineSplitter, LineTooLong
from swarm.gateway.batches.multipart import MultipartParser, PartBegan, PartData
from swarm.gateway.batches.objects import BatchRecord, FileRecord, NewBatch
from swarm.gateway.batches.runner import (
    AbortLine,
    Action,
    BatchAdded,
    BatchRunner,
    CancelOrdered,
    CheckBatch,
    Event,
    LineAborted,
    NotWritten,
    RunLine,
    TimePassed,
    Write,
    Written,
)
from swarm.gateway.batches.store import PAGE_BYTES, BatchStore, StoreConflict, StoreFailed, StoreFull, TooManyBatches
from swarm.gateway.errors import ApiError, invalid_field
from swarm.log import get_logger

if TYPE_CHECKING:
    from swarm.config import BatchSettings

OPEN_RETRY_S = 1.0  # seconds between attempts to open the store, which another gateway may hold
CHECK_RETRY_S = 5.0  # seconds until a batch is checked again whose lines could not be read
CLOSE_S = 5.0  # seconds for the tasks to end with the gateway
MAX_NAME = 255  # characters of a file's name
_MAX_FIELD = 1024  # bytes of a plain field of an upload
_FIELDS = {"purpose", "file"}
_CODES: dict[type[Exception], str] = {
    StoreFull: "storage_full",
    StoreConflict: "conflict",
    TooManyBatches: "rate_limit_exceeded",
}

P = ParamSpec("P")
R = TypeVar("R")

log = get_logger(__name__)


class BatchService:
    """Batch service of a gateway. Belongs to one event loop."""

    def __init__(
        self,
        state_dir: Path | None,
        settings: BatchSettings,
        app: ASGIApp,
        *,
        max_line_bytes: int = 16 << 20,
        body_timeout_s: float = 60.0,
        check_tenant: Callable[[str], ApiError | None] = lambda _: None,
        max_values: Callable[[], int] = lambda: 1 << 17,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the service. ``app``: the routes that answer lines. ``body_timeout_s``: seconds to wait for the next
        bytes of an upload. ``check_tenant``: returns why a tenant may not run a line now. ``max_values``: returns the
        values that a body may have. ``clock``: seconds since 1970, since windows outlive a restart of the machine."""
        self._store = None if state_dir is None else BatchStore(state_dir, int(settings.max_stored))
        self._settings, self._max_line_bytes, self._app = settings, max_line_bytes, app
        self._body_timeout_s = body_timeout_s
        self._check_tenant, self._max_values, self._clock = check_tenant, max_values, clock
        self._runner = BatchRunner(settings.in_flight)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborts: dict[tuple[str, int], asyncio.Event] = {}  # lines in flight
        self._timer: asyncio.TimerHandle | None = None
        self._problem = "the store of batches is being opened"  # why the store cannot be used; empty if it can

    # --- life

    def start(self) -> None:
        if self._store is not None:
            self._start_task(self._open(self._store))

    def stop(self) -> None:
        """Start no further lines."""
        self._runner.stop()

    async def aclose(self) -> None:
        """End all tasks and close the store. Lines in flight continue at the broker if its client was abandoned."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _open(self, store: BatchStore) -> None:
        while True:
            try:
                await self._call(store.open)
                loaded = await self._call(store.load_batches)
                break
            except StoreFailed as error:
                if str(error) != self._problem:
                    log.warning("batches_not_available", reason=str(error))
                self._problem = str(error)
            await asyncio.sleep(OPEN_RETRY_S)
        self._problem = ""
        for batch in loaded:
            self._handle(batch)
        if loaded:
            log.info("batches_continue", num_batches=len(loaded), num_lines=sum(len(b.pending) for b in loaded))

    # --- files

    async def upload(self, tenant: str, boundary: bytes, chunks: AsyncIterator[bytes]) -> FileRecord:
        """Store an uploaded file. Raises ApiError."""
        store, parser = self._usable_store(), MultipartParser(boundary)
        upload = _Upload(self._max_line_bytes, int(self._settings.max_file))
        file_id, first, is_whole = await self._try(store.begin_file, tenant, "", self._clock()), 1, False
        try:
            while (chunk := await self._next_chunk(chunks)) is not None:
                for event in parser.feed(chunk):
                    upload.add(event)
                if upload.size >= PAGE_BYTES:
                    first = await self._store_lines(store, file_id, first, upload)
            parser.check_complete()
            filename = upload.finish()
            await self._store_lines(store, file_id, first, upload)
            record = await self._try(store.finish_file, file_id, filename)
            is_whole = True
            return record
        finally:
            if not is_whole:
                self._start_task(self._drop_upload(store, file_id))

    async def _next_chunk(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """Return the next bytes of an upload; None at its end. Raises ApiError if they take too long."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await anext(chunks, None)
        except TimeoutError:
            text = f"no byte of the file came within {self._body_timeout_s:g} s (gateway.body_timeout_s)"
            raise ApiError(408, text, code="timeout") from None

    async def _store_lines(self, store: BatchStore, file_id: str, first: int, upload: _Upload) -> int:
        """Store the lines that an upload has collected. Returns the number of the next line."""
        lines = upload.take()
        if lines:
            await self._try(store.add_lines, file_id, first, lines)
        return first + len(lines)

    async def _drop_upload(self, store: BatchStore, file_id: str) -> None:
        try:
            await self._call(store.drop_upload, file_id)
        except StoreFailed as error:  # the next start deletes it
            log.warning("upload_not_deleted", file=file_id, reason=str(error))

    async def file(self, file_id: str, tenant: str) -> FileRecord | None:
        return await self._try(self._usable_store().file, file_id, tenant)

    async def list_files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> tuple[list[FileRecord], bool] | None:
        work = partial(self._usable_store().list_files, ascending=ascending)
        return await self._try(work, tenant, purpose, after, limit)

    async def delete_file(self, file_id: str, tenant: str) -> bool:
        return await self._try(self._usable_store().delete_file, file_id, tenant)

    async def read_content(self, file_id: str, tenant: str, after: int) -> tuple[bytes, int] | None:
        return await self._try(self._usable_store().read_content, file_id, tenant, after)

    # --- batches

    async def create_batch(self, new: NewBatch) -> BatchRecord:
        record = await self._try(self._usable_store().create_batch, new, self._clock())
        if record is None:
            text = f"there is no file {new.input_file_id[:80]!r} with the purpose batch: upload one to /v1/files"
            raise invalid_field("input_file_id", text)
        self._handle(BatchAdded(record.id, record.tenant, record.status, record.expires_at))
        log.info("batch_created", batch=record.id, tenant=record.tenant, endpoint=record.endpoint)
        return record

    async def cancel_batch(self, batch_id: str, tenant: str) -> BatchRecord | None:
        record = await self._try(self._usable_store().cancel_batch, batch_id, tenant, self._clock())
        if record is not None:
            self._handle(CancelOrdered(batch_id))
        return record

    async def batch(self, batch_id: str, tenant: str) -> BatchRecord | None:
        return await self._try(self._usable_store().batch, batch_id, tenant)

    async def list_batches(self, tenant: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool] | None:
        return await self._try(self._usable_store().list_batches, tenant, after, limit)

    # --- the runner's shell

    def _handle(self, event: Event) -> None:
        for action in self._runner.handle(event, self._clock()):
            self._execute(action)
        self._set_timer()

    def _execute(self, action: Action) -> None:
        assert self._store is not None  # without a store there are no batches
        match action:
            case CheckBatch():
                self._start_task(self._check(self._store, action.id))
            case RunLine():
                self._aborts[action.id, action.number] = asyncio.Event()
                self._start_task(self._run(self._store, action.id, action.number))
            case AbortLine():
                self._aborts[action.id, action.number].set()
            case Write():
                self._start_task(self._write(self._store, action))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._runner.next_due()
        if due is not None:
            # in steps of an hour, since the wall clock may be set
            delay_s = min(3600.0, max(0.0, due - self._clock()))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, TimePassed())

    async def _check(self, store: BatchStore, batch_id: str) -> None:
        while True:
            try:
                steps = store.check_batch(batch_id, self._settings.max_lines)
                while (result := await self._call(partial(next, steps))) is None:
                    pass
            except StoreFailed as error:
                log.warning("batch_not_checked", batch=batch_id, reason=str(error))
                await asyncio.sleep(CHECK_RETRY_S)
            else:
                self._handle(result)
                return

    async def _run(self, store: BatchStore, batch_id: str, number: int) -> None:
        custom_id = ""
        try:
            line = await self._read_line(store, batch_id, number)
            custom_id = line.custom_id
            end = await self._end_of(line, self._aborts[batch_id, number])
        except Exception:  # a defect must not stop the batch: the line ends, so that its place becomes free
            log.exception("line_failed", batch=batch_id, line=number)
            end = give_up(batch_id, number, custom_id)
        del self._aborts[batch_id, number]
        self._handle(end)

    async def _read_line(self, store: BatchStore, batch_id: str, number: int) -> Line:
        max_values = self._max_values()
        while True:
            try:
                return await self._call(lambda: prepare_line(store.read_line(batch_id, number), max_values))
            except StoreFailed as error:
                log.warning("line_not_read", batch=batch_id, line=number, reason=str(error))
                await asyncio.sleep(OPEN_RETRY_S)

    async def _end_of(self, line: Line, is_aborted: asyncio.Event) -> LineEnd:
        if is_aborted.is_set():
            return LineAborted(line.batch.id, line.number)
        if (problem := line.problem or self._check_tenant(line.batch.tenant)) is not None:
            return refuse_line(line, problem)
        return await run_line(self._app, line, is_aborted)

    async def _write(self, store: BatchStore, write: Write) -> None:
        try:
            moved = await self._call(store.write, write, self._clock())
        except StoreFailed as error:
            log.error("answers_not_written", num_answers=len(write.answers), reason=str(error))
            self._handle(NotWritten())
            return
        for batch in moved:
            counts = {"num_completed": batch.num_completed, "num_failed": batch.num_failed}
            log.info("batch_moved", batch=batch.id, status=batch.status.value, **counts)
        self._handle(Written())

    # --- inside

    def _usable_store(self) -> BatchStore:
        """Return the store. Raises ApiError if it cannot be used now."""
        if self._store is None:
            text = "batches need a directory: start the gateway with --state-dir"
            raise ApiError(404, text, code="unsupported_endpoint")
        if self._problem:
            raise _unavailable(self._problem)
        return self._store

    async def _call(self, work: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
        """Run work in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **keywords))

    async def _try(self, work: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
        """Run work in the store's thread for a client. Raises ApiError."""
        try:
            return await self._call(work, *args, **keywords)
        except StoreFailed as error:
            raise _unavailable(str(error)) from None
        except (StoreFull, StoreConflict, TooManyBatches) as error:
            raise ApiError(error.hint_status, str(error), code=_CODES[type(error)]) from None

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch_task_failed", error=repr(error))


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, code="unavailable", retry_after_s=2.0)


class _Upload:
    """Form of an upload as it arrives: its fields, and the file's lines that are not stored yet."""

    def __init__(self, max_line_bytes: int, max_bytes: int) -> None:
        self._max_line_bytes, self._max_bytes = max_line_bytes, max_bytes
        self._splitter = LineSplitter(max_line_bytes)
        self._fields: dict[str, bytes] = {}
        self._part = ""
        self._filename: str | None = None
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self.size = 0  # bytes of the lines that are not stored yet

    def add(self, event: object) -> None:
        """Add an event of the form. Raises ApiError."""
        if isinstance(event, PartBegan):
            self._begin(event)
        elif isinstance(event, PartData) and self._part == "file":
            self._num_bytes += len(event.data)
            if self._num_bytes > self._max_bytes:
                text = f"the file has more than {self._max_bytes} bytes (batch.max_file): split it"
                raise ApiError(413, text, param="file", code="too_large")
            self._collect(event.data)
        elif isinstance(event, PartData):
            self._fields[self._part] += event.data
            if len(self._fields[self._part]) > _MAX_FIELD:
                raise invalid_field(self._part, f"has more than {_MAX_FIELD} bytes")

    def _begin(self, part: PartBegan) -> None:
        if part.name not in _FIELDS:
            raise ApiError(
                400, f"{part.name[:40]} is not supported here; leave it out", param=part.name[:40],
                code="unsupported_parameter",
            )  # fmt: skip
        if part.name in self._fields or (part.name == "file" and self._filename is not None):
            raise invalid_field(part.name, "is given twice")
        self._part = part.name
        if part.name == "file":
            self._filename = part.filename or "file.jsonl"
        else:
            self._fields[part.name] = b""

    def _collect(self, data: bytes) -> None:
        try:
            for line in self._splitter.feed(data):
                self._keep(line)
        except LineTooLong as error:
            text = f"line {error.line} has more than {self._max_line_bytes} bytes (gateway.max_body)"
            raise ApiError(413, text, param="file", code="too_large") from None

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self.size += len(line)

    def take(self) -> list[bytes]:
        """Return the lines that are not stored yet."""
        lines, self._lines, self.size = self._lines, [], 0
        return lines

    def finish(self) -> str:
        """Check the whole form and return the file's name. Raises ApiError."""
        for line in self._splitter.finish():
            self._keep(line)
        if self._filename is None:
            raise invalid_field("file", "is missing")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != "batch":
            raise invalid_field("purpose", f"must be batch, not {purpose[:40]!r}: files are only for batches here")
        return self._filename[:MAX_NAME]
