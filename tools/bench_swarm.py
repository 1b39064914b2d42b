"""Start swarms for the benchmarks, in processes of their own, and collect their answers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import psutil
from bench_lib import ROOT, BenchError, free_port

from swarm import AsyncClient
from swarm.errors import Unavailable

START_S = 600.0  # a cold disk and a busy machine
STOP_S = 15.0
POLL_S = 0.02

Body = dict[str, Any]


class Processes(ABC):
    """Run a swarm's processes, and a client for it. Use it with ``async with``: it is ready then, and gone afterwards.

    ``settings``: environment for all of them. Whoever derives from it says what is started, and waits until it serves.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.port = free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = AsyncClient(self.url, connect_timeout_s=START_S)

    @abstractmethod
    async def begin(self) -> None:
        """Start them all; they are ready when this returns."""

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="swarm-bench-"))
        try:
            await self.begin()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def launch(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """Start ``swarm`` with these arguments, in place of one of this name that has ended. ``before`` runs in it,
        ``prefix_reader`` is a command that starts it."""
        values = {**os.environ, "PYTHONPATH": str(ROOT), **self.settings, **(environment or {})}
        command = [*under, sys.executable, "-P", "-m", "swarm", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=values,
                preexec_fn=before,  # noqa: PLW1509 (no threads were started yet)
            )

    def launch_broker(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.launch("broker", ["broker", "--port", str(self.port), *options], environment)

    def launch_worker(
        self,
        name: str,
        model: Path,
        threads: int,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        about = ["--url", self.url, "--name", name, "--model", str(model), "--threads", str(threads)]
        self.launch(name, ["worker", *about], environment, before)

    async def until(
        self, what: str, holds: Callable[[Body], bool], within_s: float = START_S, *, with_all: bool = False
    ) -> Body:
        """Ask until the report is as wished. ``with_all``: it never will be once a process has ended."""
        give_up_at = time.monotonic() + within_s
        report: Body = {}
        while time.monotonic() < give_up_at and not (with_all and self._has_lost()):
            with suppress(Unavailable, TimeoutError):
                report = cast(Body, await asyncio.wait_for(self.client.query(cast(Any, what)), 5.0))
                if holds(report):
                    return report
            await asyncio.sleep(POLL_S)
        said = "\n".join(f"{f.name}: {f.read_text(errors='replace')[-1000:]}" for f in self.folder.glob("*.log"))
        raise BenchError(f"{what} is not as expected, within {within_s:.0f} s: {report}\n{said}")

    async def until_serving(self, num_stages: int) -> None:
        """Wait until a swarm that was just started serves: every process is needed."""
        await self.until(
            "status", lambda s: s["state"] == "serving" and s["num_stages"] == num_stages, START_S, with_all=True
        )

    def computed_s(self) -> float:
        """Processor time of all processes so far: hardly moved by whatever else the machine does."""
        return sum(computed_s(process.pid) for process in self.processes.values())

    def _has_lost(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())

    async def stop(self) -> None:
        """End them, also those that are stopped, hung or gone already."""
        await self.client.aclose()
        for process in reversed(self.processes.values()):  # the workers first
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                await asyncio.to_thread(process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        shutil.rmtree(self.folder, ignore_errors=True)


class Swarm(Processes):
    """Run ``swarm up`` in a process of its own."""

    def __init__(
        self, model: Path, num_stages: int, threads: int = 0, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(settings)
        self.num_stages = num_stages
        self._arguments = ["up", "--no-http", "--model", str(model), "--port", str(self.port)]
        self._arguments += ["--workers", str(num_stages)]
        self._arguments += ["--threads", str(threads)] if threads else []

    async def begin(self) -> None:
        self.launch("up", [*self._arguments, "--state-dir", str(self.folder / "state")])
        await self.until_serving(self.num_stages)


def computed_s(pid: int) -> float:
    """Processor time of a process so far, its threads together."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@dataclass
class Stream:
    """One answer: its tokens, and when each came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def gaps(self, since: float) -> list[float]:
        """List the times between two tokens that ended later than that."""
        return [later - sooner for sooner, later in pairwise(self.times) if later > since]


async def answers(
    client: AsyncClient,
    prompts: Sequence[list[int]],
    before: int,
    after: int,
    disturb: Callable[[], Awaitable[None]] | None = None,
    *,
    enough: int | None = None,
) -> list[Stream]:
    """Ask all prompts at once, for ``before + after`` tokens each. ``disturb`` happens when each has ``before``.

    ``enough``: answers end this number of tokens after ``disturb`` has returned.
    """
    events = [asyncio.Event() for _ in prompts]
    is_over = False

    async def read(prompt: list[int], reached: asyncio.Event) -> Stream:
        found, left = Stream(), enough
        ongoing = client.stream(prompt, max_tokens=before + after, ignore_eos=True, timeout=2 * START_S)
        async with aclosing(ongoing):
            async for piece in ongoing:
                found.tokens.append(int(piece.token or 0))
                found.times.append(time.monotonic())
                if len(found.tokens) >= before:
                    reached.set()
                if is_over and left is not None:
                    left -= 1
                    if left <= 0:
                        break
        return found

    tasks = [asyncio.create_task(read(p, event)) for p, event in zip(prompts, events, strict=True)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 2 * START_S)
    if disturb is not None:
        await disturb()
        is_over = True
    return list(await asyncio.gather(*tasks))


def check_tokens(streams: Sequence[Stream], expected: Sequence[Stream], what: str) -> None:
    """Check that these answers have the tokens of undisturbed ones, which may be longer. Raises BenchError."""
    for stream, calm in zip(streams, expected, strict=True):
        if stream.tokens != calm.tokens[: len(stream.tokens)]:
            raise BenchError(f"{what}: the tokens differ from those of the undisturbed run")
