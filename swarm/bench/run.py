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

from swarm.bench.document import Ceiling, Document, Machine, Result, describe, notes
from swarm.bench.figures import figures, series
from swarm.bench.lengths import Lengths
from swarm.bench.plan import EXACT, Limits, Point, Scale, Shape, Target
from swarm.bench.processes.crew import Crew, Helper
from swarm.bench.processes.orders import Progress
from swarm.bench.processes.probe import calibrate
from swarm.bench.records import Gathered
from swarm.bench.sweep import Verdict, following
from swarm.version import __version__

CEILING_S = 2.0  # duration of the measurement
CEILING_TOKENS = 512
CEILING_IN_FLIGHT = 32  # unless the load needs more: enough that the client never waits
NUM_BINS = 100
OPEN_WARM_UP = 4  # requests, if the load is a rate


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep from ``first`` to ``most`` requests in flight, until doubling gains less than ``gain``."""

    first: int = 1
    most: int = 256
    gain: float = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of a run."""

    title: str
    target: Target
    shape: Shape
    point: Point  # the load or, in a sweep, each load without its concurrency
    sweep: Sweep | None
    limits: Limits
    num_processes: int
    measures_ceiling: bool
    deadline_s: float
    asked: dict[str, object]  # options by name, for reports


class View(Protocol):
    """Display of a run's progress."""

    def stage(self, text: str) -> None: ...

    def begin(self, load: str, seconds: float | None, count: int | None) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def measured(self, result: Result) -> None: ...


class Bench:
    """One run. :meth:`stop` ends it with the results so far."""

    def __init__(self, wanted: Wanted, view: View) -> None:
        self._wanted = wanted
        self._view = view
        self._shown = False
        self._crew = Crew(wanted.num_processes, self._progress)
        self._interrupted = False
        self._begun = time.monotonic()
        self.document = Document(
            version=__version__,
            title=wanted.title,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            url=wanted.target.url,
            model=wanted.target.model,
            api=wanted.target.api,
            stream=wanted.target.stream,
            asked=wanted.asked,
            num_processes=wanted.num_processes,
            machine=machine(),
            prompt_lengths="",
        )

    def stop(self) -> None:
        self._interrupted = True
        self._crew.stop()

    async def run(self) -> Document:
        """Run everything and return the document. Raises SwarmError if the server can't be measured at all."""
        document = self.document
        try:
            async with self._crew:
                self._view.stage(f"trying {self._wanted.target.url}")
                target, scale = await self._calibrated()
                document.prompt_lengths = scale.how
                if self._wanted.measures_ceiling:
                    document.ceiling = await self._ceiling()
                if self._wanted.sweep is None:
                    await self._measure(target, scale, self._wanted.point)
                else:
                    await self._sweep(target, scale, self._wanted.sweep)
        except _Stopped:
            pass
        document.wall_clock_s = round(time.monotonic() - self._begun, 3)
        if self._crew.is_stopping:
            document.ended = "interrupted" if self._interrupted else "deadline"
        document.notes = notes(document)
        return document

    async def _calibrated(self) -> tuple[Target, Scale]:
        """Probe the server, unless the run is stopped first."""
        probing = asyncio.create_task(calibrate(self._wanted.target, self._wanted.shape))
        stopped = asyncio.create_task(self._crew.until_stopping(self._deadline))
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
        return self._begun + self._wanted.deadline_s

    async def _sweep(self, target: Target, scale: Scale, sweep: Sweep) -> None:
        while not self._crew.is_stopping:
            done = [result.measured() for result in self.document.points]
            step = following(done, sweep.first, sweep.most, sweep.gain)
            if isinstance(step, Verdict):
                self.document.sweep = step
                return
            await self._measure(target, scale, replace(self._wanted.point, concurrency=step))

    async def _measure(self, target: Target, scale: Scale, point: Point) -> None:
        """Measure a point after its warm-up, and add it to the document."""
        if num_warm := warm_up_requests(point):
            self._view.stage(f"warming up: {num_warm} requests")
            warm_up = Point(min(num_warm, point.concurrency or OPEN_WARM_UP), count=num_warm)
            await self._hold([target], warm_up, scale)
        bin_s = 1.0 if point.duration_s is None else point.duration_s / NUM_BINS
        self._view.begin(describe(point), point.duration_s, point.count)
        self._shown = True
        gathered = await self._hold([target], point, scale, bin_s)
        self._shown = False
        if (seconds := window(gathered, point, self._crew.is_stopping)) > 0:
            found = figures(gathered, seconds, self._wanted.limits)
            plots = series(gathered, seconds, bin_s)
            result = Result(point.concurrency, point.rate, found, plots, gathered.cpu)
            self.document.points.append(result)
            self._view.measured(result)

    async def _hold(self, targets: list[Target], point: Point, scale: Scale, bin_s: float = 1.0) -> Gathered:
        return await self._crew.measure(
            targets, point, shape=self._wanted.shape, scale=scale, bin_s=bin_s, deadline=self._deadline
        )

    async def _ceiling(self) -> Ceiling | None:
        """Measure against null servers, which answer immediately: one per client process."""
        wanted = self._wanted
        self._view.stage("measuring this tool's own ceiling against a null server")
        tokens = max(1, min(CEILING_TOKENS, round(wanted.shape.output.average)))
        in_flight = max(CEILING_IN_FLIGHT, wanted.num_processes)
        shape = replace(wanted.shape, output=Lengths("fixed", (tokens,), str(tokens)))
        point = Point(in_flight, duration_s=CEILING_S, warmup_s=0.5)
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(Helper("swarm.bench.processes.null"))
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
            gathered = await self._crew.measure(
                targets, point, shape=shape, scale=EXACT, bin_s=CEILING_S, deadline=self._deadline
            )
        if (seconds := window(gathered, point, self._crew.is_stopping)) <= 0:
            return None
        found = figures(gathered, seconds)
        return Ceiling(
            found.tokens_per_s, found.requests_per_s, in_flight, tokens, wanted.num_processes, round(seconds, 2)
        )

    def _progress(self, progress: Progress) -> None:
        if self._shown:
            self._view.progress(progress)


class _Stopped(Exception):
    """The run was stopped before any measurement."""


def warm_up_requests(point: Point) -> int:
    """Return the number of warm-up requests of a point; by default one for each request that will be in flight."""
    if point.warmup_count is None:
        return 0 if point.warmup_s else point.concurrency or OPEN_WARM_UP
    return point.warmup_count


def window(gathered: Gathered, point: Point, was_stopped: bool) -> float:
    """Return the length of a point's window: as planned, or until the last answer."""
    last = max((record.end for record in gathered.records), default=0.0)
    if point.duration_s is None:
        return last
    return min(point.duration_s, last) if was_stopped else point.duration_s


def machine() -> Machine:
    """Describe the machine on which this tool runs."""
    gib = psutil.virtual_memory().total / 1024**3
    system = f"{platform.system()} {platform.release()}"
    return Machine(_processor(), psutil.cpu_count() or 1, round(gib, 1), system, platform.python_version())


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for text in file:
                if text.startswith("model name"):
                    return text.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
