"""Models whose layers keep states between positions, in real processes: deaths, moves, prefixes and crowds change no
token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm import AsyncClient
from swarm.demo import model_path
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from swarm.stage.engine.tiny import VOCABULARY, tiny_config
from swarm.wire.messages import BLOCK, STATE_STRIDE, PlanCommand
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, some_tokens, stages_of
from tests.model.models import load_whole, random_model

KINDS = ("qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.long))
TOKENS = 60
SLOW = "broker.dispatch=stall:0.2@1+"  # while a file exists, copies catch up on any machine
SHORT, LONG = 2 * STATE_STRIDE + 100, 6 * STATE_STRIDE + 100


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(AutoConfig.for_model(request.param))
    config.max_position_embeddings = 2 * LONG
    folder = tmp_path_factory.mktemp(request.param)
    random_model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processes(zygote: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {
        "SWARM_WORKER__DTYPE": "float32",
        "SWARM_BROKER__STEP_TOKENS": "64",  # a prompt takes many steps
        "SWARM_BROKER__PREFILL_CHUNK": "64",
        "SWARM_BROKER__CHECK_RULES": "true",
        "SWARM_WORKER__KV_SHARE": "0.01",
    }
    with Processes(model, tmp_path_factory.mktemp("swarm"), options=options, launch=zygote) as processes:
        processes.start(2)
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until_serving(client, 2)
        yield client


def make_prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def expect(model: Path, prompt: list[int]) -> list[int]:
    """Return transformers' greedy answer."""
    whole = load_whole(model)
    whole.generation_config.eos_token_id = None
    with torch.inference_mode():
        answer = whole.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


async def ask(client: AsyncClient, prompt: list[int], **options: Any) -> list[int]:
    done = await client.generate(
        prompt, **({"max_tokens": TOKENS, "ignore_eos": True, "timeout": 200, "temperature": 0} | options)
    )
    return list(done.tokens)


