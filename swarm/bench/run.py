"""A whole run: probe the server, measure the load generator's own ceiling, then the points. A thin shell around pure
parts."""

from __future__ import annotations

import asyncio
import platform
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

import psutil

from swarm.bench.document import Ceiling, Document, MachineInfo, PointResult, build_notes, describe_point
from swarm.bench.figures import compute_figures, compute_series
from swarm.bench.lengths import Lengths
from swarm.bench.plan import EXACT, BenchTarget, LatencyLimits, LoadPoint, RequestShape, Scale
from swarm.bench.processes.load_generators import LineProcess, LoadGenerators
from swarm.bench.processes.pipe_messages import ShareProgress
from swarm.bench.processes.probe import calibrate
from swarm.bench.records import PointRecords
from swarm.bench.sweep import SweepVerdict, next_step
from swarm.version import __version__

CEILING_S = 2.0  # duration of the measurement
CEILING_TOKENS = 512
CEILING_CONCURRENCY = 32  # unless the load needs more: enough that the client never waits
NUM_BINS = 100
OPEN_WARM_UP = 4  # requests, if the load is a rate


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """A sweep from ``first`` to ``most`` requests in flight, until doubling gains less than ``gain``."""

    first: int = 1
    most: int = 256
    gain: float = 0.05


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a run."""

    title: str
    target: BenchTarget
    shape: RequestShape
    point: LoadPoint  # the load or, in a sweep, each load without its concurrency
    sweep: SweepOptions | None
    limits: LatencyLimits
    num_processes: int
    measures_ceiling: bool
    deadline_s: float
    asked: dict[str, object]  # options by name, for reports


class BenchView(Protocol):
    """Display of a run's progress."""

    def stage(self, text: str) -> None: ...

    def begin(self, load: str, seconds: float | None, count: int | None) -> None: ...

    def progress(self, progress: ShareProgress) -> None: ...

    def on_point_measured(self, result: PointResult) -> None: ...


