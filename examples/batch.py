"""Many prompts at a time: a token of one, a token of another, as they come.

    python examples/batch.py

docs/how-to/batching.md says what to choose when: one by one, at the same time, or as a batch.
"""

import asyncio
from time import perf_counter

from _swarm import a_swarm

from swarm import AsyncClient

PROMPTS = [
    *("Once upon a time", "One day", "In the evening", "After the rain"),
    *("Clara likes", "The cat is", "The frog lives", "Mia is a"),
]


async def show(client: AsyncClient) -> None:
    texts = [""] * len(PROMPTS)
    num_tokens = 0
    began = perf_counter()
    async with client.stream_batch(PROMPTS, max_tokens=40) as stream:
        async for index, token, text, finished in stream:
            num_tokens += token is not None
            texts[index] += text
            if finished:  # the short ones don't wait for the long ones
                print(f"[{index}] {(PROMPTS[index] + texts[index])!r}")
    together_s = perf_counter() - began

    began = perf_counter()
    alone = [await client.generate(prompt, max_tokens=40) for prompt in PROMPTS]
    alone_s = perf_counter() - began
    print(f"\n{num_tokens} tokens: {num_tokens / together_s:.0f}/s as a batch, {num_tokens / alone_s:.0f}/s one by one")

    # Who shares a step with whom changes nothing: the tokens are the same.
    assert stream.completions is not None  # the loop has reached the end
    same = [done.tokens for done in stream.completions] == [done.tokens for done in alone]
    print(f"the same tokens: {'yes' if same else 'no'}")


async def main(url: str) -> None:
    async with AsyncClient(url) as client:
        await show(client)


with a_swarm() as url:
    asyncio.run(main(url))
