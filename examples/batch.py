"""Batch generation: several prompts in one request; tokens of all answers arrive as they are computed.

    python examples/batch.py

docs/how-to/batching.md compares sequential requests, concurrent requests and batches.
"""

import asyncio
from time import perf_counter

from _swarm import running_swarm

from swarm import AsyncClient

PROMPTS = [
    *("Once upon a time", "One day", "In the evening", "After the rain"),
    *("Clara likes", "The cat is", "The frog lives", "Mia is a"),
]


async def show(client: AsyncClient) -> None:
    texts = [""] * len(PROMPTS)
    num_tokens = 0
    start = perf_counter()
    async with client.stream_batch(PROMPTS, max_tokens=40) as stream:
        async for index, token, text, finished in stream:
            num_tokens += token is not None
            texts[index] += text
            if finished:  # a short answer ends before the long ones do
                print(f"[{index}] {(PROMPTS[index] + texts[index])!r}")
    together_s = perf_counter() - start

    start = perf_counter()
    alone = [await client.generate(prompt, max_tokens=40) for prompt in PROMPTS]
    alone_s = perf_counter() - start
    print(f"\n{num_tokens} tokens: {num_tokens / together_s:.0f}/s as a batch, {num_tokens / alone_s:.0f}/s one by one")

    # The tokens do not depend on which prompts share a step.
    assert stream.completions is not None  # the loop has reached the end
    same = [done.tokens for done in stream.completions] == [done.tokens for done in alone]
    print(f"the same tokens: {'yes' if same else 'no'}")


async def main(url: str) -> None:
    async with AsyncClient(url) as client:
        await show(client)


with running_swarm() as url:
    asyncio.run(main(url))
