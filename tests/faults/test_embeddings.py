"""Processes die while prompts are embedded: each vector comes once, and has the bits of an undisturbed swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm import AsyncClient
from swarm.params import SamplingParams, VectorKind
from tests.faults.bench import WAIT_S, Bench, Swarm, long

# Several chunks of a prompt each, some with a beginning in common.
LENGTHS = ((1, 700), (2, 330), (3, 90), (1, 500))
PROMPTS = tuple(tuple(3 + (7 * number * j + j * j) % 450 for j in range(length)) for number, length in LENGTHS)
KINDS: tuple[VectorKind, ...] = ("last", "mean")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


async def embed(client: AsyncClient) -> list[bytes]:
    """The vectors of all prompts, of both kinds, computed at the same time."""
    asked = (client.compute_vectors(PROMPTS, SamplingParams(vector=kind), timeout=WAIT_S) for kind in KINDS)
    return [answer.vector for answers in await asyncio.gather(*asked) for answer in answers]


@asynccontextmanager
async def embedding(bench: Bench) -> AsyncIterator[None]:
    """Inside, prompts are embedded again and again, beside answers; all are as before."""
    expected = await embed(bench.client)
    inside = True

    async def repeat() -> list[list[bytes]]:
        found = [await embed(bench.client)]
        while inside:
            found.append(await embed(bench.client))
        return found

    repeated = asyncio.create_task(repeat())
    try:
        async with bench.under_load(cases=(0, 3)):
            yield
            inside = False
            assert all(vectors == expected for vectors in await repeated)
    finally:
        repeated.cancel()


@pytest.mark.parametrize(
    ("place", "fault"),
    [(0, "step.prefill=kill@5"), (-1, "step.prefill=kill@3"), *long((1, "step.prefill=kill@7"))],
)
async def test_a_stage_is_killed_between_chunks(bench: Bench, place: int, fault: str) -> None:
    """The first stage's death leaves the last one alive, whose sums count for nothing in the next epoch."""
    times = len(bench.struck_so_far())
    await bench.arm(place, fault)
    async with embedding(bench):
        await bench.struck(times + 1)


@pytest.mark.parametrize("fault", ["step.sampled=kill@4", *long("step.sent=kill@4")])
async def test_the_last_stage_is_killed_with_a_vector(bench: Bench, fault: str) -> None:
    """It has computed the vector, and has not sent it, or just has."""
    times = len(bench.struck_so_far())
    await bench.arm(-1, fault)
    async with embedding(bench):
        await bench.struck(times + 1)


async def test_the_broker_is_killed(bench: Bench, swarm: Swarm) -> None:
    """Vectors that the journal has are sent again; all others are computed again."""
    async with embedding(bench):
        swarm.kill_broker()
        swarm.start_broker(3)


async def test_a_vector_outlives_the_broker_in_its_journal(bench: Bench, swarm: Swarm) -> None:
    [before] = await bench.client.compute_vectors(PROMPTS[1:2], SamplingParams(vector="mean"), request_id="kept-vector")
    await swarm.restart_broker(bench.client, 3)
    again = await bench.client.look_up("kept-vector")
    assert again.completion is not None
    assert again.completion.vector == before.vector
