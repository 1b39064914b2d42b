"""A real swarm for tests: a broker and workers as processes, on loopback, ended by their ids."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from swarm import AsyncClient

Launch = Callable[[Sequence[str], dict[str, str], Path], Any]  # arguments of swarm, environment, log: the process

# ``SWARM_BROKER__MODE=overlapped pytest tests/integration``: with a step per stage in flight, not one at a time as is
# usual on one machine.
IS_OVERLAPPED = os.environ.get("SWARM_BROKER__MODE") == "overlapped"
# A machine that is busy with other tests delays heartbeats by a second and more. With the default limits (0.4 and
# 0.7 s), workers would then be declared lost. The simulation and the unit tests check the defaults.
PATIENT = {"SWARM_HEALTH__BEAT_LEAST_S": "2.0", "SWARM_HEALTH__BEAT_TIMEOUT_S": "3.0"}
KEEPER = "swarm-keeper"  # a worker's keeper's name, for those that need no torch, which comes with its module
START_S = 120.0  # generous: importing torch thrice on two busy cores takes a while


def free_ports(count: int = 2) -> int:
    """The first of ``count`` consecutive free ports, below those that systems lend to clients."""
    for _ in range(200):
        port = random.randrange(10000, 19000)
        taken = [s for s in range(port, port + count) if not _is_free(s)]
        if not taken:
            return port
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def launch(arguments: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process of its own from the start, as a shell would."""
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "swarm", *arguments], stdout=file, stderr=file, env=environment)


class Processes:
    """Starts ``swarm broker`` and ``swarm worker``s; stops them, whatever has become of them, at the end. ``launch``:
    how a process is started."""

    def __init__(
        self, model: Path, logs: Path, *, options: dict[str, str] | None = None, launch: Launch = launch
    ) -> None:
        self.model = model
        self.logs = logs
        self.port = free_ports()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.broker: Any = None
        self.workers: dict[str, Any] = {}
        self._options = options or {}
        self._launch = launch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, num_workers: int) -> None:
        self.start_broker(num_workers)
        for number in range(num_workers):
            self.start_worker(f"w{number}")

    def start_broker(self, min_workers: int = 1, **environment: str) -> None:
        arguments = ["broker", "--port", str(self.port), "--min-workers", str(max(1, min_workers))]
        self.broker = self._start("broker", arguments, environment)

    async def restart_broker(self, client: AsyncClient, num_workers: int, **environment: str) -> None:
        """Kill the broker and start it again; wait until it serves with so many."""
        self.broker.kill()
        self.broker.wait()
        self.start_broker(num_workers, **environment)
        await self.until_serving(client, num_workers)

    def start_worker(self, name: str, *more: str, **environment: str) -> None:
        """``more``: options of the command; ``environment``: variables for this process alone."""
        arguments = ["worker", "--url", self.url, "--name", name, "--model", str(self.model), "--threads", "1"]
        self.workers[name] = self._start(name, [*arguments, "--memory-limit", "2GiB", *more], environment)

    def _start(self, name: str, arguments: list[str], more: Mapping[str, str]) -> Any:
        environment = PATIENT | os.environ | {"SWARM_LOG__FORMAT": "json"} | self._options | more
        log = self.logs / f"{name}.log"
        log.touch()  # it can be read at once
        return self._launch(arguments, environment, log)

    def kill(self, name: str) -> None:
        """As by the kernel: no last words."""
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> list[int]:
        """Ask everybody to end; returns the exit codes."""
        processes = [*self.workers.values(), *([self.broker] if self.broker else [])]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(10))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        self.workers, self.broker = {}, None
        return codes

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def figures(self) -> dict[str, tuple[int, int]]:
        """(threads, descriptors) of each process."""
        found = {}
        named = {**self.workers, **({"broker": self.broker} if self.broker else {})}
        for name, process in named.items():
            of = psutil.Process(process.pid)
            found[name] = (of.num_threads(), of.num_fds())
        return found

    async def until_serving(self, client: AsyncClient, num_stages: int) -> None:
        """Wait until a plan with so many stages serves; fail with the logs if that takes too long."""
        await self.until(client, "status", lambda s: s["state"] == "serving" and s["num_stages"] == num_stages)

    async def until(self, client: AsyncClient, what: Any, holds: Any, within_s: float = START_S) -> dict[str, Any]:
        """Ask the broker again and again until its report is as wished."""
        give_up_at = time.monotonic() + within_s
        report: dict[str, Any] = {}
        while time.monotonic() < give_up_at:
            report = await client.query(what)
            if holds(report):
                return report
            await asyncio.sleep(0.05)
        texts = "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.logs.glob("*.log")))
        ended = {name: code for name, process in self.workers.items() if (code := process.poll()) is not None}
        raise AssertionError(f"never as wished within {within_s} s: {report}\nended: {ended}\n{texts}")


async def figures(client: AsyncClient) -> dict[str, float]:
    """Read the pipeline's counters."""
    pipeline = (await client.query("stats"))["pipeline"]
    assert isinstance(pipeline, dict)
    return {name: float(value) for name, value in pipeline.items() if isinstance(value, int | float)}


def stages_of(nodes: dict[str, Any]) -> list[str]:
    """Return the names of the workers with layers, in the layers' order, from the report on nodes. The report on the
    plan has a forecast, for which the broker starts a process that imports for half a second."""
    return [str(row["name"]) for row in sorted(nodes["workers"], key=lambda row: row["layers"] or []) if row["layers"]]


async def some_tokens(processes: Processes, client: AsyncClient, more: int) -> None:
    """Wait until the swarm has drawn so many further tokens."""
    began = (await figures(client)).get("tokens", 0.0)
    await processes.until(client, "stats", lambda report: report["pipeline"].get("tokens", 0.0) >= began + more)
