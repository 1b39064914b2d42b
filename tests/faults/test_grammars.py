"""Stages that die while an answer must follow a grammar: the same bytes as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import swarm.demo
from swarm import AsyncClient, Grammar
from swarm.params import SpeculationMode
from tests.faults.bench import WAIT_S, Bench, Swarm, long
from tests.faults.zygote import Zygote

DEMO = Path(swarm.demo.__file__).parent / "village"
PROMPT = "Once upon a time"
TEXT = {"type": "string", "minLength": 60, "maxLength": 90}
SCHEMA = {
    "type": "object",
    "properties": {"first": TEXT, "second": TEXT, "number": {"type": "integer"}},
    "required": ["first", "second", "number"],
    "additionalProperties": False,
}
BY_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
CASES: tuple[dict[str, Any], ...] = (
    {"grammar": BY_SCHEMA, "temperature": 0.9, "seed": 5, "logprobs": 2},
    {"grammar": BY_SCHEMA, "temperature": 1.2, "seed": 6, "n": 2},
    {"grammar": Grammar("json_object"), "temperature": 0.8, "seed": 7},
    {"grammar": Grammar("regex", r"[A-Z][a-z]+( [a-z]+){20,30}\."), "temperature": 1.0, "seed": 8},
    {
        "grammar": Grammar("ebnf", 'root ::= pair{12}\npair ::= "<" [a-z]{3,9} ">" [0-9]{3}\n'),
        "temperature": 1.0,
        "seed": 9,
    },
)
Said = list[tuple[str, tuple[int, ...], str, tuple[Any, ...]]]


async def ask(client: AsyncClient, case: dict[str, Any], speculation: SpeculationMode | None) -> Said:
    done = await client.generate(PROMPT, max_tokens=200, timeout=WAIT_S, speculation=speculation, **case)
    return [(choice.text, choice.tokens, choice.finish_reason, choice.logprobs) for choice in done.choices]


async def ask_all(client: AsyncClient, speculation: SpeculationMode | None = "off") -> list[Said]:
    """Ask for all cases at a time. With speculation, answers that were given before take few steps."""
    return await asyncio.gather(*(ask(client, case, speculation) for case in CASES))


@pytest.fixture(scope="module")
def swarm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three workers with the demo model, which has a tokenizer."""
    with Swarm(DEMO, tmp_path_factory.mktemp("swarm"), zygote) as swarm:
        swarm.start(3)
        yield swarm


@pytest_asyncio.fixture
async def bench(swarm: Swarm) -> AsyncIterator[Bench]:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, {})
        await bench.make_well()
        yield bench
        await bench.make_well()


def is_inside_a_string(text: str) -> bool:
    return text.count('"') % 2 == 1


@pytest.mark.parametrize("place", [*long(0), 1, -1], ids=["first", "middle", "last"])
async def test_a_stage_is_killed_inside_a_json_string(bench: Bench, place: int) -> None:
    """Whichever stage dies while a value is being written, with the answer's beginning at its client already: the rest
    follows as if nothing had happened, byte for byte, beside others by other grammars."""
    before = await bench.figures()
    expected = await ask_all(bench.client)
    others = asyncio.create_task(ask_all(bench.client))
    text, killed_in = "", ""
    stream = bench.client.stream(PROMPT, max_tokens=200, timeout=WAIT_S, speculation="off", **CASES[0])
    async for piece in stream:
        text += piece.text
        if not killed_in and len(text) > 40 and is_inside_a_string(text):
            killed_in = text
            bench.swarm.kill((await bench.order())[place])
    assert is_inside_a_string(killed_in)
    assert text == expected[0][0][0]
    assert set(json.loads(text)) == {"first", "second", "number"}
    assert await others == expected
    assert (await bench.figures())["workers_lost"] == before.get("workers_lost", 0) + 1


@pytest.mark.parametrize(
    ("fault", "speculation"),
    [
        ("step.sampled=kill@40", "off"),
        ("step.computes=kill@6", "auto"),
        *long(("step.computes=kill@25", "off"), ("step.sampled=kill@8", "auto")),
    ],
)
async def test_the_last_stage_dies_with_what_it_has_drawn(
    bench: Bench, fault: str, speculation: SpeculationMode
) -> None:
    """After drawing a token that nobody has heard of, and before: another one compiles the grammars anew, reads what is
    written of each answer, and goes on with the same tokens and log probabilities."""
    expected = await ask_all(bench.client)
    times = len(bench.struck_so_far())
    await bench.arm(-1, fault)
    found = await ask_all(bench.client, speculation)
    await bench.struck(times + 1)
    assert found == expected


async def test_all_stages_are_killed(bench: Bench) -> None:
    """Nothing is left of the answers but their tokens, and those suffice."""
    expected = await ask_all(bench.client)
    drawn = (await bench.figures())["tokens"]
    asked = asyncio.create_task(ask_all(bench.client))
    await bench.until(lambda figures: figures["tokens"] >= drawn + 60)
    for name in await bench.order():
        bench.swarm.kill(name)
    await bench.swarm.until(bench.client, "status", lambda status: status["state"] == "waiting")
    for name in ("w0", "w1", "w2"):
        bench.swarm.start_worker(name)
    assert await asked == expected
