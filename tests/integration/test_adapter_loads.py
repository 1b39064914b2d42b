"""Adapters that are loaded and dropped while a swarm answers: by every process, through deaths and restarts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import swarm.demo
from swarm import AsyncClient
from swarm.ctl.main import run as swarmctl
from swarm.errors import InvalidRequest, RequestFailed
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, some_tokens, stages_of
from tests.model.adapters import make_adapter

DEMO = Path(swarm.demo.__file__).parent / "village"
PROMPT = "Once upon a time there was a teacher called Clara who lived next to the school. " * 3 + "One day"


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "red", DEMO, seed=1, r=8, size=0.12)


@pytest.fixture(scope="module")
def processes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    logs = tmp_path_factory.mktemp("swarm")
    with Processes(DEMO, logs, options={"SWARM_STATE_DIR": str(logs / "state")}, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until(client, "status", lambda status: status["state"] == "serving")
        yield client


async def answer(client: AsyncClient, adapter: str) -> tuple[int, ...]:
    done = await client.generate(PROMPT, max_tokens=40, adapter=adapter, ignore_eos=True)
    return tuple(done.choices[0].tokens)


async def test_an_adapter_comes_and_goes_while_others_are_answered(
    client: AsyncClient, processes: Processes, red: Path, tmp_path: Path
) -> None:
    """Loaded under load; kept through the deaths of a worker and of the broker, and by a worker that joins later."""
    plain = await answer(client, "")
    asking = [asyncio.create_task(answer(client, "")) for _ in range(4)]
    await some_tokens(processes, client, 20)
    body = await client.load_adapter("red", str(red))
    assert (body["adapter"], body["state"]) == ("red", "loaded")
    right = await answer(client, "red")
    assert right != plain
    assert await asyncio.gather(*asking) == [plain] * 4

    asking = [asyncio.create_task(answer(client, name)) for name in ("red", "") * 2]
    await some_tokens(processes, client, 20)
    processes.kill(stages_of(await client.query("nodes"))[1])
    assert await asyncio.gather(*asking) == [right, plain] * 2

    asking = [asyncio.create_task(answer(client, name)) for name in ("red", "") * 2]
    await some_tokens(processes, client, 20)
    await processes.restart_broker(client, 2)
    assert await asyncio.gather(*asking) == [right, plain] * 2
    processes.start_worker("later")
    await processes.until(client, "nodes", lambda nodes: "later" in [row["name"] for row in nodes["workers"]])
    assert await answer(client, "red") == right

    asking = [asyncio.create_task(answer(client, "red")) for _ in range(2)]
    await some_tokens(processes, client, 5)
    assert (await client.drop_adapter("red"))["state"] == "dropping"
    with pytest.raises(InvalidRequest, match="there is no adapter 'red'"):
        await answer(client, "red")
    assert await asyncio.gather(*asking) == [right] * 2
    for _ in range(100):
        if not (await client.adapters())["adapters"]:
            break
        await asyncio.sleep(0.1)
    assert (await client.adapters())["adapters"] == []
    assert await answer(client, "") == plain


async def test_a_load_that_one_worker_refuses_changes_nothing(
    client: AsyncClient, processes: Processes, tmp_path: Path
) -> None:
    """Neither the answers nor the workers: of no adapter, and of one without finite weights."""
    plain = await answer(client, "")
    workers = {row["name"] for row in (await client.query("nodes"))["workers"]}
    with pytest.raises(RequestFailed, match=r"red was not loaded: worker \S+: .*adapter_config\.json is missing"):
        await client.load_adapter("red", str(tmp_path))
    diverged = make_adapter(tmp_path / "diverged", DEMO, seed=1, size=math.inf)
    with pytest.raises(RequestFailed, match=r"red was not loaded: worker \S+: .* has NaN or infinite values in "):
        await client.load_adapter("red", str(diverged))
    assert {row["name"] for row in (await client.query("nodes"))["workers"]} == workers
    assert (await client.adapters())["adapters"] == []
    assert await answer(client, "") == plain


async def test_the_command_line_lists_loads_and_drops(
    client: AsyncClient, processes: Processes, red: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = swarmctl(["--url", processes.url, "adapters", *arguments])
        return code, capsys.readouterr().out

    assert await asyncio.to_thread(run) == (0, "no adapters\n")
    assert "loaded" in (await asyncio.to_thread(run, "load", "blue", str(red)))[1]
    (row,) = json.loads((await asyncio.to_thread(run, "--json"))[1])["adapters"]
    assert (row["adapter"], row["source"], row["state"], row["requests"]) == ("blue", str(red), "loaded", 0)
    assert (await asyncio.to_thread(run, "drop", "blue"))[0] == 0
    assert (await asyncio.to_thread(run, "load", "a b", str(red)))[0] == 2
