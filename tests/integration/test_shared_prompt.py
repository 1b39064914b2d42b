"""Many continuations of a long prompt run side by side in memory for three of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.stage.attention.sharing import can_share
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.model.models import llama_config

pytestmark = pytest.mark.skipif(not can_share(), reason="this system can't map one file at several addresses")

PROMPT = [5 + n * 7 % 240 for n in range(2000)]
CONTINUATIONS, TOKENS, BEFORE_LOSS = 8, 60, 20
POSITION_BYTES = 4 * 2 * 2 * 64 * 4  # of a stage's four layers: keys and values, two heads of 64 numbers
MEMORY = 1600 << 20  # for keys and values, without what the process takes itself
KV_SHARE = 3 * (len(PROMPT) + TOKENS) * POSITION_BYTES / MEMORY


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("long")
    LlamaForCausalLM(llama_config(max_position_embeddings=2560, head_dim=64)).save_pretrained(folder)
    return folder


async def test_continuations_share_their_prompt_before_and_after_a_loss(
    long_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """All eight run at once, also after a stage is lost in the middle. Their tokens are those of an undisturbed run,
    and no stage uses more than its memory."""
    options = {"SWARM_WORKER__KV_SHARE": str(KV_SHARE), "SWARM_PLAN__STANDBY": "none"}
    with Processes(long_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start(3)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until(client, "status", lambda status: status["state"] == "serving")
            expected, most, _ = await _run(swarm, client, None)
            assert most == CONTINUATIONS
            doomed = (await client.query("plan"))["stages"][1]["worker"]  # type: ignore[index]
            got, most, after = await _run(swarm, client, doomed)
            assert got == expected
            assert (most, after) == (CONTINUATIONS, CONTINUATIONS)


async def _run(swarm: Processes, client: AsyncClient, doomed: str | None) -> tuple[Any, int, int]:
    """Return the tokens, and how many sequences ran at once: at most, and at most in the last plan."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "n": CONTINUATIONS, "seed": 3, "temperature": 1.0}
    options["speculation"] = "off"  # the second run's answers would be guessed, and over at the loss
    num, most = 0, dict[int, int]()  # by epoch
    watching = asyncio.create_task(_watch(client, most))
    try:
        async with client.stream(PROMPT, ignore_eos=True, timeout=240, **options) as pieces:
            async for _ in pieces:
                num += 1
                if doomed is not None and num == CONTINUATIONS * BEFORE_LOSS:
                    swarm.kill(doomed)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching  # raises what was wrong
    assert pieces.completion is not None
    return [choice.tokens for choice in pieces.completion.choices], max(most.values()), most[max(most)]


async def _watch(client: AsyncClient, most: dict[int, int]) -> None:
    """Record how many sequences run, apart from the stream, which may be behind."""
    while True:
        status: Any = await client.query("status")
        if status["state"] == "serving":
            most[status["epoch"]] = max(most.get(status["epoch"], 0), status["num_running"])
        await _check_memory(client)
        await asyncio.sleep(0.01)


async def _check_memory(client: AsyncClient) -> None:
    scheduler = (await client.query("stats"))["scheduler"]
    used = scheduler["kv_used"] + scheduler["kv_cached"]  # type: ignore[index,operator]
    if scheduler["kv_capacity"]:  # type: ignore[index]
        assert used <= scheduler["kv_capacity"]  # type: ignore[index,operator]
    for worker in (await client.query("nodes"))["workers"]:  # type: ignore[attr-defined]
        assert worker["kv_used"] <= worker["kv_capacity"]
