"""Deaths with and without copies of keys and values, for each type of weights: the same answers to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swarm.failpoints import FROM_VARIABLE, VARIABLE
from swarm.wire.messages import PlanCommand
from tests.faults.bench import MODE_VARIABLE, SPECULATION_VARIABLE, Answers, Bench, Swarm, long, undisturbed
from tests.faults.zygote import Zygote

WARM = 60  # tokens that are drawn before the first death
# Without proposals, answers run for longer than it takes to copy their keys and values.
LONG_RUNNING: dict[str, Any] = {"warm": WARM, "speculation": "off"}
USED = "kv_copies_used_positions"
# While a file exists, the broker pauses before each step, so that no answer ends between the copies and the death.
SLOW = "broker.dispatch=stall:0.1@1+"


@pytest.fixture(
    scope="module",
    params=["bfloat16 int4", *long("float32 full", "bfloat16 full")],
)
def weights(request: pytest.FixtureRequest) -> dict[str, str]:
    dtype, weights = request.param.split()
    quantized = {} if weights == "full" else {"SWARM_WORKER__WEIGHTS": weights}
    return {"SWARM_WORKER__DTYPE": dtype} | quantized


# Deaths without copies: test_kills has them with plain weights, and long cases here with each type of weights.
@pytest.fixture(scope="module", params=["neighbours", *long("none")], ids=["copies", "no copies"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def options(weights: dict[str, str], policy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    slow = tmp_path_factory.mktemp("slow") / "slow"
    return weights | {"SWARM_PLAN__STANDBY_KV": policy, VARIABLE: SLOW, FROM_VARIABLE: str(slow)}


@contextmanager
def slowed(options: dict[str, str]) -> Iterator[None]:
    """Have the broker pause before each step."""
    slow = Path(options[FROM_VARIABLE])
    slow.touch()
    try:
        yield
    finally:
        slow.unlink()


@pytest.fixture(scope="module")
def expected(model: Path, zygote: Zygote, weights: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of three workers with these weights, without copies or proposals, when nothing happens to them."""
    alone = weights | {MODE_VARIABLE: "batch", SPECULATION_VARIABLE: "off", "SWARM_PLAN__STANDBY_KV": "none"}
    with Swarm(model, tmp_path_factory.mktemp("undisturbed"), zygote, alone) as swarm:
        swarm.start(3)
        return asyncio.run(undisturbed(swarm))


async def until_copied(bench: Bench, policy: str, source: str) -> list[str]:
    """Wait until all layers of this worker have copies of running sequences. Return their holders."""
    if policy == "none":
        return []

    def routes(nodes: dict[str, Any]) -> list[tuple[str, int]]:
        """Holders and the positions that they hold."""
        holders = [(str(row["name"]), row["copies"]["routes"]) for row in nodes["workers"] if row["copies"]]
        return [(name, each["positions"]) for name, found in holders for each in found if each["source"] == source]

    def are_held(nodes: dict[str, Any]) -> bool:
        return bool(routes(nodes)) and all(positions for _, positions in routes(nodes))

    return [name for name, _ in routes(await bench.swarm.until(bench.client, "nodes", are_held))]


@pytest.mark.parametrize("place", [0, 1, -1], ids=["first", "middle", "last"])
async def test_a_stage_is_killed(bench: Bench, options: dict[str, str], policy: str, place: int) -> None:
    """With copies, layers are taken over with keys and values that another worker has computed."""
    before = await bench.figures()
    async with bench.under_load(**LONG_RUNNING):
        name = (await bench.order())[place]
        with slowed(options):
            await until_copied(bench, policy, name)
            bench.swarm.kill(name)
    after = await bench.figures()
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1
    assert (after.get(USED, 0) > before.get(USED, 0)) == (policy != "none")


async def test_a_stage_is_killed_while_tokens_are_proposed(bench: Bench) -> None:
    """Answers that were given before are guessed. Positions of refused tokens are in no copy, or count for nothing."""
    await bench.right()
    async with bench.under_load(warm=WARM):
        bench.swarm.kill((await bench.order())[1])
    assert (await bench.figures())["accepted_tokens"] > 0


async def test_a_worker_and_the_holder_of_its_copies_are_killed(bench: Bench, policy: str) -> None:
    """What neither of them has left is computed again."""
    async with bench.under_load(**LONG_RUNNING):
        names = await bench.order()
        holders = await until_copied(bench, policy, names[1])
        bench.swarm.kill(names[1])
        bench.swarm.kill(holders[0] if holders else names[2])


@pytest.mark.parametrize("place", [1, 0], ids=["the drained one", "another one"])
async def test_a_stage_is_killed_while_layers_move(bench: Bench, policy: str, place: int) -> None:
    """The worker whose layers are being copied dies, or one that is to have them."""
    async with bench.under_load(**LONG_RUNNING):
        names = await bench.order()
        await until_copied(bench, policy, names[1])
        await bench.client.steer(PlanCommand(verb="drain", worker=names[1]))
        bench.swarm.kill(names[place])
    await bench.client.steer(PlanCommand(verb="uncordon", worker=names[1]))
