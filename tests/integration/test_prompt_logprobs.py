"""Log probabilities of prompts in real processes: transformers' values, and the same bits however they came about."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm import AsyncClient
from swarm.client.results import Completion
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, stages_of
from tests.model.models import VOCABULARY, load_whole

PROMPT = [(7 * i * i + 11 * i) % (VOCABULARY - 3) + 3 for i in range(300)]
SLOW = "step.computes=stall:0.05@1+"


async def ask(client: AsyncClient, prompt: list[int] = PROMPT, **options: int) -> Completion:
    return await client.generate(prompt, timeout=120, **({"max_tokens": 0, "prompt_logprobs": 3} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Completion:
    """The answer of one worker, to the only request."""

    async def ask_alone(swarm: Processes) -> Completion:
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            return await ask(client)

    with Processes(random_llama, tmp_path_factory.mktemp("alone"), launch=zygote) as swarm:
        swarm.start(1)
        return asyncio.run(ask_alone(swarm))


def test_values_are_transformers_own(random_llama: Path, alone: Completion) -> None:
    import torch

    with torch.inference_mode():
        logits = load_whole(random_llama)(torch.tensor([PROMPT])).logits[0].double()
    expected = torch.log_softmax(logits, -1)
    first, *rows = alone.prompt_logprobs
    assert first == ()
    assert (alone.tokens, alone.finish_reason, alone.usage.num_prompt) == ((), "length", len(PROMPT))
    for position, row in enumerate(rows):
        assert row[0].token == PROMPT[position + 1]
        best = expected[position].topk(3)
        assert [each.token for each in row[1:]] == best.indices.tolist()
        for each in row:
            assert each.logprob == pytest.approx(expected[position, each.token].item(), abs=1e-4)


async def test_bits_in_a_crowd_of_two_stages_with_small_chunks_and_a_cache(
    random_llama: Path, zygote: Zygote, tmp_path: Path, alone: Completion
) -> None:
    """Tokens that were drawn have the same log probabilities as tokens of a prompt that contains them."""
    options = {"SWARM_BROKER__PREFILL_CHUNK": "48"}
    with Processes(random_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            others = [asyncio.ensure_future(client.generate(PROMPT[n:], max_tokens=20, timeout=120)) for n in range(6)]
            crowded = await asyncio.gather(*(ask(client, n=n, max_tokens=n - 1 or 0) for n in (1, 2)))
            await asyncio.gather(*others)
            assert all(each.prompt_logprobs == alone.prompt_logprobs for each in crowded)
            drawn = await ask(client, max_tokens=8, logprobs=3, ignore_eos=True)
            again = await ask(client, [*PROMPT, *drawn.tokens])
            assert again.prompt_logprobs == (*alone.prompt_logprobs, *drawn.logprobs)


@pytest.mark.parametrize("place", [0, -1])
async def test_bits_after_a_stage_is_killed_in_mid_prompt(
    random_llama: Path, zygote: Zygote, tmp_path: Path, alone: Completion, place: int
) -> None:
    options = {"SWARM_BROKER__PREFILL_CHUNK": "16", "SWARM_FAILPOINTS": SLOW}
    with Processes(random_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start(3)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 3)
            asked = asyncio.ensure_future(ask(client, max_tokens=2))
            name = stages_of(await client.query("nodes"))[place]
            begun = lambda report: any(0 < row["num_prompt_computed"] < 200 for row in report["requests"])  # noqa: E731
            await swarm.until(client, "requests", begun)
            swarm.kill(name)
            assert (await asked).prompt_logprobs == alone.prompt_logprobs
