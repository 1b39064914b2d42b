"""The prefix cache in real processes: time is saved, tokens are the same."""

from __future__ import annotations

from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.model.models import VOCABULARY, load_whole

SHARED = [(11 * i) % (VOCABULARY - 3) + 3 for i in range(330)]


async def test_who_begins_alike_starts_from_a_copy_and_gets_the_same_tokens(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """The second request computes only what the first did not; so does a follow-up that goes on from the answer. All
    get the tokens of the whole model in one process."""
    import torch

    whole = load_whole(random_llama)

    def expected(prompt: list[int]) -> list[int]:
        mask = torch.ones(1, len(prompt))
        answer = whole.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=40, do_sample=False)
        return list(answer[0, len(prompt) :].tolist())

    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            first = await client.generate([*SHARED, 5, 6], max_tokens=40, timeout=60)
            assert list(first.tokens) == expected([*SHARED, 5, 6])

            second = await client.generate([*SHARED, 7], max_tokens=40, timeout=60)
            assert list(second.tokens) == expected([*SHARED, 7])

            follow_up = [*SHARED, 5, 6, *first.tokens, 9]
            third = await client.generate(follow_up, max_tokens=40, timeout=60)
            assert list(third.tokens) == expected(follow_up)
            assert [each.usage.num_cached for each in (first, second, third)] == [0, 320, 352]

            pipeline = (await client.query("stats"))["pipeline"]
            assert pipeline["prefix_hits"] == 2  # type: ignore[index]
            assert pipeline["prefix_positions"] == 320 + 352  # type: ignore[index]
