"""Keys and values on disk outlive all processes: after a restart of everything, a long prompt is not computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def has_spilled(stage: dict[str, float]) -> bool:
    """Whether a stage's figures tell of chunks that it has written, and of two that it has read."""
    is_read = stage.get("spill_positions_restored") == 512 and stage["spill_chunks_read"] >= 2
    return is_read and stage["spill_chunks_written"] >= CHUNKS and stage["spill_bytes"] > 0


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


async def write(swarm: Spilling, num_workers: int = 1) -> Any:
    """A swarm serves the prompt and has it written; then all of it dies. The answer."""
    swarm.start(num_workers)
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, num_workers)
        expected = await ask(client)
        await swarm.until_written(client, 8 * CHUNKS)
    swarm.kill_all()
    return expected


async def read(swarm: Spilling, num_workers: int = 1) -> tuple[Any, dict[str, float]]:
    """The swarm is started again, and asked the same. The answer, and the broker's counters."""
    swarm.start(num_workers)
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, num_workers)
        return await ask(client), await counters(client)


async def test_another_cut_finds_what_it_needs(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """Layers are stored one by one, and both workers share the folder."""
    with Spilling(random_llama, tmp_path, zygote) as swarm:
        expected = await write(swarm, 2)
        got, figures = await read(swarm, 1)
        assert got == expected
        assert figures["restored_positions"] == 256 * CHUNKS
        swarm.kill_all()
        got, figures = await read(swarm, 2)
        assert got == expected
        assert figures["restored_positions"] == 256 * CHUNKS
        for name in ("w0", "w1"):
            assert "kv_not_spilled" not in swarm.log(name)


async def test_a_request_in_flight_goes_on(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """From the journal and the disk: its prompt is read, and only what was not written is computed again."""
    slow = {"SWARM_FAILPOINTS": "step.computes=stall:0.03@1+"}  # the answer lasts until its prompt is written
    with Spilling(random_llama, tmp_path, zygote, SWARM_STATE_DIR=str(tmp_path / "state"), **slow) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            expected = await ask(client)
            await swarm.until_written(client, 8 * CHUNKS)
        for path in swarm.files():
            path.unlink()
        # long enough that chunks are written meanwhile, and without a fourth one
        num, options = 0, {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        async with (
            AsyncClient(swarm.url, connect_timeout_s=60) as client,
            client.stream([99, *PROMPT[1:]], timeout=120, **options) as pieces,
        ):
            async for _ in pieces:
                num += 1
                if num == 5:
                    await swarm.until_written(client, 8 * CHUNKS)
                    swarm.kill_all()
                    swarm.start(1)
            assert pieces.completion is not None
            broken = pieces.completion
            figures = await counters(client)
            assert figures["restored_positions"] == 256 * CHUNKS
            whole = await client.generate([99, *PROMPT[1:]], timeout=60, **options)
            assert (broken.tokens, broken.logprobs) == (whole.tokens, whole.logprobs) != expected


async def test_a_request_in_flight_goes_on_although_all_workers_are_killed(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """The broker lives. Two new workers read the prompt that the killed ones have written."""
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    with Spilling(random_llama, tmp_path, zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            num = 0
            async with client.stream(PROMPT, timeout=120, **options) as pieces:
                async for _ in pieces:
                    num += 1
                    if num == 5:
                        await swarm.until_written(client, 8 * CHUNKS)
                        for name in [*swarm.workers]:
                            swarm.kill(name)
                        for name in ("w0", "w1"):
                            swarm.start_worker(name)
                assert pieces.completion is not None
                broken = pieces.completion
            assert (await counters(client))["restored_positions"] == 256 * CHUNKS
        swarm.kill_all()
        for path in swarm.files():
            path.unlink()
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            whole = await client.generate(PROMPT, timeout=60, **options)
            assert (await counters(client))["restored_positions"] == 0
        assert (broken.tokens, broken.logprobs) == (whole.tokens, whole.logprobs)


async def test_a_damaged_file_costs_the_chunks_from_there_on(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    with Spilling(random_llama, tmp_path, zygote) as swarm:
        expected = await write(swarm)
        (doomed,) = (path for path in swarm.files() if path.name.startswith("00001-") and path.name.endswith("-3"))
        content = bytearray(doomed.read_bytes())
        content[len(content) // 2] ^= 1
        doomed.write_bytes(content)
        got, figures = await read(swarm)
        assert got == expected
        assert figures["restored_positions"] == 256


async def test_files_of_another_model_are_not_used(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """The same tokens and sizes, other weights: the folder holds both."""
    from tests.model.models import llama_config, random_model

    with Spilling(random_llama, tmp_path, zygote) as swarm:
        expected = await write(swarm)
        other = tmp_path / "other"
        random_model(llama_config(), seed=77).save_pretrained(other)
        swarm.model = other
        got, figures = await read(swarm)
        assert got != expected
        assert figures["restored_positions"] == 0
        swarm.kill_all()
        swarm.model = random_llama
        got, figures = await read(swarm)
        assert (got, figures["restored_positions"]) == (expected, 256 * CHUNKS)


async def test_a_disk_without_space_costs_only_the_files(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """Here the folder's place is taken by a file, which nothing can be written into."""
    with Spilling(random_llama, tmp_path, zygote) as swarm:
        swarm.cache.mkdir()
        (swarm.cache / "kv").write_text("in the way")
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            first = await ask(client)
            await swarm.until(client, "nodes", lambda _: "kv_not_spilled" in swarm.log("w0"))
            assert await ask(client) == first
            assert (await counters(client))["restored_positions"] == 0


@pytest.mark.parametrize(
    "options",
    [{"SWARM_WORKER__DTYPE": "bfloat16"}, {"SWARM_WORKER__WEIGHTS": "int4"}],
    ids=["bfloat16", "int4"],
)
async def test_bits_are_equal_with(random_llama: Path, zygote: Zygote, tmp_path: Path, options: dict[str, str]) -> None:
    with Spilling(random_llama, tmp_path, zygote, **options) as swarm:
        expected = await write(swarm, 2)
        got, figures = await read(swarm, 1)
        assert got == expected
        assert figures["restored_positions"] == 256 * CHUNKS


async def test_a_new_request_that_begins_alike_need_not_compute_it(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """After an eviction from the prefix cache, too: here there is none."""
    with Spilling(random_llama, tmp_path, zygote, SWARM_BROKER__PREFIX_CACHE="false") as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            longer = [*PROMPT[:600], *(5 + n % 50 for n in range(300))]
            await ask(client)
            await swarm.until_written(client, 8 * CHUNKS)
            begins_alike = await ask(client, longer)
            assert (await counters(client))["restored_positions"] == 512
            await swarm.until(client, "stats", lambda report: all(map(has_spilled, report["stages"].values())))
        swarm.kill_all()
        for path in swarm.files():
            path.unlink()
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            assert await ask(client, longer) == begins_alike
            assert (await counters(client))["restored_positions"] == 0
