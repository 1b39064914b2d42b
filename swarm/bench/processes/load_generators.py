"""The parent's side of the client processes: start them, give each its share of a point, merge the results.

Every wait has a deadline; a process that does not answer is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from swarm.bench.plan import BenchTarget, LoadPoint, RequestShape, Scale
from swarm.bench.processes.pipe_messages import (
    MAX_LINE_BYTES,
    Order,
    ProcessReady,
    Report,
    RunShare,
    ShareDone,
    ShareProgress,
    StopShare,
    TimingBatch,
    encode_line,
    read_report,
)
from swarm.bench.records import PointRecords
from swarm.bench.schedule import split_point
from swarm.errors import SwarmError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
LEAD_S = 0.3  # from the order to the first request: time for it to reach every process


class LineProcess:
    """A subprocess of this tool that exchanges JSON lines. Use ``async with``."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: Process | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        # A process group of its own: Ctrl-C on the terminal reaches only the parent, which ends this process in order.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES, start_new_session=True
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._end)
            ready = await self.receive(START_TIMEOUT_S)
            if not isinstance(ready, ProcessReady):
                raise SwarmError(f"{self._module} did not start")
            undo.pop_all()
        self.port = ready.port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def send(self, order: Order) -> None:
        stdin = self._running.stdin
        assert stdin is not None
        try:
            stdin.write(encode_line(order))
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await stdin.drain()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass  # it has died; the next read reports that

    async def receive(self, timeout_s: float) -> Report:
        """Read the next message. Raises SwarmError when the process has ended, or sends nothing within the timeout."""
        stdout = self._running.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line_bytes = await stdout.readline()
        except TimeoutError:
            raise SwarmError(
                f"a process of this tool ({self._module}) has sent nothing for {timeout_s:.0f} s"
            ) from None
        if not line_bytes:
            code = await self._running.wait()
            raise SwarmError(f"a process of this tool ({self._module}) ended with code {code}; see its stderr")
        try:
            report: Report = read_report(line_bytes)
        except msgspec.DecodeError as error:
            raise SwarmError(f"a process of this tool ({self._module}) sent {line_bytes[:80]!r}: {error}") from None
        return report

    @property
    def _running(self) -> Process:
        assert self._process is not None
        return self._process

    async def _end(self) -> None:
        process = self._running
        if process.stdin is not None:
            process.stdin.close()  # both kinds of process end when stdin is closed
        try:
            async with asyncio.timeout(2.0):
                while process.stdout is not None and await process.stdout.read(65536):
                    pass
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@dataclass(slots=True)
class LoadGenerators:
    """Client processes, for any number of points. Use ``async with``."""

    num_processes: int
    on_progress: Callable[[ShareProgress], None]  # number of the next point's first request
    _helpers: list[LineProcess] = field(default_factory=list)
    _next_index: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        helpers = [LineProcess("swarm.bench.processes.child") for _ in range(self.num_processes)]
        started = await asyncio.gather(*(helper.__aenter__() for helper in helpers), return_exceptions=True)
        self._helpers = [outcome for outcome in started if isinstance(outcome, LineProcess)]
        for outcome in started:
            if isinstance(outcome, BaseException):
                await self._end()
                raise outcome
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def stop(self) -> None:
        """End the current point; :meth:`measure` returns its records so far. Later points are empty."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def measure(
        self,
        targets: list[BenchTarget],
        point: LoadPoint,
        *,
        shape: RequestShape,
        scale: Scale,
        bin_s: float,
        deadline: float,
    ) -> PointRecords:
        """Hold a load and return its records.

        Process ``n`` sends to target ``n``, or to the last one. At ``deadline`` (``time.monotonic()``) the point ends
        as after :meth:`stop`.
        """
        gathered, parts = PointRecords(), split_point(point, len(self._helpers))
        if self._stopping.is_set():
            return gathered
        opens_at = time.monotonic() + LEAD_S + point.warmup_s
        latest: list[ShareProgress | None] = [None] * len(parts)
        first_index, self._next_index = self._next_index, self._next_index + 10_000_000
        runs = [
            RunShare(targets[min(n, len(targets) - 1)], shape, scale, part, opens_at, bin_s, first_index)
            for n, part in enumerate(parts)
        ]

        def note(number: int, progress: ShareProgress) -> None:
            latest[number] = progress
            self.on_progress(_sum_progress(latest))

        working, problem = self._helpers[: len(runs)], None
        try:
            async with asyncio.TaskGroup() as group:
                stopper = group.create_task(self._stop_at_end(working, deadline))
                tasks = [
                    group.create_task(self._run_share(helper, run, partial(note, number)))
                    for number, (helper, run) in enumerate(zip(working, runs, strict=True))
                ]
                await asyncio.wait(tasks)
                stopper.cancel()
        except* SwarmError as failed:
            problem = failed.exceptions[0]
        if problem is not None:
            raise problem
        for task in tasks:
            gathered.merge(task.result())
        return gathered

    async def _run_share(
        self, helper: LineProcess, run: RunShare, note: Callable[[ShareProgress], None]
    ) -> PointRecords:
        gathered = PointRecords()
        await helper.send(run)
        while True:
            report = await helper.receive(STOP_TIMEOUT_S)
            if isinstance(report, ShareProgress):
                note(report)
            elif isinstance(report, TimingBatch):
                gathered.records += report.records
            elif isinstance(report, ShareDone):
                gathered.merge(PointRecords([], report.gaps, report.pieces, [report.cpu]))
                await helper.send(StopShare())  # the reason why the share ended, or otherwise its acknowledgement
                return gathered

    async def until_stopping(self, deadline: float) -> None:
        """Wait until :meth:`stop` is called or the deadline passes. Passing the deadline has the same effect as
        :meth:`stop`."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._stopping.wait()
        except TimeoutError:
            self._stopping.set()

    async def _stop_at_end(self, working: list[LineProcess], deadline: float) -> None:
        await self.until_stopping(deadline)
        for helper in working:
            await helper.send(StopShare())

    async def _end(self) -> None:
        await asyncio.gather(*(helper.__aexit__(None, None, None) for helper in self._helpers))


def _sum_progress(latest: list[ShareProgress | None]) -> ShareProgress:
    reports = [progress for progress in latest if progress is not None]
    return ShareProgress(
        sum(progress.num_ok for progress in reports),
        sum(progress.num_failed for progress in reports),
        sum(progress.num_in_flight for progress in reports),
        sum(progress.num_pieces for progress in reports),
        [ttft for progress in reports for ttft in progress.ttfts],
    )
