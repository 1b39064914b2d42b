"""What statistics cost: the demo model with and without them, in turns, and each recording by itself.

Two swarms run side by side on this machine, one of them with every recording replaced by nothing. They are asked in
turns (A B A B …), so that whatever else the machine does meets both. The difference of the medians says something only
if it is larger than what rounds of the same swarm differ by, which is printed beside it.

    tools/bench_stats.py [--rounds 6] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_lib import computed_s  # noqa: E402

from swarm import AsyncClient  # noqa: E402 (the tree that this file is in, whatever is installed)
from swarm.broker.reports.statistics import PipelineStatistics  # noqa: E402
from swarm.broker.reports.trace import Tracer  # noqa: E402
from swarm.stage.executor import Forwarded  # noqa: E402
from swarm.stage.statistics import StageStatistics  # noqa: E402
from swarm.wire.messages import Hop, LayerRange, Row, SequencePosition, Step, StepDone  # noqa: E402

START_S = 120.0
TOKENS = 40
RECORDINGS: tuple[tuple[type, str], ...] = (
    (PipelineStatistics, "dispatched"),
    (PipelineStatistics, "finished"),
    (Tracer, "finished"),
    (StageStatistics, "computed"),
    (StageStatistics, "received"),
    (StageStatistics, "sent"),
)


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        return _child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each swarm and size")
    parser.add_argument("--quick", action="store_true", help="two rounds: only to see that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rounds = 2 if options.quick else max(2, options.rounds)
    found = {"recordings_us": recordings(2_000 if options.quick else 100_000), "swarm": asyncio.run(swarms(rounds))}
    print(json.dumps(found, indent=2) if options.json else _shown(found))
    return 0


# --- a swarm with or without ------------------------------------------------------------------------------------------


def _child(which: str, arguments: Sequence[str]) -> int:
    """A process of one of the swarms."""
    if which == "off":
        for owner, name in RECORDINGS:
            setattr(owner, name, _nothing)
    from swarm.cli.main import run  # noqa: PLC0415 (what it imports must be patched by then)

    return run(arguments)


def _nothing(*_: object, **__: object) -> bool:
    return False


@dataclass(slots=True)
class Swarm:
    """A broker and two workers with one thread each."""

    which: str
    port: int
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._start("broker", "--port", str(self.port), "--min-workers", "2")
        for name in ("w0", "w1"):
            self._start("worker", "--url", self.url, "--name", name, "--threads", "1", "--memory-limit", "1GiB")

    def _start(self, *arguments: str) -> None:
        log = (self.logs / f"{self.which}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, str(Path(__file__).resolve()), "child", self.which, *arguments]
        with log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))

    def cpu_s(self) -> float:
        """Processor time of all its processes so far: hardly moved by whatever else the machine does."""
        return sum(computed_s(process.pid) for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def swarms(rounds: int) -> dict[str, Any]:
    """Tokens per second of both, by the number of sequences."""
    first = random.randrange(10_000, 18_000, 4)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        both = {which: Swarm(which, first + 2 * n, logs) for n, which in enumerate(("on", "off"))}
        for swarm in both.values():
            stack.callback(swarm.stop)
            swarm.start()
        clients = {which: AsyncClient(swarm.url, connect_timeout_s=START_S) for which, swarm in both.items()}
        try:
            for client in clients.values():
                await _until_serving(client)
            return {str(size): await _compare(both, clients, size, rounds) for size in (1, 16)}
        finally:
            for client in clients.values():
                await client.aclose()


async def _until_serving(client: AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while (await client.describe()).state != "serving":  # noqa: ASYNC110 (a report is asked for, not awaited)
            await asyncio.sleep(0.1)


async def _compare(swarms: dict[str, Swarm], clients: dict[str, AsyncClient], size: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {which: [] for which in clients}
    cpu: dict[str, list[float]] = {which: [] for which in clients}
    for number in range(rounds + 1):
        for which, client in clients.items():
            before_s = swarms[which].cpu_s()
            rate = await _round(client, size)
            if number:  # the first is for getting warm
                rates[which].append(rate)
                cpu[which].append(1000 * (swarms[which].cpu_s() - before_s) / (size * TOKENS))
    medians = {which: statistics.median(values) for which, values in rates.items()}
    spread = max((max(values) - min(values)) / statistics.median(values) for values in rates.values())
    return {
        "tokens_per_s": {which: round(median, 1) for which, median in medians.items()},
        "cost_percent": round(100 * (1 - medians["on"] / medians["off"]), 2),
        "rounds_differ_by_percent": round(100 * spread, 1),
        "cpu_ms_per_token": {which: round(statistics.median(values), 3) for which, values in cpu.items()},
    }


async def _round(client: AsyncClient, size: int) -> float:
    prompts = [[random.randrange(3, 100) for _ in range(8)] for _ in range(size)]
    began = time.perf_counter()
    done = await client.generate_batch(prompts, max_tokens=TOKENS, ignore_eos=True)
    return sum(len(each.tokens) for each in done) / (time.perf_counter() - began)


# --- each recording by itself -----------------------------------------------------------------------------------------


def recordings(times: int) -> dict[str, float]:
    """Microseconds per step of 16 rows and three stages."""
    rows = tuple(Row(n, 40, 1, True) for n in range(16))
    step = Step(epoch=1, step=1, rows=rows, tokens=tuple(range(16)))
    hops = tuple(Hop(f"w{n}", LayerRange(n, n + 1), 1e-4, 1e-3, 1e-5, 0.0, 8192, 1.2e-3) for n in range(3))
    kv = tuple(SequencePosition(n, 41) for n in range(16))
    done = StepDone(epoch=1, step=1, kv=kv, sampled=(), failed=(), hops=hops)
    forwarded = Forwarded(None, (), (), 1e-3, 1e-5)
    pipeline, tracer, stage = PipelineStatistics(), Tracer(), StageStatistics()
    return {
        "broker: a step is dispatched": _timed(lambda: pipeline.dispatched(step, 1, 0), times),
        "broker: a step is answered": _timed(lambda: pipeline.finished(0.01, done), times),
        "broker: its times are kept": _timed(lambda: tracer.finished(0.0, 0.01, done), times),
        "stage: a step is computed": _timed(lambda: stage.computed(step, forwarded, hops[0], 0), times),
        "stage: a message is sent": _timed(lambda: stage.sent(1e-5, 8192), times),
    }


def _timed(record: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        record()
    return round((time.perf_counter() - began) / times * 1e6, 2)


def _shown(found: dict[str, Any]) -> str:
    lines = [f"{what:<32} {us:6.2f} µs per step" for what, us in found["recordings_us"].items()]
    for size, of in found["swarm"].items():
        rates, cpu = of["tokens_per_s"], of["cpu_ms_per_token"]
        lines.append(
            f"{size:>2} sequences: {rates['on']:.1f} tokens/s with statistics, {rates['off']:.1f} without: "
            f"{of['cost_percent']:+.2f} % (rounds of one swarm differ by {of['rounds_differ_by_percent']:.1f} %); "
            f"processor time per token {cpu['on']:.3f} ms, {cpu['off']:.3f} without"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
