"""A swarm with a draft model: the same tokens and log probabilities as without, whatever becomes of its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import swarm.demo
from swarm import AsyncClient
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from tests.faults.zygote import Zygote
from tests.integration.processes import START_S, Processes, figures

DEMO = Path(swarm.demo.__file__).parent / "village"
PROMPTS = ("One day, a little frog named Tim saw a big red ball.", "The old woman had a cat. The cat", "Once")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.1},
    "n": {"temperature": 0.7, "seed": 6, "n": 2},
}
NOISE = 0.05  # of the draft model's weights: it agrees with the swarm's model about a part of the tokens
# While a file exists, steps take so long that proposals pay, however busy the machine is.
SLOW = "step.computes=stall:0.03@1+"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft model: the demo model with noise."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(DEMO, folder)
    chance = torch.Generator().manual_seed(4)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=chance) * tensor.float().std() * NOISE
        tensors[name] = (tensor.float() + noise).to(tensor.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def processes(zygote: Zygote, draft: Path, tmp_path: Path) -> Iterator[Processes]:
    own = shutil.copytree(draft, tmp_path / "draft")
    options = {
        "SWARM_BROKER__DRAFT": str(own),
        "SWARM_BROKER__CHECK_RULES": "true",
        "SWARM_BROKER__SPECULATION": "draft",
    }
    with Processes(DEMO, tmp_path, options=options, launch=zygote) as processes:
        processes.start_broker(2)
        for name in ("w0", "w1"):
            processes.start_worker(name, **{VARIABLE: SLOW, FROM_VARIABLE: str(tmp_path / "slow")})
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until_serving(client, 2)
        yield client


def draft_process(processes: Processes) -> psutil.Process:
    """The broker's child with the draft model."""
    (child,) = [c for c in psutil.Process(processes.broker.pid).children() if "swarm.cli.draft" in c.cmdline()]
    return child


async def until_draft(processes: Processes, client: AsyncClient, state: str) -> dict[str, Any]:
    report = await processes.until(client, "stats", lambda body: body["draft"]["state"] == state, START_S)
    return report["draft"]


async def answers(client: AsyncClient, max_tokens: int = 60, **options: Any) -> list[Any]:
    """Tokens and log probabilities of all prompts, computed at once."""
    options = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2, "timeout": 120.0} | options
    done = await asyncio.gather(*(client.generate(prompt, **options) for prompt in PROMPTS))
    return [[(choice.text, choice.tokens, choice.logprobs) for choice in each.choices] for each in done]


async def check_clean(client: AsyncClient) -> dict[str, float]:
    """Return the counters of a swarm whose rules hold and whose steps raised nothing."""
    counters = await figures(client)
    assert not counters.get("rules_broken")
    assert not counters.get("misplaced_tokens")
    assert not counters.get("draft_errors")
    return counters


async def test_answers_are_the_same_with_and_without(processes: Processes, client: AsyncClient, tmp_path: Path) -> None:
    await until_draft(processes, client, "ready")
    (tmp_path / "slow").touch()
    for options in OPTIONS.values():
        plain = await answers(client, speculation="off", **options)
        before = await figures(client)
        assert await answers(client, **options) == plain
        after = await check_clean(client)
        assert after["draft_requests"] > before.get("draft_requests", 0)
        accepted, proposed = (after[n] - before.get(n, 0) for n in ("accepted_tokens", "proposed_tokens"))
        assert 0 < accepted < proposed


async def test_a_killed_draft_process_disturbs_no_answer_and_comes_back(
    processes: Processes, client: AsyncClient, tmp_path: Path
) -> None:
    """Killed again and again in mid-answer; answers with a stopped one go on without it."""
    plain = await answers(client, 300, speculation="off")
    await until_draft(processes, client, "ready")
    for losses, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        before = (await figures(client)).get("tokens", 0.0)
        running = asyncio.create_task(answers(client, 300))
        await processes.until(client, "stats", lambda body, before=before: body["pipeline"]["tokens"] > before + 60)
        process = draft_process(processes)
        process.send_signal(number)
        assert await running == plain
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        await processes.until(
            client, "stats", lambda body, losses=losses: body["pipeline"].get("draft_losses", 0) == losses
        )
        await until_draft(processes, client, "ready")
    counters = await check_clean(client)
    assert counters["draft_losses"] == 2
    before = counters["accepted_tokens"]
    (tmp_path / "slow").touch()
    assert await answers(client, 300) == plain
    assert (await figures(client))["accepted_tokens"] > before


async def test_a_draft_model_that_is_replaced_by_one_with_another_vocabulary_is_refused(
    processes: Processes, client: AsyncClient, tmp_path: Path
) -> None:
    plain = await answers(client, speculation="off")
    await until_draft(processes, client, "ready")
    tokenizer = tmp_path / "draft" / "tokenizer.json"
    body = json.loads(tokenizer.read_text())
    words = body["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[-2:]
    words[first], words[second] = words[second], words[first]
    tokenizer.write_text(json.dumps(body))
    draft_process(processes).kill()
    await processes.until(client, "stats", lambda body: body["pipeline"].get("draft_starts", 0) == 2)
    assert await answers(client) == plain
    report = await until_draft(processes, client, "refused")
    assert "another vocabulary" in report["problem"]
    assert await answers(client) == plain
    assert not [c for c in psutil.Process(processes.broker.pid).children() if "swarm.cli.draft" in c.cmdline()]
    assert processes.log("broker").count("draft_model_refused") == 1
    await check_clean(client)


async def test_the_process_ends_with_the_broker_even_if_both_hang(processes: Processes, client: AsyncClient) -> None:
    await until_draft(processes, client, "ready")
    process = draft_process(processes)
    process.suspend()
    processes.broker.kill()
    processes.broker.wait()
    gone, _ = psutil.wait_procs([process], timeout=10.0)
    assert gone == [process]


async def test_an_unusable_draft_model_costs_one_error(zygote: Zygote, tmp_path: Path) -> None:
    options = {"SWARM_BROKER__DRAFT": str(tmp_path / "none")}
    with Processes(DEMO, tmp_path, options=options, launch=zygote) as processes:
        processes.start(1)
        async with AsyncClient(processes.url, connect_timeout_s=60) as client:
            await processes.until_serving(client, 1)
            report = await until_draft(processes, client, "refused")
            assert "none" in report["problem"]
            await client.generate(PROMPTS[0], max_tokens=5)
        assert processes.log("broker").count("draft_model_unusable") == 1
