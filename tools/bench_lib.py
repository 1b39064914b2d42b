"""What the benchmarks share: a swarm in a process of its own, turns, medians, tables, facts about the machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, cast

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 (the checkout's own swarm must be found first)
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from swarm import AsyncClient  # noqa: E402
from swarm.errors import SwarmError, Unavailable  # noqa: E402

# As ``swarm worker`` sets it for itself: threads that wait for each other sleep. The peer gets the same, since spinning
# ones take the cores from whoever has work: on a busy machine it makes the peer three times slower than it is.
from swarm.stage.shell.waiting import PASSIVE_WAITING as PASSIVE  # noqa: E402, F401

START_S = 600.0  # a cold disk and a busy machine
STOP_S = 15.0
POLL_S = 0.02

LESS_IS_BETTER = ("s", "ms", "MiB")

Body = dict[str, Any]
Turn = Callable[[], Awaitable[float]]


class BenchError(Exception):
    """A measurement that can't be made. The text says why."""


# --- processes --------------------------------------------------------------------------------------------------------


class Processes(ABC):
    """A swarm's processes, and a client for it. Use it with ``async with``: it is ready then, and gone afterwards.

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
    ) -> None:
        """``swarm`` with these arguments, in the place of one of this name that has ended. ``before`` runs in it."""
        values = {**os.environ, "PYTHONPATH": str(ROOT), **self.settings, **(environment or {})}
        command = [sys.executable, "-P", "-m", "swarm", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=values,
                preexec_fn=before,  # noqa: PLW1509 (no threads were started yet)
            )

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
        """As just started, when every process is needed."""
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
    """``swarm up`` in a process of its own."""

    def __init__(
        self, model: Path, num_stages: int, threads: int = 0, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(settings)
        self.num_stages = num_stages
        self._arguments = ["up", "--model", str(model), "--port", str(self.port), "--workers", str(num_stages)]
        self._arguments += ["--threads", str(threads)] if threads else []

    async def begin(self) -> None:
        self.launch("up", [*self._arguments, "--state-dir", str(self.folder / "state")])
        await self.until_serving(self.num_stages)


def free_port() -> int:
    """The first of two free ports, below those that systems lend to clients."""
    for _ in range(200):
        port = random.randrange(10000, 19000)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise BenchError("there are no two free ports in a row")


def random_prompt(count: int, vocabulary: int) -> list[int]:
    """Tokens that no earlier prompt began with, so that no cache helps."""
    return [random.randrange(3, vocabulary) for _ in range(count)]


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/swarm-bench"), help="where its models lie")


def model_of(arguments: argparse.Namespace, shape: str = "1.1b", *, wide: bool = False) -> Path:
    """The folder that was named, or that of the benchmark's model of this shape, which is written if it isn't there
    yet; ``wide``: in float32."""
    if arguments.model is not None:
        return Path(arguments.model)
    folder: Path = arguments.model_dir / f"llama-{shape}{'-float32' if wide else ''}"
    if not (folder / "model.safetensors").is_file():
        note(f"writing the model to {folder} …")
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(TOOLS / "bench_model.py"), str(folder), "--shape", shape]
        # In a process of its own: this one shall not keep the memory.
        subprocess.run([*command, *(["--float32"] if wide else [])], check=True)
    return folder


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One case: what each contestant showed in each round, and each one's ratio to the baseline, if there is one.

    ``ratios`` are medians over rounds of neighbouring turns, above 1 where the contestant is better than the baseline.
    With a ``subject`` there are no others than its ratios to everybody else. ``target`` is for the first one.
    """

    case: str
    unit: str
    samples: dict[str, list[float]]
    baseline: str | None = None
    target: float | None = None
    subject: str | None = None
    medians: dict[str, float] = field(init=False)
    ratios: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.medians = {name: median(values) for name, values in self.samples.items()}
        self.ratios = {f"{mine} ÷ {theirs}": self._ratio(mine, theirs) for mine, theirs in self._pairs()}

    def _pairs(self) -> list[tuple[str, str]]:
        if self.subject is not None:
            return [(self.subject, name) for name in self.samples if name != self.subject]
        return [(name, self.baseline) for name in self.samples if self.baseline and name != self.baseline]

    def _ratio(self, mine: str, theirs: str) -> float:
        pairs = zip(self.samples[mine], self.samples[theirs], strict=True)
        return median(their / my if self.unit in LESS_IS_BETTER else my / their for my, their in pairs)


def computed_s(pid: int) -> float:
    """Processor time of a process so far, its threads together."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def in_turns(contestants: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """A B, B A, A B …: whatever else the machine does hits all alike. A first round warms up and doesn't count."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        order = list(contestants) if round_ % 2 else list(contestants)[::-1]
        for name in order:
            figure = await contestants[name]()
            if round_ > 0:
                samples[name].append(figure)
    return samples


# --- what is told -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """Where and with what: a figure without these says nothing."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = f"{len(names)} × {names[0]}" if names else name
    packages = ("torch", "transformers", "pyzmq", "swarm")
    found = [f"{package} {_version(package)}" for package in packages]
    return {
        "machine": name,
        "system": platform.platform(),
        "versions": f"Python {platform.python_version()}, {', '.join(found)}",
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "load": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "from its sources" if package == "swarm" else "is not installed"


def table(rows: list[Row], title: str) -> Table:
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("case")
    for name in rows[0].samples:
        drawn.add_column(name, justify="right")
    for name in rows[0].ratios:
        drawn.add_column(name if len(rows[0].ratios) > 1 else "ratio", justify="right")
    has_targets = any(row.target for row in rows)
    if has_targets:
        drawn.add_column("target", justify="right")
    for row in rows:
        figures = [f"{_short(figure)} {row.unit}" for figure in row.medians.values()]
        ratios = [f"{ratio:.2f}×" for ratio in row.ratios.values()]
        drawn.add_row(row.case, *figures, *ratios, *([f"{row.target:g}×" if row.target else ""] if has_targets else []))
    return drawn


def _short(figure: float) -> str:
    """Three digits are more than such figures deserve."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def tell(rows: list[Row], title: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print the outcome: a table, or one JSON object with every sample."""
    about = {**facts, **machine()}
    if as_json:
        print(json.dumps({"what": title, **about, "results": [asdict(row) for row in rows]}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    if rows:
        console.print(table(rows, title))
    for name, value in about.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)


def note(text: str) -> None:
    """Progress, on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def run(measured: Awaitable[tuple[list[Row], dict[str, object]]]) -> tuple[list[Row], dict[str, object]]:
    """The outcome of a mode; a measurement that can't be made ends the program with one line."""

    async def wait() -> tuple[list[Row], dict[str, object]]:
        return await measured

    try:
        return asyncio.run(wait())
    except (BenchError, SwarmError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
