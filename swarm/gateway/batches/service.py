"""Batch service: owns the tasks of lines, the timer, and the thread of the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.types import ASGIApp

from swarm.gateway.batches.database import StoreFailed
from swarm.gateway.batches.line_request import (
    Line,
    LineEnd,
    LineResponse,
    end_of_line,
    error_response,
    prepare_line,
    run_line,
)
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
from swarm.gateway.batches.store import BatchStore, StoreConflict, StoreFull, TooManyBatches
from swarm.gateway.batches.upload import Upload
from swarm.gateway.errors import ApiError, invalid_field
from swarm.log import get_logger

if TYPE_CHECKING:
    from swarm.config import BatchSettings

OPEN_RETRY_S = 1.0  # seconds between attempts to open the store, which another gateway may hold
CHECK_RETRY_S = 5.0  # seconds until a batch is checked again whose lines could not be read
CLOSE_S = 5.0  # seconds for the tasks to end with the gateway
EXPIRY_S = 60.0  # seconds between two looks for expired files
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
        check_owner: Callable[[str], ApiError | None] = lambda _: None,
        max_values: Callable[[], int] = lambda: 1 << 17,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the service. ``app``: the routes that answer lines. ``body_timeout_s``: seconds to wait for the next
        bytes of an upload. ``check_owner``: returns why an owner may not run a line now. ``max_values``: returns the
        values that a body may have. ``clock``: seconds since 1970, since windows outlive a restart of the machine."""
        self._store = None if state_dir is None else BatchStore(state_dir, int(settings.max_stored))
        self._settings, self._max_line_bytes, self._app = settings, max_line_bytes, app
        self._body_timeout_s = body_timeout_s
        self._check_owner, self._max_values, self._clock = check_owner, max_values, clock
        self._max_age_s = settings.max_age_days * 86_400
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
        self._start_task(self._delete_expired(store))
        for batch in loaded:
            self._handle(batch)
        if loaded:
            log.info("batches_continue", num_batches=len(loaded), num_lines=sum(len(b.pending) for b in loaded))

    async def _delete_expired(self, store: BatchStore) -> None:
        while True:
            try:
                while await self._call(store.delete_expired, self._clock()):
                    pass
            except StoreFailed as error:
                log.warning("expired_files_not_deleted", reason=str(error))
            await asyncio.sleep(EXPIRY_S)

    # --- files

    async def upload(self, owner: str, boundary: bytes, chunks: AsyncIterator[bytes]) -> FileRecord:
        """Store an uploaded file. Raises ApiError."""
        store, now = self._usable_store(), self._clock()
        upload = Upload(boundary, self._max_line_bytes, int(self._settings.max_file))
        file_id, is_whole = await self._try(store.begin_file, owner, "", now), False

        def add(chunk: bytes | None) -> None:
            for first, lines in upload.finish() if chunk is None else upload.feed(chunk):
                store.add_lines(file_id, first, lines)

        try:
            while (chunk := await self._next_chunk(chunks)) is not None:
                await self._try(add, chunk)
            await self._try(add, None)
            expires_at = now + min(self._max_age_s, upload.max_age_s or self._max_age_s)
            record = await self._try(store.finish_file, file_id, upload.filename, expires_at)
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

    async def _drop_upload(self, store: BatchStore, file_id: str) -> None:
        try:
            await self._call(store.drop_upload, file_id)
        except StoreFailed as error:  # the next start deletes it
            log.warning("upload_not_deleted", file=file_id, reason=str(error))

    async def file(self, file_id: str, owner: str) -> FileRecord | None:
        return await self._try(self._usable_store().file, file_id, owner)

    async def list_files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> tuple[list[FileRecord], bool] | None:
        work = partial(self._usable_store().list_files, ascending=ascending)
        return await self._try(work, owner, purpose, after, limit)

    async def delete_file(self, file_id: str, owner: str) -> bool:
        return await self._try(self._usable_store().delete_file, file_id, owner)

    async def read_content(self, file_id: str, owner: str, after: int) -> tuple[bytes, int] | None:
        return await self._try(self._usable_store().read_content, file_id, owner, after)

    # --- batches

    async def create_batch(self, new: NewBatch) -> BatchRecord:
        output_age_s = min(self._max_age_s, new.output_age_s or self._max_age_s)
        new = replace(new, output_age_s=output_age_s)
        record = await self._try(self._usable_store().create_batch, new, self._clock())
        if record is None:
            text = f"there is no file {new.input_file_id[:80]!r} with the purpose batch: upload one to /v1/files"
            raise invalid_field("input_file_id", text)
        self._handle(BatchAdded(record.id, record.owner, record.status, record.expires_at))
        log.info("batch_created", batch=record.id, tenant=record.tenant, endpoint=record.endpoint)
        return record

    async def cancel_batch(self, batch_id: str, owner: str) -> BatchRecord | None:
        record = await self._try(self._usable_store().cancel_batch, batch_id, owner, self._clock())
        if record is not None:
            self._handle(CancelOrdered(batch_id))
        return record

    async def batch(self, batch_id: str, owner: str) -> BatchRecord | None:
        return await self._try(self._usable_store().batch, batch_id, owner)

    async def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool] | None:
        return await self._try(self._usable_store().list_batches, owner, after, limit)

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
        custom_id, is_aborted = "", self._aborts[batch_id, number]
        try:
            line = await self._read_line(store, batch_id, number)
            custom_id = line.custom_id
            if is_aborted.is_set():
                end: LineEnd = LineAborted(batch_id, number)
            else:
                response = await self._respond(line, is_aborted)
                end = await self._call(end_of_line, batch_id, number, custom_id, response, is_aborted.is_set())
        except Exception:  # a defect must not stop the batch: the line ends, so that its place becomes free
            log.exception("line_failed", batch=batch_id, line=number)
            response = error_response(ApiError(500, "internal error of the gateway: see its log"))
            end = end_of_line(batch_id, number, custom_id, response, is_aborted.is_set())
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

    async def _respond(self, line: Line, is_aborted: asyncio.Event) -> LineResponse:
        if (problem := line.problem or self._check_owner(line.batch.owner)) is not None:
            return error_response(problem)
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
