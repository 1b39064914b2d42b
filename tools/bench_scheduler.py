#!/usr/bin/env python3
"""Measure what the broker's core costs per step, with few and many sequences running, with nobody and many waiting.

A real core, fed with events; no sockets, no model. A step's cost is ``handle(StepFinished)``: acknowledge, take the new
tokens, choose and build the next step. It is measured over steps in which every row is a decode, and over steps in
which an answer ends and the next one comes in from the queue. Steps are as large as the settings allow, so a row's cost
can be told from a step's. The queue should make no difference; that is what this tool is for.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

from bench_lib import numbers, report
from rich.table import Table

from swarm.broker.core import CoreSettings
from swarm.broker.events import StepFinished, Tick
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.steps.scheduler import SchedulerSettings
from tests.unit.broker.bench import Bench, done_of, submit

RUNNING = (1, 16, 256, 1024)
QUEUED = (0, 10_000)
ROOM = 1 << 24  # positions: nobody has to give way
LONG = 4096
CLIENTS = 16


@dataclass(frozen=True)
class Result:
    """Microseconds. ``step``: all rows are decodes; ``turnover``: one ends and another joins; ``tick``: a tick."""

    running: int
    queued: int
    rows: int
    step_us: float
    step_p95_us: float
    row_us: float
    turnover_us: float
    tick_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=numbers, default=RUNNING, metavar="N,N", help="sequences that run")
    parser.add_argument("--queued", type=numbers, default=QUEUED, metavar="N,N", help="sequences that wait")
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed in each case [200]")
    parser.add_argument("--step-tokens", type=int, default=1024, help="most rows of a step [1024]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = [
        measure(running, queued, arguments.steps, arguments.step_tokens)
        for running in arguments.running
        for queued in arguments.queued
    ]
    found = {"cases": [asdict(result) for result in results]}
    report("the scheduler", found, [_table(results)], {}, as_json=arguments.json)


def measure(running: int, queued: int, num_steps: int, step_tokens: int) -> Result:
    """Measure one case, on a core of its own. Garbage collection is put off: it belongs to no step."""
    bench = _full(running, queued, step_tokens)
    gc.collect()
    gc.disable()
    try:
        steps, rows = _time_steps(bench, num_steps)
        turnover = _time_turnovers(bench, min(num_steps, queued, 100)) if queued else []
        ticks = [_timed(bench, Tick()) for _ in range(50)]
    finally:
        gc.enable()
    ordered = sorted(steps)
    return Result(
        running=running,
        queued=queued,
        rows=rows,
        step_us=round(median(steps), 1),
        step_p95_us=round(ordered[int(len(ordered) * 0.95)], 1),
        row_us=round(median(steps) / rows, 2),
        turnover_us=round(median(turnover), 1) if turnover else 0.0,
        tick_us=round(median(ticks), 1),
    )


def _full(running: int, queued: int, step_tokens: int) -> Bench:
    """Make a swarm in which so many decode and so many wait."""
    settings = CoreSettings(
        heartbeat_endpoint="beats",
        data_endpoint="data",
        requests=RequestSettings(max_queue=1 << 20),
        scheduler=SchedulerSettings(mode="batch", step_tokens=step_tokens, max_running=running),
        plan=ReconfigurationSettings(settle_s=0.0),
    )
    bench = Bench(settings)
    bench.watch = _Blind()  # type: ignore[assignment]
    bench.serve(1, kv_capacity=ROOM, max_sequences=1 << 16)
    for number in range(running + queued):
        bench.now += 1e-6
        request = submit(f"r{number}", max_tokens=400, ignore_eos=True, tenant=f"t{number % CLIENTS}")
        bench.say(request)
        bench.log.clear()
    while len(bench.state.running) < running or bench.state.running.num_prefilling:
        bench.now += 1e-4
        bench.finish()
    for _ in range(3):
        bench.now += 1e-4
        bench.finish()
    bench.log.clear()
    return bench


class _Blind:
    """Replace the bench's checks, which look at everything."""

    def before(self, event: object) -> None:
        pass

    def after(self, actions: object) -> None:
        pass


def _time_steps(bench: Bench, num_steps: int) -> tuple[list[float], int]:
    times, rows = [], 0
    for _ in range(num_steps):
        step = bench.pipe.popleft()
        rows = max(rows, len(step.rows))
        times.append(_timed(bench, StepFinished(done_of(step, 7, {}, set(), ()))))
    return times, rows


def _time_turnovers(bench: Bench, num_steps: int) -> list[float]:
    """Time steps in which the first row's answer ends, and somebody comes in for it."""
    times = []
    for _ in range(num_steps):
        step = bench.pipe.popleft()
        first = bench.state.sequences[step.rows[0].sequence] if step.rows else None
        if first is not None:
            first.limit = first.sampled + 1
        times.append(_timed(bench, StepFinished(done_of(step, 7, {}, set(), ()))))
    return times


def _timed(bench: Bench, event: StepFinished | Tick) -> float:
    """Measure the microseconds that the core alone takes; what follows is done outside of the time."""
    bench.now += 1e-4
    began = perf_counter()
    actions = bench.core.handle(event, bench.now)
    seconds = perf_counter() - began
    for action in actions:
        bench._perform(action)
    while bench._due:
        for action in bench.core.handle(bench._due.popleft(), bench.now):
            bench._perform(action)
    return seconds * 1e6


def _table(results: list[Result]) -> Table:
    table = Table("running", "queued", "rows", "step µs", "p95 µs", "per row µs", "turnover µs", "tick µs")
    for r in results:
        cells = (r.running, r.queued, r.rows, r.step_us, r.step_p95_us, r.row_us, r.turnover_us or "–", r.tick_us)
        table.add_row(*map(str, cells))
    return table


if __name__ == "__main__":
    main()
