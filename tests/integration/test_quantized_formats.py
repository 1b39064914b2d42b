"""Files of every quantized format in real processes: the same answers alone, cut, in chunks, after a death, and from
a prefix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.params import SpeculationMode
from swarm.stage import native
from tests.faults.zygote import Zygote
from tests.integration.processes import START_S, Processes, figures, some_tokens
from tests.model.test_quantized_files import make_format, make_gpt_oss

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

TOKENS = 20
BEGINNING = [3 + (11 * j) % 200 for j in range(70)]  # two blocks that two prompts have in common
PROMPTS = [[5], [3 + 7 * j % 200 for j in range(33)], [*BEGINNING, 7, 9], [*BEGINNING, 8]]
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "seed": 11, "logprobs": 1}]
Answer = list[tuple[tuple[int, ...], tuple[Any, ...]]]

# Kind of model, and format of its files, with the name in a worker's description. Those that become the same kernels'
# formats as another one are long: test_quantized_files has the logits of each.
FORMATS = {
    "GPTQ in order of activations": ("llama", "gptq in order of activations", "GPTQ int4"),
    "AWQ": ("llama", "awq", "AWQ int4"),
    "compressed-tensors": ("llama", "compressed int4", "compressed-tensors int4"),
    "FP8": ("llama", "fp8", "FP8"),
    "MXFP4": ("gpt_oss", "", "MXFP4"),
    "experts in GPTQ": ("qwen3_moe", "gptq", "GPTQ int4"),
}


async def ask(client: AsyncClient, index: int, speculation: SpeculationMode | None = None) -> Answer:
    """Tokens, and log probabilities to the last bit."""
    options = SAMPLING[index % len(SAMPLING)] | {"speculation": speculation}
    done = await client.generate(PROMPTS[index], max_tokens=TOKENS, ignore_eos=True, timeout=START_S, **options)
    return [(choice.tokens, choice.logprobs) for choice in done.choices]


async def all_at_once(client: AsyncClient, speculation: SpeculationMode | None = None) -> list[Answer]:
    """Ask for all answers at a time. "off": those that were given before are not guessed, and take as many steps."""
    return await asyncio.gather(*(ask(client, index, speculation) for index in range(len(PROMPTS))))


LONG = ("AWQ", "compressed-tensors", "experts in GPTQ")


@pytest.mark.parametrize(
    ("kind", "format_", "name"),
    [pytest.param(*case, id=key, marks=pytest.mark.long if key in LONG else ()) for key, case in FORMATS.items()],
)
async def test_the_same_answers_however_they_are_computed(
    kind: str, format_: str, name: str, zygote: Zygote, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if format_:
        make_format(model, kind, format_)
    else:
        make_gpt_oss(model)
    options = {"SWARM_WORKER__DTYPE": "bfloat16"}
    (tmp_path / "alone").mkdir()
    with Processes(model, tmp_path / "alone", options=options, launch=zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
            await swarm.until_serving(client, 1)
            report: Any = await client.query("nodes")
            (worker,) = report["workers"]
            assert str(worker["weights"]) == f"{name}, decoder 1"
            assert f"{name} in groups of " in str(worker["kernels"])
            expected = [await ask(client, index) for index in range(len(PROMPTS))]
            assert len({token for answer in expected for tokens, _ in answer for token in tokens}) > TOKENS
    options |= {"SWARM_BROKER__PREFILL_CHUNK": "7", "SWARM_BROKER__STEP_TOKENS": "32"}
    (tmp_path / "two").mkdir()
    with Processes(model, tmp_path / "two", options=options, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
            await swarm.until_serving(client, 2)
            assert await all_at_once(client) == expected
            before = await figures(client)
            assert await all_at_once(client) == expected
            assert (await figures(client))["prefix_hits"] > before.get("prefix_hits", 0)
            disturbed = asyncio.create_task(all_at_once(client, "off"))
            await some_tokens(swarm, client, 12)
            swarm.kill("w1")
            assert await disturbed == expected