async def replace(processes: Processes, client: AsyncClient, name: str) -> None:
    """Start a worker in place of a killed one."""
    processes.start_worker(name)
    await processes.until_serving(client, 2)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_death_in_mid_answer_changes_no_token(
    client: AsyncClient, processes: Processes, model: Path, stage: int
) -> None:
    prompt = make_prompt(SHORT, seed=stage)
    asking = asyncio.create_task(ask(client, prompt))
    await some_tokens(processes, client, TOKENS // 3)
    victim = stages_of(await client.query("nodes"))[stage]
    processes.kill(victim)
    assert await asking == expect(model, prompt)
    await replace(processes, client, victim)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_death_within_a_long_prompt_changes_no_token(
    client: AsyncClient, processes: Processes, model: Path, stage: int
) -> None:
    prompt = make_prompt(LONG, seed=10 + stage)
    began = (await figures(client)).get("positions", 0)
    asking = asyncio.create_task(ask(client, prompt))
    await processes.until(client, "stats", lambda report: report["pipeline"].get("positions", 0) > began + LONG // 3)
    assert (await figures(client))["positions"] < began + LONG
    victim = stages_of(await client.query("nodes"))[stage]
    processes.kill(victim)
    assert await asking == expect(model, prompt)
    await replace(processes, client, victim)


async def test_a_prefix_is_reused_up_to_a_state(client: AsyncClient, model: Path) -> None:
    prompt = make_prompt(SHORT, seed=20)
    longer = [*prompt[: SHORT - 20], *make_prompt(50, seed=21)]  # they part behind the last state
    first = await ask(client, prompt)
    before = await figures(client)
    assert await ask(client, prompt) == first == expect(model, prompt)
    assert await ask(client, longer) == expect(model, longer)
    after = await figures(client)
    assert after["prefix_hits"] == before.get("prefix_hits", 0) + 2
    computed = len(prompt) + len(longer) + 2 * (TOKENS - 1) - 2 * (2 * STATE_STRIDE)
    assert after["positions"] == before["positions"] + computed


async def test_the_next_turn_begins_where_the_last_one_ended(client: AsyncClient, model: Path) -> None:
    """Short of the stride, too: at the last whole block."""
    prompt = make_prompt(150, seed=60)
    before = await figures(client)
    answer = await ask(client, prompt)
    turn = [*prompt, *answer, *make_prompt(30, seed=61)]
    assert await ask(client, turn) == expect(model, turn)
    after = await figures(client)
    held = (len(prompt) + TOKENS - 1) // BLOCK * BLOCK
    assert after["positions"] == before["positions"] + len(prompt) + len(turn) - held + 2 * (TOKENS - 1)


async def test_a_crowd_gets_the_tokens_that_each_gets_alone(client: AsyncClient, processes: Processes) -> None:
    """Beside each other, in chunks."""
    kernels = {row["name"]: row["kernels"] for row in (await client.query("nodes"))["workers"]}  # type: ignore[attr-defined]
    assert all(text.endswith(", exact") or ", exact (" in text for text in kernels.values()), kernels
    prompts = [make_prompt(150 + 97 * n, seed=30 + n) for n in range(8)]
    alone = [await ask(client, prompt, temperature=0.8, seed=5) for prompt in prompts]
    assert await asyncio.gather(*(ask(client, prompt, temperature=0.8, seed=5) for prompt in prompts)) == alone


async def test_layers_move_to_another_worker(client: AsyncClient, processes: Processes, model: Path) -> None:
    prompt = make_prompt(SHORT, seed=40)
    processes.start_worker("other")
    await processes.until(client, "nodes", lambda nodes: len(nodes["workers"]) == 3)
    asking = asyncio.create_task(ask(client, prompt))
    await some_tokens(processes, client, TOKENS // 3)
    leaving = stages_of(await client.query("nodes"))[0]
    assert (await client.steer(PlanCommand(verb="drain", worker=leaving)))["state"] == "drained"
    assert await asking == expect(model, prompt)


@pytest.mark.parametrize("way", ["death", "drain"])
async def test_states_are_copied(zygote: Zygote, model: Path, tmp_path: Path, way: str) -> None:
    """A death costs what the copies lack, which is a few blocks, not the way from the last multiple of the stride. A
    worker that is drained gives everything away."""
    prompts = [make_prompt(SHORT - 90 * n, seed=70 + n) for n in range(3)]
    slow = tmp_path / "slow"
    options = {"SWARM_WORKER__DTYPE": "float32", "SWARM_BROKER__PREFIX_CACHE": "false", "SWARM_PLAN__STANDBY": "all"}
    with Processes(model, tmp_path, options=options, launch=zygote) as processes:
        processes.start_broker(2, **{VARIABLE: SLOW, FROM_VARIABLE: str(slow)})
        for name in ("w0", "w1"):
            processes.start_worker(name)
        async with AsyncClient(processes.url, connect_timeout_s=60) as client:
            await processes.until_serving(client, 2)
            await processes.until(client, "nodes", lambda report: all(row["standby"] for row in report["workers"]))
            slow.touch()
            asking = [asyncio.create_task(ask(client, prompt)) for prompt in prompts]
            await some_tokens(processes, client, len(prompts) * TOKENS // 3)
            await processes.until(client, "stats", lambda report: report["kv_copies"]["behind"] == 0)
            victim = stages_of(await client.query("nodes"))[0]
            if way == "death":
                processes.kill(victim)
            else:
                assert (await client.steer(PlanCommand(verb="drain", worker=victim)))["state"] == "drained"
            slow.unlink()
            assert not any(answer.done() for answer in asking)
            assert await asyncio.gather(*asking) == [expect(model, prompt) for prompt in prompts]
            counted = await figures(client)
        again = counted["positions"] - sum(len(prompt) + TOKENS - 1 for prompt in prompts)
        assert again + counted.get("replayed_positions", 0) < len(prompts) * 3 * BLOCK * (way == "death") + 1


async def test_preempted_sequences_get_the_tokens_that_each_gets_alone(
    zygote: Zygote, model: Path, tmp_path: Path
) -> None:
    """Together they become longer than there is memory for, beside their states."""
    options = {
        "SWARM_WORKER__DTYPE": "float32",
        "SWARM_WORKER__KV_SHARE": "0.01",
        "SWARM_BROKER__KV_HEADROOM": "1",
        "SWARM_BROKER__PREFIX_CACHE": "false",
    }
    prompts = [make_prompt(250, seed=50 + n) for n in range(16)]
    with Processes(model, tmp_path, options=options, launch=zygote) as processes:
        processes.start_broker()
        processes.start_worker("w0", "--memory-limit", "1GiB")
        async with AsyncClient(processes.url, connect_timeout_s=60) as client:
            await processes.until_serving(client, 1)
            together = await asyncio.gather(*(ask(client, prompt, max_tokens=150) for prompt in prompts))
            stats = await client.query("stats")
            assert stats["scheduler"]["preemptions"] > 0  # type: ignore[index]
            for prompt, tokens in list(zip(prompts, together, strict=True))[-4:]:  # the youngest gave way
                assert await ask(client, prompt, max_tokens=150) == tokens


async def test_a_draft_model_with_states_is_refused(zygote: Zygote, model: Path, tmp_path: Path) -> None:
    options = {"SWARM_BROKER__DRAFT": str(model), "SWARM_BROKER__SPECULATION": "draft"}
    with Processes(model_path(), tmp_path, options=options, launch=zygote) as processes:
        processes.start_broker()
        async with AsyncClient(processes.url, connect_timeout_s=60) as client:
            report = await processes.until(client, "stats", lambda body: body["draft"]["state"] == "refused")
    assert f"{model.name} keeps states, which can't be rolled back" in report["draft"]["problem"]
