"""Unlike kernels in one swarm: with portable bits nobody can tell which computed; with others, the plan says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.params import SpeculationMode
from swarm.stage import native
from swarm.stage.native.variant_choice import PORTABLE
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

OPENED = native.library()
HERE = [] if OPENED is None else native.variants(OPENED)
FAMILY = [name for name in HERE if name in PORTABLE]
PROMPTS = [[3 + (7 * i + j) % 400 for j in range(length)] for i, length in enumerate((5, 40, 150))]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "seed": 11, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.2, "logprobs": 0},
]
TOKENS = 150
DTYPES = ("float32", "bfloat16")

needs_two = pytest.mark.skipif(len(FAMILY) < 2, reason=f"kernels of the portable family here: {FAMILY or 'none'}")


def start(swarm: Processes, name: str, kernels: str, bits: str, dtype: str) -> None:
    environment = {"SWARM_WORKER__KERNELS": kernels, "SWARM_WORKER__BITS": bits}
    swarm.start_worker(name, "--dtype", dtype, **environment)


async def answers(client: AsyncClient, speculation: SpeculationMode | None = None) -> list[list[tuple[Any, ...]]]:
    """Tokens, and logprobs to the last bit, of all prompts at once. "off": answers that were given before are not
    guessed, and take as many steps."""

    async def one(index: int) -> list[tuple[Any, ...]]:
        options = SAMPLING[index] | {"speculation": speculation}
        done = await client.generate(PROMPTS[index], max_tokens=TOKENS, ignore_eos=True, timeout=120.0, **options)
        return [(choice.tokens, choice.logprobs) for choice in done.choices]

    return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))


async def whys(client: AsyncClient) -> list[str]:
    told = (await client.query("plan"))["why"]
    assert isinstance(told, list)
    return [str(each) for each in told]


async def drawn(client: AsyncClient) -> float:
    pipeline = (await client.query("stats"))["pipeline"]
    assert isinstance(pipeline, dict)
    return float(pipeline.get("tokens", 0.0))  # type: ignore[arg-type]


@needs_two
@pytest.mark.parametrize("dtype", DTYPES)
async def test_layers_move_between_unlike_kernels(
    random_llama: Path, zygote: Zygote, tmp_path: Path, dtype: str
) -> None:
    """Two workers with unlike kernels answer as plain C alone does. Then one of them is killed in the middle of
    answers, the other takes its layers over, and not a bit of tokens and logprobs changes. The plan warns of nothing.
    """
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    with Processes(random_llama, alone, launch=zygote) as swarm:
        swarm.start_broker()
        start(swarm, "w0", FAMILY[-1], "portable", dtype)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            expected = await answers(client)
    with Processes(random_llama, together, launch=zygote) as swarm:
        swarm.start_broker(2)
        start(swarm, "w0", FAMILY[0], "portable", dtype)
        start(swarm, "w1", FAMILY[1], "portable", dtype)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            assert not any("kernels differ" in why for why in await whys(client))
            nodes = (await client.query("nodes"))["workers"]
            assert isinstance(nodes, list)
            shown = {str(node["name"]): str(node["kernels"]) for node in nodes}  # type: ignore[index,call-overload]
            assert all("portable bits;" in kernels for kernels in shown.values()), shown
            assert (FAMILY[0] in shown["w0"], FAMILY[1] in shown["w1"]) == (True, True), shown
            assert await answers(client) == expected
            began = await drawn(client)
            disturbed = asyncio.create_task(answers(client, "off"))
            await swarm.until(client, "stats", lambda told: told["pipeline"].get("tokens", 0.0) >= began + 90)
            swarm.kill("w0")
            assert await disturbed == expected
            await swarm.until_serving(client, 1)


@pytest.mark.skipif("avx512bf16" not in HERE, reason=f"no kernels with bits of their own here, but {HERE}")
async def test_a_mixed_swarm_is_warned_of(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """With the quickest kernels, those that multiply bfloat16 by instructions have bits of their own: where others are
    beside them, the plan says what that means and what can be done."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker(2)
        start(swarm, "w0", "avx512bf16", "fast", "bfloat16")
        start(swarm, "w1", "avx512", "fast", "bfloat16")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            (told,) = [why for why in await whys(client) if "kernels differ" in why]
            plan = await client.query("plan")
    assert "worker.bits = portable" in told
    stages = {stage["worker"]: stage["kernels"] for stage in plan["stages"]}  # type: ignore[union-attr,index,call-overload]
    assert "bits of avx512bf16" in str(stages["w0"])
    assert "portable bits" in str(stages["w1"])


async def test_kernels_that_cannot_run_here(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """A worker that is told to use what its processor doesn't have ends with one line that says what it has, and with
    the code that tells a supervisor not to try again."""
    absent = next(name for name in ("neon", "avx2") if name not in HERE)
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker()
        start(swarm, "w0", absent, "auto", "float32")
        assert swarm.workers["w0"].wait(60) == 78
        assert f"worker.kernels = '{absent}'" in swarm.log("w0")
        assert "Traceback" not in swarm.log("w0")
