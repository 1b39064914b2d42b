#!/usr/bin/env python3
"""Measure how long a plan takes to find, and how good it is: devices of all kinds, from 2 to 1,000, models of up to
126 layers. Up to 8 devices the search is exact; beyond, the distance is from a bound that no plan can beat, so it is at
most that far from the best.

``--loss``: a worker of a plan dies while a request runs, and others stand by without a part: from the news to the order
of a new epoch, in a broker's core. Nobody can compute anything before that order.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass, replace
from statistics import median

from bench_lib import report
from rich.table import Table

from swarm.broker.actions import WriteEpoch
from swarm.broker.core import CoreSettings
from swarm.broker.events import WorkerDisconnected
from swarm.broker.planner import tables
from swarm.broker.planner.bound import lower_bound
from swarm.broker.planner.problem import Device, ModelSizes, NetworkLink, PlanningProblem, Shortage
from swarm.broker.planner.solve import MAX_EXACT, solve
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.testing import fake_manifest
from swarm.wire.messages import LayerCost
from tests.unit.broker.bench import Bench, submit

MIB = 1 << 20
SIZES = ((2, 16), (4, 32), (8, 32), (8, 126), (16, 126), (64, 126), (256, 126), (1000, 126))
NUM_TRIES = 5
LOSSES = ((8, 2), (8, 4), (64, 8))  # workers, and how many of them are slow and without a part


@dataclass(frozen=True)
class Figure:
    """``gap``: how much above the bound a step is, the median and the worst of the tries; 0 where it is exact."""

    devices: int
    layers: int
    objective: str
    kind: str
    seconds: float
    slowest_s: float
    gap: float
    worst_gap: float
    stages: int
    exact: bool


def problem_of(
    chance: random.Random, num_devices: int, num_layers: int, kind: str, *, takes_turns: bool
) -> PlanningProblem:
    """Make machines of four devices. ``alike``: machines of three kinds; ``mixed``: every device is another one."""
    model = ModelSizes(
        name="model",
        layer_bytes=(100 * MIB,) * num_layers,
        embed_bytes=300 * MIB,
        head_bytes=300 * MIB,
        kv_bytes=(4096,) * num_layers,
        layer_weights=(1.0,) * num_layers,
        hop_bytes=64 << 10,
    )
    room = 4 * num_layers / num_devices  # together, about four times what the model needs
    devices = tuple(_device(chance, number, kind, room) for number in range(num_devices))
    return PlanningProblem(model, devices, takes_turns, kv_positions=4096)


def _device(chance: random.Random, number: int, kind: str, room: float) -> Device:
    """Draw a device. ``room``: about how many layers it can hold."""
    speed, size = chance.uniform(0.5, 5), chance.uniform(0.5, 1.5)
    if kind == "alike":
        speed, size = ((0.5, 1.5), (1.0, 1.0), (3.0, 0.75))[number // 4 % 3]
    return Device(
        name=f"d{number}",
        memory_bytes=int((500 + max(200.0, 170 * room * size)) * MIB),
        layer_s=speed / 1000,
        stage_s=0.0003,
        embed_s=0.0001,
        head_s=1.5 * speed / 1000,
        host=f"h{number // 4}",
        link=NetworkLink(0.0001 if kind == "alike" else chance.uniform(0.00005, 0.0005), 1.25e9),
    )


def measure(num_devices: int, num_layers: int, kind: str, *, takes_turns: bool) -> Figure | None:
    """Plan for several draws; None if these devices can't hold the model."""
    took, gaps, stages = [], [], 0
    for seed in range(NUM_TRIES):
        problem = problem_of(random.Random(seed), num_devices, num_layers, kind, takes_turns=takes_turns)
        began = time.perf_counter()
        line = solve(problem)
        took.append(time.perf_counter() - began)
        if isinstance(line, Shortage):
            continue
        best = solve(replace(problem, tolerance=0.0)) if num_devices <= MAX_EXACT else None
        bound = lower_bound(problem) if best is None else tables.step_seconds(problem, best)  # type: ignore[arg-type]
        gaps.append(tables.step_seconds(problem, line) / bound - 1)
        stages = len(line)
    if not gaps:
        return None
    return Figure(
        devices=num_devices,
        layers=num_layers,
        objective="latency" if takes_turns else "throughput",
        kind=kind,
        seconds=median(took),
        slowest_s=max(took),
        gap=median(gaps),
        worst_gap=max(gaps),
        stages=stages,
        exact=num_devices <= MAX_EXACT,
    )


