"""Shared by the benchmarks: models, turns, medians, options, and how results are told."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from rich.console import Console, RenderableType  # noqa: E402 (the checkout's own swarm must be found first)
from rich.table import Table  # noqa: E402

from swarm.errors import SwarmError  # noqa: E402

# As ``swarm worker`` sets it for itself: threads that wait for each other sleep. The peer gets the same, since spinning
# ones take the cores from whoever has work: on a busy machine it makes the peer three times slower than it is.
from swarm.stage.shell.openmp import PASSIVE_WAITING as PASSIVE  # noqa: E402

LESS_IS_BETTER = ("s", "ms", "MiB")

Turn = Callable[[], Awaitable[float]]


class BenchError(Exception):
    """A measurement that can't be made. The text says why."""


def wait_passively() -> None:
    """Start this program anew with threads that sleep while they wait. torch reads that when it is loaded: too late."""
    if any(name not in os.environ for name in PASSIVE):
        os.execve(sys.executable, [sys.executable, *sys.argv], PASSIVE | os.environ)


def free_port() -> int:
    """Find the first of two free ports, below those that systems lend to clients."""
    for _ in range(200):
        port = random.SystemRandom().randrange(10000, 19000)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise BenchError("there are no two free ports in a row")


def wait_for(url: str, process: subprocess.Popen[bytes], within_s: float = 60.0) -> None:
    """Wait until what ``process`` serves answers."""
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > give_up_at or process.poll() is not None:
                raise BenchError(f"{url} does not answer") from None
            time.sleep(0.1)


def random_prompt(count: int, vocabulary: int) -> list[int]:
    """Draw tokens that no earlier prompt began with, so that no cache helps."""
    return [random.randrange(3, vocabulary) for _ in range(count)]


def vocabulary_of(model: Path) -> int:
    """Return the number of tokens of a folder's model, or of a GGUF file's."""
    if model.is_file():
        from swarm.stage.model.checkpoint import Checkpoint  # noqa: PLC0415 (slow to load)
        from swarm.stage.model.location import locate_model  # noqa: PLC0415 (slow to load)

        return Checkpoint.at(locate_model(str(model))).vocab_size
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/swarm-bench"), help="where its models lie")


def numbers(text: str) -> tuple[int, ...]:
    """Read an option's value: whole numbers with commas between them."""
    return tuple(int(part) for part in text.split(","))


def model_of(arguments: argparse.Namespace, shape: str = "1.1b", *, wide: bool = False) -> Path:
    """Return the folder that was named, or that of the benchmark's model of this shape, which is written if need be;
    ``wide``: in float32."""
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
    With a ``subject`` there are no others than its ratios to everybody else. ``target`` is for the first one; ``goals``
    are the least ratios that are wanted, by the contestant that is compared with the subject or the baseline.
    """

    case: str
    unit: str
    samples: dict[str, list[float]]
    baseline: str | None = None
    target: float | None = None
    subject: str | None = None
    goals: dict[str, float] = field(default_factory=dict)
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


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Take turns, A B, B A, A B …, so that other work hits all alike. The first round warms up: it is False."""
    names = list(names)
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 else names[::-1]:
            yield name, round_ > 0


async def in_turns(contestants: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Collect what each of them shows, turn by turn."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for name, counts in turns(contestants, rounds):
        figure = await contestants[name]()
        if counts:
            samples[name].append(figure)
    return samples


def timed_in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Collect the seconds that each of them takes, turn by turn, in this process."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for name, counts in turns(ways, rounds):
        began = time.perf_counter()
        ways[name]()
        if counts:
            samples[name].append(time.perf_counter() - began)
    return samples


# --- what is told -----------------------------------------------------------------------------------------------------


def processor() -> str:
    """Tell how many cores of which kind are here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """Tell where and with what is measured: a figure without these says nothing."""
    packages = ("torch", "transformers", "pyzmq", "swarm")
    found = [f"{package} {_version(package)}" for package in packages]
    return {
        "machine": processor(),
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
        ratios = [f"{ratio:.2f}×{_goal(row, name)}" for name, ratio in row.ratios.items()]
        drawn.add_row(row.case, *figures, *ratios, *([f"{row.target:g}×" if row.target else ""] if has_targets else []))
    return drawn


def _goal(row: Row, ratio: str) -> str:
    mine, _, theirs = ratio.partition(" ÷ ")
    goal = row.goals.get(mine if row.subject is None else theirs)
    return f" (≥ {goal:.3g})" if goal else ""


def _short(figure: float) -> str:
    """Write a figure with three digits: more than it deserves."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def report(
    what: str,
    results: Mapping[str, object],
    shown: Iterable[RenderableType],
    facts: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    """Print the outcome and the facts about it: as tables or lines, or as one JSON object with every sample."""
    about = {**facts, **machine()}
    if as_json:
        print(json.dumps({"what": what, **about, **results}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    for each in shown:
        console.print(each, highlight=False, markup=False)
    for name, value in about.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)


def tell(rows: list[Row], title: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    shown = [table(rows, title)] if rows else []
    report(title, {"results": [asdict(row) for row in rows]}, shown, facts, as_json=as_json)


def tell_lines(
    what: str, lines: list[dict[str, object]], facts: Mapping[str, object] | None = None, *, as_json: bool
) -> None:
    """Print results that have names for all that they hold, a line each."""
    shown = ("  ".join(f"{name} {value}" for name, value in line.items()) for line in lines)
    report(what, {"results": lines}, shown, facts or {}, as_json=as_json)


def note(text: str) -> None:
    """Say on stderr what is going on: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def run(measured: Awaitable[tuple[list[Row], dict[str, object]]]) -> tuple[list[Row], dict[str, object]]:
    """Run a mode and return its outcome; a measurement that can't be made ends the program with one line."""

    async def wait() -> tuple[list[Row], dict[str, object]]:
        return await measured

    try:
        return asyncio.run(wait())
    except (BenchError, SwarmError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
