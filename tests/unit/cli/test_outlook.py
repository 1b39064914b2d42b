"""``swarm doctor --model``: the forecast is that of the plan which a broker would make."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as with_fields

from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.proposals import propose
from swarm.broker.settings import make_plan_rules
from swarm.broker.state import State, Worker
from swarm.cli.doctor.estimate import ROWS, estimate_speed
from swarm.config import Settings
from swarm.testing import fake_manifest
from swarm.wire.messages import Hello, LayerCost
from tests.unit.broker.bench import FakeWorker

ROOM = 1 << 30


def cost(kind: str, rows: int, seconds: float) -> LayerCost:
    return LayerCost(kind=kind, rows=rows, context=0, seconds=seconds, alone=True)  # type: ignore[arg-type]


# Prompts take long, and the head with many rows: so the best cut depends on what steps are made of.
COSTS = (
    *(cost("decode", rows, 1e-3) for rows in (1, 16)),
    *(cost("prefill", rows, rows * 1e-3) for rows in (1, 256)),
    *(cost("head", rows, rows * 5e-4) for rows in (1, 16)),
)


def hello() -> Hello:
    worker = FakeWorker("doctor", "doctor", memory_bytes=2 * ROOM, manifest=fake_manifest(num_layers=12), host="here")
    return worker.hello(cores=2, costs=COSTS)


def cut(settings: Settings, load: PlannedLoad | None = None) -> list[int]:
    """As a broker makes it of two such workers on one machine."""
    state, rules = State(), make_plan_rules(settings)
    state.set_manifest(hello().manifest)
    for name in ("w0", "w1"):
        own = with_fields(hello(), name=name, incarnation=name, memory_bytes=ROOM)
        state.workers[name] = Worker(own, name.encode(), 0.0)
    found = propose(state, replace(rules, load=load or rules.load))
    assert isinstance(found, Proposal)
    return [len(layers) for _, layers in found.shares]


def test_the_cut_is_the_one_that_the_planner_makes() -> None:
    """Whatever loads are reckoned for: the one with most sequences would be cut otherwise."""
    settings = Settings()
    found = estimate_speed(settings, hello(), 2)
    assert list(found.layers) == cut(settings)
    assert cut(settings, PlannedLoad(ROWS[-1], 512, 0.0)) != cut(settings)


def test_rates_are_those_of_that_cut() -> None:
    """Stages take turns here: a step takes what its layers and the head take together, and more sequences more."""
    found = estimate_speed(Settings(), hello(), 2)
    assert [rows for rows, _ in found.tokens_per_s] == list(ROWS)
    step_s = [rows / rate for rows, rate in found.tokens_per_s]
    assert step_s == sorted(step_s)
    assert step_s[-1] > 12 * 1e-3 + 16 * 5e-4
