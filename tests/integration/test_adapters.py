"""A swarm with adapters: requests name them as models, and a death changes no token of any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import swarm.demo
from swarm import AsyncClient
from swarm.errors import InvalidRequest
from tests.faults.zygote import Zygote
from tests.integration.gateway import request, status
from tests.integration.http_swarm import gateway
from tests.integration.processes import Processes, figures, some_tokens, stages_of
from tests.model.adapters import make_adapter

DEMO = Path(swarm.demo.__file__).parent / "village"
PROMPT = "Once upon a time there was a teacher called Clara who lived next to the school. " * 3 + "One day"
NAMES = ("", "red", "blue")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "red": make_adapter(folder / "red", DEMO, seed=1, r=8, size=0.12),
        "blue": make_adapter(folder / "blue", DEMO, seed=2, targets=("q_proj", "v_proj", "down_proj"), size=0.2),
    }


def as_setting(adapters: Mapping[str, Path]) -> str:
    return json.dumps([f"{name}={folder}" for name, folder in adapters.items()])


@pytest.fixture(scope="module")
def processes(
    zygote: Zygote, adapters: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    logs = tmp_path_factory.mktemp("swarm")
    options = {"SWARM_WORKER__ADAPTERS": as_setting(adapters), "SWARM_STATE_DIR": str(logs / "state")}
    with Processes(DEMO, logs, options=options, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until_serving(client, 3)
        yield client


async def answer(client: AsyncClient, adapter: str) -> tuple[int, ...]:
    done = await client.generate(PROMPT, max_tokens=40, adapter=adapter, ignore_eos=True)
    return tuple(done.choices[0].tokens)


async def test_a_prefix_of_another_adapter_is_not_reused(client: AsyncClient) -> None:
    """Each answer is its own, although all have one prompt, and each repetition starts from its own prefix."""
    first = [await answer(client, name) for name in NAMES]
    assert len(set(first)) == 3
    before = await figures(client)
    assert await asyncio.gather(*(answer(client, name) for name in NAMES)) == first
    after = await figures(client)
    assert after["prefix_hits"] - before.get("prefix_hits", 0) == 3


async def test_an_unknown_adapter_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"there is no adapter 'green': village has blue, red"):
        await answer(client, "green")


async def test_the_gateway_names_adapters_as_models(client: AsyncClient, processes: Processes, tmp_path: Path) -> None:
    with gateway(processes.url, tmp_path / "gateway.log") as url:

        def ask(model: str) -> Any:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            return json.loads(request(f"{url}/v1/completions", body)[2])

        models = {each["id"]: each for each in json.loads(request(f"{url}/v1/models")[2])["data"]}
        assert {name: each["parent"] for name, each in models.items()} == {
            "village": None,
            "red": "village",
            "blue": "village",
        }
        texts = {name: ask(name or "village") for name in NAMES}
        assert [texts[name]["model"] for name in NAMES] == ["village", "red", "blue"]
        for name in NAMES:
            text = (await client.generate(PROMPT, max_tokens=40, adapter=name, ignore_eos=True)).text
            assert texts[name]["choices"][0]["text"] == text
        assert status(f"{url}/v1/models/red") == 200
        assert status(f"{url}/v1/models/green") == 404


async def test_a_worker_with_other_adapters_is_refused(
    client: AsyncClient, processes: Processes, adapters: Mapping[str, Path]
) -> None:
    processes.start_worker("stranger", SWARM_WORKER__ADAPTERS=as_setting({**adapters, "red": adapters["blue"]}))
    await asyncio.to_thread(processes.workers.pop("stranger").wait, 60)
    assert "this swarm serves another model: adapters: red differ in size or content" in processes.log("stranger")


async def test_a_death_changes_no_token(client: AsyncClient, processes: Processes) -> None:
    """Answers with unlike adapters are under way when a worker is killed; another takes its layers, with the parts of
    the adapters that belong to them."""
    right = [await answer(client, name) for name in NAMES]
    asking = [asyncio.create_task(answer(client, name)) for name in NAMES * 2]
    await some_tokens(processes, client, 20)
    processes.kill(stages_of(await client.query("nodes"))[1])
    assert await asyncio.gather(*asking) == right * 2
