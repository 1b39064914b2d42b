"""Answers with and without speculation, from a broker, two workers and the demo model: the same tokens and log
probabilities, whole and streamed, and fewer steps for text that repeats itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import swarm.demo
from swarm import AsyncClient, Completion, InvalidRequest
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

DEMO = Path(swarm.demo.__file__).parent / "village"
STORY = "One day, a little frog named Tim saw a big red ball. Tim wanted to play with the big red ball. "
REPEATED = STORY * 3


class Answer(NamedTuple):
    """What must be equal, whatever is guessed."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Any, ...]
    reason: str

    @classmethod
    def of(cls, done: Completion) -> Answer:
        return cls(done.text, tuple(done.tokens), tuple(done.logprobs or ()), done.finish_reason)


@pytest.fixture(scope="module")
def processes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(DEMO, tmp_path_factory.mktemp("logs"), launch=zygote) as processes:
        processes.start(2)
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until_serving(client, 2)
        yield client


async def counters(client: AsyncClient) -> dict[str, float]:
    report = await client.query("stats")
    assert isinstance(report["pipeline"], dict)
    return {name: float(value) for name, value in report["pipeline"].items() if isinstance(value, int | float)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.1},
        {"temperature": 0.7, "seed": 6, "n": 2},
    ],
    ids=["greedy", "sampled", "n"],
)
async def test_the_answer_is_the_same_with_and_without(client: AsyncClient, options: dict[str, Any]) -> None:
    """Also a second time, when the first answer is among the recent ones, and proposed."""
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2, "timeout": 60.0} | options
    plain = await answers(client, speculation="off", **options)
    before = await counters(client)
    for _ in range(2):
        assert await answers(client, speculation="suffix", **options) == plain
    after = await counters(client)
    accepted = after.get("accepted_tokens", 0) - before.get("accepted_tokens", 0)
    assert accepted > 0
    assert after["tokens"] - before["tokens"] == 4 * 60 * options.get("n", 1)


async def answers(client: AsyncClient, **options: Any) -> list[Answer]:
    """The answers, whole and streamed, which are the same."""
    whole = await client.generate(REPEATED, **options)
    tokens: dict[int, list[int]] = {}
    async for piece in client.stream(REPEATED, **options):
        if piece.token is not None:
            tokens.setdefault(piece.choice, []).append(piece.token)
    assert [tokens[index] for index in sorted(tokens)] == [list(each.tokens) for each in whole.choices]
    return [Answer.of(each) for each in whole.choices]


async def test_nothing_is_proposed_for_a_request_that_wants_none(client: AsyncClient) -> None:
    before = await counters(client)
    await client.generate(REPEATED, max_tokens=30, ignore_eos=True, speculation="off", timeout=60.0)
    after = await counters(client)
    assert after.get("proposed_tokens", 0) == before.get("proposed_tokens", 0)


async def test_an_unknown_mode_is_refused_with_its_name(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="speculation must be one of auto, off, suffix, draft, not 'always'"):
        await client.generate("x", speculation="always")  # type: ignore[arg-type]