def loss_ms(num_workers: int, num_spare: int) -> float:
    """Measure in milliseconds the median of some losses, each in a swarm of its own."""
    return 1000 * median(_loss_s(num_workers, num_spare, seed) for seed in range(NUM_TRIES))


def _loss_s(num_workers: int, num_spare: int, seed: int) -> float:
    chance = random.Random(seed)
    plan = ReconfigurationSettings(settle_s=0.0, min_workers=num_workers)
    bench = Bench(CoreSettings(heartbeat_endpoint="beats", data_endpoint="data", plan=plan))
    model = fake_manifest(2 * num_workers)
    for number in range(num_workers):
        slowness = 100.0 if number >= num_workers - num_spare else 1.0
        worker = bench.add(f"w{number}", host=f"h{number}", manifest=model)
        layer_s = slowness * chance.uniform(0.001, 0.003)
        costs = (LayerCost("decode", 1, 0, layer_s, False), LayerCost("decode", 8, 0, layer_s, False))
        bench.tell(worker.name, worker.hello(costs=costs))
    bench.tick(2.0)
    assert bench.state.plans.is_serving
    bench.say(submit())
    current = bench.state.plans.current
    assert current is not None
    dead = current.stages[len(current.stages) // 2]
    peer = bench.workers[dead.name].peer
    began = time.perf_counter()
    actions = bench.core.handle(WorkerDisconnected(peer), bench.now)
    took = time.perf_counter() - began
    assert any(isinstance(action, WriteEpoch) for action in actions)
    return took


def tell_losses(*, as_json: bool) -> None:
    found = [{"workers": many, "spares": spare, "ms": round(loss_ms(many, spare), 2)} for many, spare in LOSSES]
    lines = (
        "{workers} workers, {spares} of them spares: {ms} ms from the news of a loss to the epoch".format(**result)
        for result in found
    )
    report("losses", {"results": found}, lines, {}, as_json=as_json)


def tell(figures: list[Figure], *, as_json: bool) -> None:
    table = Table(title=f"Plans: medians of {NUM_TRIES} problems", title_justify="left")
    for heading in (
        "devices",
        "layers",
        "objective",
        "devices are",
        "time",
        "slowest",
        "from",
        "gap",
        "worst",
        "stages",
    ):
        table.add_column(heading, justify="left" if heading in ("objective", "devices are", "from") else "right")
    for f in figures:
        table.add_row(
            *(str(f.devices), str(f.layers), f.objective, f.kind, f"{f.seconds * 1000:.0f} ms"),
            *(f"{f.slowest_s * 1000:.0f} ms", "the best" if f.exact else "a bound"),
            *(f"{f.gap:.1%}", f"{f.worst_gap:.1%}", str(f.stages)),
        )
    equal = "what lies within 2% of the best counts as equal: among those, the plan that moves least is taken"
    report("plans", {"results": [asdict(f) for f in figures]}, [table, equal], {}, as_json=as_json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1000, help="the largest number of devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--loss", action="store_true", help="how long a loss waits for its plan")
    arguments = parser.parse_args()
    if arguments.loss:
        tell_losses(as_json=arguments.json)
        return
    found = [
        measure(num_devices, num_layers, kind, takes_turns=takes_turns)
        for num_devices, num_layers in SIZES
        if num_devices <= arguments.most
        for kind in ("alike", "mixed")
        for takes_turns in (False, True)
    ]
    tell([figure for figure in found if figure is not None], as_json=arguments.json)


if __name__ == "__main__":
    main()
