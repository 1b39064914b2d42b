"""Stages that die while a model thinks: the same thinking and the same answer as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient, Grammar, Piece, Thinking
from swarm.client.text.tokenizer import TextModel
from swarm.demo import model_path
from swarm.gateway.answer import ReasoningPart, TextPart
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion_request import ToolOptions
from swarm.gateway.reasoning.marks import think
from swarm.gateway.tool_calls.hermes import hermes
from tests.faults.bench import WAIT_S, Bench, Swarm, long
from tests.faults.zygote import Zygote

PROMPT = "Once upon a time<think>\n"
BUDGET = 40
FILES = {name: (model_path() / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
TEXT = TextModel.load(FILES)
assert TEXT is not None
CLOSING = TEXT.encode("\n</think>\n\n", add_special_tokens=False)
THINKING = Thinking(("</think>",), BUDGET, CLOSING)
SCHEMA = {
    "type": "object",
    "properties": {"first": {"type": "string", "minLength": 30, "maxLength": 40}},
    "required": ["first"],
    "additionalProperties": False,
}
CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 5, "logprobs": 2, "min_tokens": 90, "max_tokens": 90},
    {"temperature": 1.2, "seed": 6, "n": 2, "grammar": Grammar("json_schema", json.dumps(SCHEMA)), "max_tokens": 150},
)
Answer = list[tuple[tuple[int, ...], str, str, tuple[Any, ...]]]


async def ask(client: AsyncClient, case: dict[str, Any], **options: Any) -> Answer:
    done = await client.generate(PROMPT, timeout=WAIT_S, thinking=THINKING, **case, **options)
    return [(choice.tokens, choice.text, choice.finish_reason, choice.logprobs) for choice in done.choices]


async def ask_all(client: AsyncClient, **options: Any) -> list[Answer]:
    return await asyncio.gather(*(ask(client, case, **options) for case in CASES))


def split(pieces: Sequence[Piece]) -> tuple[str, str, int]:
    """The thinking, the answer, and how many tokens were thinking, as a gateway reads them."""
    assembler = AnswerAssembler("r", ToolOptions(), hermes({}), reasoning=lambda: think().parser(is_opened=True))
    parts = [part for piece in pieces for part in assembler.add(piece)]
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return thought, "".join(part.text for part in parts if isinstance(part, TextPart)), assembler.num_reasoning


@pytest.fixture(scope="module")
def swarm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three workers with the demo model, which has a tokenizer."""
    with Swarm(model_path(), tmp_path_factory.mktemp("swarm"), zygote) as swarm:
        swarm.start(3)
        yield swarm


@pytest_asyncio.fixture
async def bench(swarm: Swarm) -> AsyncIterator[Bench]:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, {})
        await bench.make_well()
        yield bench
        await bench.make_well()


@pytest.mark.parametrize("place", [*long(0), 1, -1], ids=["first", "middle", "last"])
async def test_a_stage_is_killed_within_the_thinking(bench: Bench, place: int) -> None:
    """The budget counts the tokens of before, each token comes once, and the answer's grammar begins where it would."""
    expected = await ask_all(bench.client)
    others = asyncio.create_task(ask_all(bench.client))
    pieces: list[Piece] = []
    async for piece in bench.client.stream(PROMPT, timeout=WAIT_S, thinking=THINKING, **CASES[0]):
        pieces.append(piece)
        if len(pieces) == BUDGET // 2:
            bench.swarm.kill((await bench.order())[place])
    tokens = [piece.token for piece in pieces if piece.token is not None]
    assert tuple(tokens) == expected[0][0][0]
    assert tuple(tokens[BUDGET : BUDGET + len(CLOSING)]) == CLOSING
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    thought, answer, num_reasoning = split(pieces)
    assert "".join(piece.text for piece in pieces) == expected[0][0][1]
    assert thought
    assert answer
    assert BUDGET < num_reasoning <= BUDGET + len(CLOSING)
    assert await others == expected
    assert all(set(json.loads(text.partition("</think>")[2])) == {"first"} for _, text, _, _ in expected[1])


@pytest.mark.parametrize("num_tokens", [BUDGET + 2, BUDGET + len(CLOSING) + 2], ids=["closing", "answer"])
async def test_the_last_stage_dies_while_the_thinking_ends(bench: Bench, num_tokens: int) -> None:
    """Among the forced tokens, and right after them: another stage forces the rest and no more. Without speculation,
    each step draws one token."""
    expected = await ask_all(bench.client)
    times = len(bench.struck_so_far())
    await bench.arm(-1, f"step.sampled=kill@{num_tokens}")
    assert await ask_all(bench.client, speculation="off") == expected
    await bench.struck(times + 1)
