"""Keys and values on disk outlive all processes: after a restart of everything, a long prompt is not computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.model.models import VOCABULARY

PROMPT = [(11 * n + n // 7) % (VOCABULARY - 3) + 3 for n in range(900)]
CHUNKS = 3  # whole ones in the prompt, of 256 positions
TOKENS = 40


class Spilling(Processes):
    """A swarm whose workers write to one folder, sequences of 512 positions and more."""

    def __init__(self, model: Path, folder: Path, zygote: Zygote, **options: str) -> None:
        self.cache = folder / "cache"
        own = {
            "SWARM_CACHE": str(self.cache),
            "SWARM_WORKER__SPILL": "64MiB",
            "SWARM_WORKER__SPILL_FROM": "512",
        }
        super().__init__(model, folder, launch=zygote, options=own | options)

    def files(self) -> list[Path]:
        return sorted((self.cache / "kv").glob("*/*/[0-9]*"))

    def kill_all(self) -> None:
        for name in [*self.workers]:
            self.kill(name)
        self.broker.kill()
        self.broker.wait()

    async def until_written(self, client: AsyncClient, num_files: int) -> None:
        await self.until(client, "nodes", lambda _: len(self.files()) >= num_files)


async def ask(client: AsyncClient, prompt: list[int] = PROMPT) -> Any:
    answer = await client.generate(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0, timeout=60)
    return answer.tokens, answer.logprobs


async def counters(client: AsyncClient) -> dict[str, float]:
    pipeline: Any = (await client.query("stats"))["pipeline"]
    return dict(pipeline)


async def test_a_prompt_is_not_computed_twice_though_all_processes_died(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    with Spilling(random_llama, tmp_path, zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            expected = await ask(client)
            await swarm.until_written(client, 8 * CHUNKS)
        swarm.kill_all()
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            assert await ask(client) == expected
            figures = await counters(client)
            assert figures["restored_positions"] == 256 * CHUNKS
            assert figures["positions"] < len(PROMPT) + TOKENS - 256 * CHUNKS
