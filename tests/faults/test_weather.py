"""Messages between stages that come late, twice, in another order, damaged or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarm import AsyncClient
from swarm.failpoints import VARIABLE
from tests.faults.bench import Answers, Bench, Swarm
from tests.faults.proxy import SPEC, Proxy, Weather
from tests.faults.zygote import Zygote


@pytest.fixture(scope="module")
def between(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, Proxy]]:
    """A swarm whose data all go through a proxy."""
    options = {"SWARM_WORKER__DATA_PORTS": "20000-31999", VARIABLE: f"advertise={SPEC},broker.advertise={SPEC}"}
    with Swarm(model, tmp_path_factory.mktemp("weather"), zygote, options) as swarm:

        def pids() -> list[int]:
            return [process.pid for process in (swarm.broker, *swarm.workers.values()) if process is not None]

        with Proxy(pids, seed=5) as proxy:
            swarm.start(3)
            yield swarm, proxy


@pytest_asyncio.fixture
async def bench(between: tuple[Swarm, Proxy], expected: Answers) -> AsyncIterator[Bench]:
    swarm, proxy = between
    async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.make_well()
        proxy.done.clear()
        yield bench
        proxy.weather = Weather()
        await bench.make_well()


@pytest.fixture
def proxy(between: tuple[Swarm, Proxy]) -> Proxy:
    return between[1]


async def test_delay_and_jitter(bench: Bench, proxy: Proxy) -> None:
    """50 ± 20 ms on every hop, beats too: slow, and nobody is out for it."""
    before = await bench.figures()
    proxy.weather = Weather(delay_s=(0.05, 0.02))
    async with bench.under_load(cases=[0, 4], warm=10):
        proxy.weather = Weather(delay_s=(0.005, 0.005))
    after = await bench.figures()
    assert after.get("workers_lost", 0) == before.get("workers_lost", 0)


async def test_messages_come_twice(bench: Bench, proxy: Proxy) -> None:
    """Every fifth, at once or later: counted, dropped, and no reason for anything."""
    before = await bench.figures()
    proxy.weather = Weather(repeat=0.2)
    await bench.right()
    after = await bench.figures()
    assert proxy.done["repeated"] > 20
    assert after.get("workers_lost", 0) == before.get("workers_lost", 0)
    assert after["plans"] == before["plans"]


async def test_messages_overtake_each_other(bench: Bench, proxy: Proxy) -> None:
    """Every tenth comes 20 ms later than it was sent."""
    proxy.weather = Weather(reorder=0.1, delay_s=(0.002, 0.002))
    await bench.right([0, 3, 4])
    assert proxy.done["reordered"] > 10


@pytest.mark.parametrize("harm", ["flip", "cut"])
async def test_messages_are_damaged(bench: Bench, proxy: Proxy, harm: str) -> None:
    """A bit of a header or a tensor is another one, or its end is missing: it is never used. What was lost that way is
    done again."""
    proxy.weather = Weather(flip=0.01) if harm == "flip" else Weather(cut=0.01)
    await bench.right([0, 3, 4])
    assert proxy.done["flipped" if harm == "flip" else "cut"] > 0


async def test_messages_are_lost(bench: Bench, proxy: Proxy) -> None:
    """One in a hundred, as if a connection had broken with it under way."""
    proxy.weather = Weather(lose=0.01)
    await bench.right([0, 1, 3, 4])
    assert proxy.done["lost"] > 0
    proxy.weather = Weather()
    await bench.serving()


async def test_a_death_in_bad_weather(bench: Bench, proxy: Proxy) -> None:
    """Messages come late and twice while a stage dies and is made up for: those of the old epoch are not used."""
    async with bench.under_load(cases=[0, 1, 4], warm=30):
        proxy.weather = Weather(delay_s=(0.005, 0.005), repeat=0.1)
        name = (await bench.order())[1]
        bench.swarm.start_again(name)