class Bench:
    """One run. :meth:`stop` ends it with the results so far."""

    def __init__(self, options: BenchOptions, view: BenchView) -> None:
        self._options = options
        self._view = view
        self._is_measuring = False
        self._generators = LoadGenerators(options.num_processes, self._progress)
        self._interrupted = False
        self._began_at = time.monotonic()
        self.document = Document(
            version=__version__,
            title=options.title,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            url=options.target.url,
            model=options.target.model,
            api=options.target.api,
            stream=options.target.stream,
            asked=options.asked,
            num_processes=options.num_processes,
            machine=describe_machine(),
            prompt_lengths="",
        )

    def stop(self) -> None:
        self._interrupted = True
        self._generators.stop()

    async def run(self) -> Document:
        """Run everything and return the document. Raises SwarmError if the server can't be measured at all."""
        document = self.document
        try:
            async with self._generators:
                self._view.stage(f"trying {self._options.target.url}")
                target, scale = await self._calibrate()
                document.prompt_lengths = scale.description
                if self._options.measures_ceiling:
                    document.ceiling = await self._measure_ceiling()
                if self._options.sweep is None:
                    await self._measure(target, scale, self._options.point)
                else:
                    await self._sweep(target, scale, self._options.sweep)
        except _Stopped:
            pass
        document.wall_clock_s = round(time.monotonic() - self._began_at, 3)
        if self._generators.is_stopping:
            document.ended = "interrupted" if self._interrupted else "deadline"
        document.notes = build_notes(document)
        return document

    async def _calibrate(self) -> tuple[BenchTarget, Scale]:
        """Probe the server, unless the run is stopped first."""
        probing = asyncio.create_task(calibrate(self._options.target, self._options.shape))
        stopped = asyncio.create_task(self._generators.until_stopping(self._deadline))
        try:
            await asyncio.wait((probing, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not probing.done():
                raise _Stopped
            return probing.result()
        finally:
            for task in (probing, stopped):
                task.cancel()
            await asyncio.wait((probing, stopped))

    @property
    def _deadline(self) -> float:
        return self._began_at + self._options.deadline_s

    async def _sweep(self, target: BenchTarget, scale: Scale, sweep: SweepOptions) -> None:
        while not self._generators.is_stopping:
            done = [result.sweep_point() for result in self.document.points]
            step = next_step(done, sweep.first, sweep.most, sweep.gain)
            if isinstance(step, SweepVerdict):
                self.document.sweep = step
                return
            await self._measure(target, scale, replace(self._options.point, concurrency=step))

    async def _measure(self, target: BenchTarget, scale: Scale, point: LoadPoint) -> None:
        """Measure a point after its warm-up, and add it to the document."""
        if num_warm := warm_up_requests(point):
            self._view.stage(f"warming up: {num_warm} requests")
            warm_up = LoadPoint(min(num_warm, point.concurrency or OPEN_WARM_UP), count=num_warm)
            await self._measure_point([target], warm_up, scale)
        bin_s = 1.0 if point.duration_s is None else point.duration_s / NUM_BINS
        self._view.begin(describe_point(point), point.duration_s, point.count)
        self._is_measuring = True
        gathered = await self._measure_point([target], point, scale, bin_s)
        self._is_measuring = False
        if (seconds := window_length(gathered, point, self._generators.is_stopping)) > 0:
            point_figures = compute_figures(gathered, seconds, self._options.limits)
            plots = compute_series(gathered, seconds, bin_s)
            result = PointResult(point.concurrency, point.rate, point_figures, plots, gathered.cpu)
            self.document.points.append(result)
            self._view.on_point_measured(result)

    async def _measure_point(
        self, targets: list[BenchTarget], point: LoadPoint, scale: Scale, bin_s: float = 1.0
    ) -> PointRecords:
        return await self._generators.measure(
            targets, point, shape=self._options.shape, scale=scale, bin_s=bin_s, deadline=self._deadline
        )

    async def _measure_ceiling(self) -> Ceiling | None:
        """Measure against null servers, which answer immediately: one per client process."""
        wanted = self._options
        self._view.stage("measuring this tool's own ceiling against a null server")
        tokens = max(1, min(CEILING_TOKENS, round(wanted.shape.output.mean)))
        in_flight = max(CEILING_CONCURRENCY, wanted.num_processes)
        shape = replace(wanted.shape, output=Lengths("fixed", (tokens,), str(tokens)))
        point = LoadPoint(in_flight, duration_s=CEILING_S, warmup_s=0.5)
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(LineProcess("swarm.bench.processes.null_server"))
                for _ in range(wanted.num_processes)
            ]
            own = {key: value for key, value in wanted.target.extra.items() if key.startswith("max_")}
            targets = [
                replace(
                    wanted.target,
                    url=f"http://127.0.0.1:{server.port}/v1",
                    asks_usage=True,
                    key_env=None,
                    extra=own,
                    timeout_s=30.0,
                )
                for server in servers
            ]
            gathered = await self._generators.measure(
                targets, point, shape=shape, scale=EXACT, bin_s=CEILING_S, deadline=self._deadline
            )
        if (seconds := window_length(gathered, point, self._generators.is_stopping)) <= 0:
            return None
        point_figures = compute_figures(gathered, seconds)
        return Ceiling(
            point_figures.tokens_per_s,
            point_figures.requests_per_s,
            in_flight,
            tokens,
            wanted.num_processes,
            round(seconds, 2),
        )

    def _progress(self, progress: ShareProgress) -> None:
        if self._is_measuring:
            self._view.progress(progress)


class _Stopped(Exception):
    """The run was stopped before any measurement."""


def warm_up_requests(point: LoadPoint) -> int:
    """Return the number of warm-up requests of a point; by default one for each request that will be in flight."""
    if point.warmup_count is None:
        return 0 if point.warmup_s else point.concurrency or OPEN_WARM_UP
    return point.warmup_count


def window_length(gathered: PointRecords, point: LoadPoint, was_stopped: bool) -> float:
    """Return the length of a point's measuring window: the planned length, or the time until the last answer."""
    last = max((record.end for record in gathered.records), default=0.0)
    if point.duration_s is None:
        return last
    return min(point.duration_s, last) if was_stopped else point.duration_s


def describe_machine() -> MachineInfo:
    """Describe the machine on which this tool runs."""
    gib = psutil.virtual_memory().total / 1024**3
    system = f"{platform.system()} {platform.release()}"
    return MachineInfo(_processor(), psutil.cpu_count() or 1, round(gib, 1), system, platform.python_version())


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for text in file:
                if text.startswith("model name"):
                    return text.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
