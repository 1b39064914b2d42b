"""Workers that are killed while they compute: real processes, random weights, and the same tokens as undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient
from tests.faults.bench import MODE_VARIABLE, Swarm
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, stages_of

PROMPTS = [[3 + (7 * i + j) % 400 for j in range(length)] for i, length in enumerate((5, 40, 90, 150))]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.2},
    {"temperature": 1.1, "top_k": 40, "seed": 13, "n": 2, "logprobs": 2},
]
TOKENS = 200
LATE = 600  # of the 1,000 tokens of all answers: who is killed now may be killed too late
MOST_FROM_TOKENS = 2.5  # times what was lost, where there is no log

Answers = list[list[list[int]]]


@pytest.fixture(scope="module")
def expected(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Ask three workers what they answer when nobody dies."""

    async def undisturbed() -> Answers:
        async with AsyncClient(processes.url, connect_timeout_s=60.0) as client:
            await processes.until_serving(client, 3)
            return await everything(client)

    alone = {MODE_VARIABLE: "batch"}  # one step in flight at a time
    with Swarm(model, tmp_path_factory.mktemp("undisturbed"), zygote, alone) as processes:
        processes.start(3)
        return asyncio.run(undisturbed())


@pytest_asyncio.fixture
async def swarm(model: Path, zygote: Zygote, tmp_path: Path) -> AsyncIterator[tuple[Swarm, AsyncClient]]:
    with Swarm(model, tmp_path, zygote) as processes:
        processes.start(3)
        async with AsyncClient(processes.url, connect_timeout_s=60.0) as client:
            await processes.until_serving(client, 3)
            yield processes, client


async def generate(client: AsyncClient, index: int) -> list[list[int]]:
    done = await client.generate(PROMPTS[index], max_tokens=TOKENS, ignore_eos=True, timeout=120.0, **SAMPLING[index])
    return [list(choice.tokens) for choice in done.choices]


async def everything(client: AsyncClient) -> Answers:
    """Ask everything at once."""
    return await asyncio.gather(*(generate(client, index) for index in range(len(PROMPTS))))


async def under_way(processes: Processes, client: AsyncClient, tokens: int = 120) -> asyncio.Task[Answers]:
    """Ask everything and return in the middle of the answers; ask again if a busy machine let us look too late."""
    for _ in range(5):
        began = await drawn(client)
        enough = began + tokens
        answers = asyncio.create_task(everything(client))
        await processes.until(client, "stats", lambda report, n=enough: report["pipeline"].get("tokens", 0.0) >= n)
        if await drawn(client) < began + LATE:
            return answers
        await answers
    raise AssertionError("the answers were always there before anybody could look")


async def drawn(client: AsyncClient) -> float:
    """How many tokens the swarm has drawn so far."""
    return (await figures(client)).get("tokens", 0.0)


async def order(client: AsyncClient) -> list[str]:
    """The workers' names in the order of the pipeline."""
    return stages_of(await client.query("nodes"))


# Layers that survivors exchange because the cut moves count as lost, too. If the first stage dies, nobody has a log of
# what goes into them, and the tokens go through one layer that was not lost.
@pytest.mark.parametrize(("place", "ratio"), [(0, 1.21), (1, 1.0), (2, 1.0)], ids=["first", "middle", "last"])
async def test_a_killed_worker_costs_nothing_but_time(
    swarm: tuple[Swarm, AsyncClient], expected: Answers, place: int, ratio: float
) -> None:
    """Whichever stage dies in the middle of answers: the same tokens, greedy or drawn, with penalties and two
    continuations of one prompt; and no layer is computed again but those that changed hands."""
    processes, client = swarm
    before = await figures(client)
    name = (await order(client))[place]
    answers = await under_way(processes, client)
    processes.kill(name)
    assert await answers == expected
    after = await figures(client)
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1
    replayed = after["replayed_layer_positions"] - before.get("replayed_layer_positions", 0)
    lost = after["lost_layer_positions"] - before.get("lost_layer_positions", 0)
    assert lost > 0
    # With several steps in flight the plan after a death is made better at once, if the slowest stage gains by it: the
    # layers that move then have no log, and the second continuation of a prompt is a copy, which has none either.
    assert replayed <= lost * (MOST_FROM_TOKENS if processes.is_overlapped else ratio)


async def test_two_deaths_one_after_the_other(swarm: tuple[Processes, AsyncClient], expected: Answers) -> None:
    """The second one falls into the recovery from the first."""
    processes, client = swarm
    names = await order(client)
    answers = await under_way(processes, client)
    processes.kill(names[1])
    processes.kill(names[2])
    assert await answers == expected


async def test_a_worker_that_comes_back(swarm: tuple[Processes, AsyncClient], expected: Answers) -> None:
    """A new process takes the place of the dead one while answers run, and they stay the same."""
    processes, client = swarm
    name = (await order(client))[1]
    answers = await under_way(processes, client, 60)
    processes.kill(name)
    processes.start_worker(name)
    assert await answers == expected
    await processes.until_serving(client, 3)
    assert await everything(client) == expected
