"""Images in a swarm of processes: the tokens of transformers' model, through deaths and from the prefix cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from swarm import AsyncClient, InvalidRequest
from swarm.client.results import Completion
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, some_tokens, stages_of
from tests.model.seeing import IMAGE, Prompt, save_model

# Two prompts of equal tokens whose second images differ, one whose image takes several chunks, and one of text only.
LIKE, UNLIKE = Prompt(20, (3, 5), 40, (8, 8), 30, seed=5), Prompt(20, (3, 5), 40, (8, 8), 30, seed=5)
UNLIKE.replace_image(1, seed=77)
LONG, BLIND = Prompt(5, (16, 20), 9, seed=60), Prompt(50, seed=90)
PROMPTS = (LIKE, UNLIKE, LONG, BLIND)
NUM_TOKENS = 300


async def generate(client: AsyncClient, prompt: Prompt, max_tokens: int = NUM_TOKENS) -> Completion:
    return await client.generate(
        prompt.tokens,
        images=prompt.images,
        pixels=[prompt.pixels[image.digest] for image in prompt.images],
        max_tokens=max_tokens,
        ignore_eos=True,
        timeout=120,
    )


async def generate_all(client: AsyncClient) -> list[tuple[int, ...]]:
    answers = await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS))
    return [answer.tokens for answer in answers]


def whole_tokens(folder: Path, prompt: Prompt) -> list[int]:
    """The first tokens of transformers' answer."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    made = model.eval().generate(
        torch.tensor([prompt.tokens]),
        attention_mask=torch.ones(1, len(prompt.tokens)),
        **(prompt.arguments() if prompt.images else {}),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = made[0, len(prompt.tokens) :].tolist()
    return tokens


async def check_through(client: AsyncClient, swarm: Processes, expected: Any, fault: Any) -> None:
    """Answers that a fault interrupts have the tokens of undisturbed ones."""
    running = asyncio.create_task(generate_all(client))
    await some_tokens(swarm, client, 60)
    await fault()
    assert await running == expected


async def test_tokens_equal_the_whole_models_through_deaths(tmp_path: Path, zygote: Zygote) -> None:
    folder = save_model(tmp_path / "seeing")
    logs = tmp_path / "logs"
    logs.mkdir()
    with Processes(folder, logs, launch=zygote, options={"SWARM_STATE_DIR": str(logs)}) as swarm:
        swarm.start(3)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 3)
            expected = await generate_all(client)
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                assert whole_tokens(folder, prompt) == list(tokens[:24])
            assert expected[0] != expected[1]

            async def kill(place: int) -> None:
                name = stages_of(await client.query("nodes"))[place]
                swarm.kill(name)
                swarm.start_worker(f"{name}x")

            for place in (0, 1):
                await check_through(client, swarm, expected, lambda place=place: kill(place))
                await swarm.until_serving(client, 3)
            await check_through(client, swarm, expected, lambda: swarm.restart_broker(client, 3))


async def test_workers_die_as_they_compute_the_chunk_with_an_image(tmp_path: Path, zygote: Zygote) -> None:
    """Each stage before its first batch that has a token of an image. Others take over."""
    folder, trace = save_model(tmp_path / "seeing"), tmp_path / "trace"
    dying = {"SWARM_FAILPOINTS": f"step.computes[token={IMAGE}]=kill", "SWARM_FAILPOINTS_TRACE": str(trace)}
    with Processes(folder, tmp_path, launch=zygote, options={"SWARM_STATE_DIR": str(tmp_path)}) as swarm:
        swarm.start_broker(2)
        for name in ("w0", "w1"):
            swarm.start_worker(name, **dying)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            running = asyncio.create_task(generate(client, LONG, 24))
            for name in ("x0", "x1"):
                swarm.start_worker(name)
            answer = await running
            deaths = trace.read_text().splitlines()
    assert list(answer.tokens) == whole_tokens(folder, LONG)
    assert deaths


async def test_the_first_worker_dies_in_the_middle_of_an_image(tmp_path: Path, zygote: Zygote) -> None:
    """An answer runs beside it, so that steps have a part or a few each. Another worker computes the image again."""
    folder, trace = save_model(tmp_path / "seeing"), tmp_path / "trace"
    dying = {"SWARM_FAILPOINTS": "step.computes[part=4]=kill", "SWARM_FAILPOINTS_TRACE": str(trace)}
    with Processes(folder, tmp_path, launch=zygote, options={"SWARM_STATE_DIR": str(tmp_path)}) as swarm:
        swarm.start_broker(2)
        for name in ("w0", "w1"):
            swarm.start_worker(name, **dying)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            beside = asyncio.create_task(generate(client, BLIND))
            await some_tokens(swarm, client, 20)
            running = asyncio.create_task(generate(client, LONG, 24))
            for name in ("x0", "x1"):
                swarm.start_worker(name)
            answers = await asyncio.gather(running, beside)
            deaths = trace.read_text().splitlines()
    assert list(answers[0].tokens) == whole_tokens(folder, LONG)
    assert list(answers[1].tokens[:24]) == whole_tokens(folder, BLIND)
    assert deaths


async def test_a_prefix_is_shared_by_equal_images_only(tmp_path: Path, zygote: Zygote) -> None:
    with Processes(save_model(tmp_path / "seeing"), tmp_path, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            first = await generate(client, LIKE, 20)
            again, other = await generate(client, LIKE, 20), await generate(client, UNLIKE, 20)
            last = LIKE.images[1].start // 32 * 32  # the block in which the images begin to differ
            cached = [answer.usage.num_cached for answer in (first, again, other)]
            assert cached == [0, (len(LIKE.tokens) - 1) // 32 * 32, last]
            assert first.tokens == again.tokens != other.tokens


async def test_images_that_are_not_what_they_say_are_refused(tmp_path: Path, zygote: Zygote) -> None:
    with Processes(save_model(tmp_path / "seeing"), tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            image, pixels = LIKE.images[0], LIKE.pixels[LIKE.images[0].digest]
            for images, sent, what in (
                ((image,), (), "pixels of 0 came"),
                ((image,), (pixels[:-1],), "bytes of pixels"),
                ((image,), (bytes(len(pixels)),), "not that of its rows, columns and pixels"),
            ):
                with pytest.raises(InvalidRequest, match=what):
                    await client.generate(LIKE.tokens, images=images, pixels=sent, max_tokens=1, timeout=60)
