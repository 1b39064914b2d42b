"""With a step per stage in flight, which stages on one machine don't have unless they are told to: the same answers as
with one step at a time, to the last bit, whoever dies. (All of these tests can be run so, see
``docs/explanation/faults.md``.)"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.bench import MODE_VARIABLE, Bench, long


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    return {MODE_VARIABLE: "overlapped"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


async def test_the_same_answers(bench: Bench) -> None:
    """Drawn, with penalties, continuations, beginnings in common. Steps did go out while others were under way, and
    every stage had some of them."""
    await bench.right()
    pipeline = await bench.figures()
    assert pipeline["overlapped_calls"] > pipeline["calls"] / 2
    await bench.swarm.until(
        bench.client, "stats", lambda report: all(s.get("overlapped_calls", 0) > 10 for s in report["stages"].values())
    )


@pytest.mark.parametrize("place", [*long(0), 1], ids=["first", "middle"])
async def test_a_stage_is_killed(bench: Bench, place: int) -> None:
    """With steps in every stage: those behind it finish theirs, and nothing of an old epoch counts."""
    before = await bench.figures()
    async with bench.under_load(warm=60):
        bench.swarm.kill((await bench.order())[place])
    after = await bench.figures()
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1


async def test_a_token_is_drawn_and_nobody_hears_of_it(bench: Bench) -> None:
    """The last stage dies between the answers to two steps."""
    times = len(bench.struck_so_far())
    await bench.arm(-1, "step.sampled=kill@20")
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)


async def test_a_worker_is_stopped_and_wakes(bench: Bench) -> None:
    """It has several steps of an old epoch then."""
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        bench.stop(bench.swarm.workers[name])
        await bench.until_out(name)
        bench.wake()
    await bench.serving()


async def test_the_broker_is_killed(bench: Bench) -> None:
    """Steps that were done wait for the next one, which believes none of them; what all stages hold goes on."""
    async with bench.under_load(warm=60):
        bench.swarm.broker.send_signal(signal.SIGKILL)
        bench.swarm.broker.wait()
        bench.swarm.start_broker(3)
        found = await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)
        assert found.get("replayed_layer_positions", 0) == 0
