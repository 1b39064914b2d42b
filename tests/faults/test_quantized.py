"""Processes with quantized weights that end in the middle: the same answers to the last bit of their log probabilities.

``SWARM_WORKER__WEIGHTS=int4 pytest tests/faults`` runs all other tests of faults with such weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import MODE_VARIABLE, Answers, Bench, Swarm, long, undisturbed
from tests.faults.zygote import Zygote


@pytest.fixture(
    scope="module",
    params=[("bfloat16", "auto"), pytest.param(("float32", "int8"), marks=pytest.mark.long)],
    ids=["bfloat16", "int8 rows"],
)
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    """Weights of four bits, and workers that keep each other's layers warm."""
    dtype, activations = request.param
    return {
        "SWARM_WORKER__WEIGHTS": "int4",
        "SWARM_WORKER__DTYPE": dtype,
        "SWARM_WORKER__ACTIVATIONS": activations,
        "SWARM_PLAN__STANDBY": "all",
    }


@pytest.fixture(scope="module")
def state(options: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def expected(model: Path, zygote: Zygote, options: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of three workers with these weights when nothing happens to them."""
    alone = options | {MODE_VARIABLE: "batch"}
    with Swarm(model, tmp_path_factory.mktemp("undisturbed"), zygote, alone) as swarm:
        swarm.start(3)
        return asyncio.run(undisturbed(swarm))


async def test_the_weights_are_quantized(bench: Bench) -> None:
    """Every worker's are, and the kernels multiply them as they are."""
    for node in await bench.nodes():
        assert str(node["weights"]).startswith("int4, "), node
        assert "int4 in groups of 32" in str(node["kernels"]), node


# Others are killed with the same weights in test_copies.
@pytest.mark.parametrize("place", [*long(0), 1, *long(-1)], ids=["first", "middle", "last"])
async def test_a_stage_is_killed_in_decode(bench: Bench, place: int) -> None:
    before = await bench.figures()
    async with bench.under_load(warm=120):
        bench.swarm.kill((await bench.order())[place])
    after = await bench.figures()
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1


async def test_a_stage_is_killed_in_a_prompt(bench: Bench) -> None:
    """Between two chunks, of which the second is computed by another worker."""
    times = len(bench.struck_so_far())
    await bench.arm(1, "step.prefill=kill@2")
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)


async def test_two_stages_are_killed_one_after_the_other(bench: Bench) -> None:
    """The second one in the recovery from the first, whose layers it was about to take."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        bench.swarm.kill(names[1])
        bench.swarm.kill(names[2])


async def test_all_stages_are_killed(bench: Bench) -> None:
    """New processes compute everything again from the tokens that the broker has."""
    async with bench.under_load(warm=60):
        for name in await bench.order():
            bench.swarm.kill(name)
        await bench.swarm.until(bench.client, "status", lambda status: status["state"] == "waiting")
        for name in ("w0", "w1", "w2"):
            bench.swarm.start_worker(name)


async def test_a_standby_takes_over(bench: Bench) -> None:
    """Its layers were loaded before, so that nothing is read when their holder dies."""

    def are_warm(report: dict[str, Any]) -> bool:
        nodes = [node for node in report["workers"] if node["layers"] is not None]
        return len(nodes) == 3 and all(node["standby"] and node["warming"] is None for node in nodes)

    await bench.swarm.until(bench.client, "nodes", are_warm)
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        known = {recovery["detected_at"] for recovery in await recoveries(bench)}
        bench.swarm.kill(name)
    (recovery,) = [recovery for recovery in await recoveries(bench) if recovery["detected_at"] not in known]
    assert recovery["workers"] == [name]
    assert recovery["warm"]


async def recoveries(bench: Bench) -> list[dict[str, Any]]:
    report: Any = await bench.client.query("recoveries")
    return list(report["recoveries"])


async def test_the_broker_is_killed(bench: Bench) -> None:
    """What every stage holds goes on; then a worker dies with the next broker."""
    async with bench.under_load(warm=60):
        bench.swarm.kill_broker()
        bench.swarm.start_broker(3)
        found = await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)
        assert found.get("replayed_layer_positions", 0) == 0
        await bench.serving()
        name = (await bench.order())[1]
        bench.swarm.kill_broker()
        bench.swarm.kill(name)
        bench.swarm.start_broker(3)
        bench.swarm.start_worker(name)
