"""Shared by tests of real faults: a model, a process that forks others, the answers of an undisturbed swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarm import AsyncClient
from tests.faults.bench import IS_ON_HOSTS, MODE_VARIABLE, SPECULATION_VARIABLE, Answers, Bench, Swarm, undisturbed
from tests.faults.machines import machines
from tests.faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("model")) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def model(zygote: Zygote) -> Path:
    """Eight layers with weights of high entropy: what goes wrong shows at once."""
    return zygote.model


@pytest.fixture(scope="session")
def expected(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Ask three workers what they answer when nothing happens to them, with one step in flight at a time and nothing
    proposed."""
    alone = {MODE_VARIABLE: "batch", SPECULATION_VARIABLE: "off"}
    with Swarm(model, tmp_path_factory.mktemp("undisturbed"), zygote, alone) as swarm:
        swarm.start(3)
        return asyncio.run(undisturbed(swarm))


@pytest.fixture(scope="module")
def state() -> Path | None:
    """Say where the broker keeps its journal. A module that wants one has its own fixture of this name."""
    return None


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """Settings of the swarm, as variables. A module that wants some has its own fixture of this name."""
    return {}


@pytest.fixture(scope="module")
def swarm(
    model: Path, zygote: Zygote, state: Path | None, options: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Swarm]:
    """A broker and three workers, for all tests of a module: each finds them well."""
    if IS_ON_HOSTS:
        with machines(model, tmp_path_factory.mktemp("hosts"), zygote, options) as swarm:
            yield swarm
        return
    with Swarm(model, tmp_path_factory.mktemp("swarm"), zygote, options, state=state) as swarm:
        swarm.start(3)
        yield swarm


@pytest_asyncio.fixture
async def bench(swarm: Swarm, expected: Answers) -> AsyncIterator[Bench]:
    """A patient client of the module's swarm, with three fresh or well workers; and at the end it is as before:
    requests have ended, nothing is left behind, three workers serve again."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.make_well()
        yield bench
        await bench.make_well()
