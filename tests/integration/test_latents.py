"""A model with multi-head latent attention in real processes: its latents are reused, and a death changes no token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, some_tokens, stages_of
from tests.model.models import load_whole, named_config, random_model

SHARED = [(11 * at) % 240 + 3 for at in range(330)]
NUM_NEW = 40


def expect(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' greedy answers."""
    import torch

    whole = load_whole(folder)
    whole.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            answer = whole.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


async def test_a_prefix_is_reused_and_a_death_changes_no_token(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model(named_config("deepseek_v3")).save_pretrained(folder)
    prompts = [[*SHARED, 5, 6], [*SHARED, 7], *([3 + number] * 50 for number in range(3))]
    expected = expect(folder, prompts)
    options = {"SWARM_WORKER__DTYPE": "float32", "SWARM_BROKER__CHECK_RULES": "true"}
    with Processes(folder, tmp_path, options=options, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)

            async def ask(prompt: list[int]) -> tuple[list[int], int]:
                done = await client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True, temperature=0, timeout=100)
                return list(done.tokens), done.usage.num_cached

            assert [await ask(prompt) for prompt in prompts[:2]] == [(expected[0], 0), (expected[1], 320)]
            asking = asyncio.gather(*map(ask, prompts))
            await some_tokens(swarm, client, NUM_NEW)
            swarm.kill(stages_of(await client.query("nodes"))[1])
            swarm.start_worker("other")
            assert [tokens for tokens, _ in await asking] == expected
            await swarm.until_serving(client, 2)
            assert (await figures(client))["workers_lost"] == 1
