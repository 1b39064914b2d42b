"""Answers by grammars, from a broker, three workers and the demo model: whole, streamed, many at once, refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import swarm.demo
from swarm import AsyncClient, Client, Completion, Grammar, InvalidRequest, RequestFailed, SamplingParams
from swarm.client.text.grammar import GrammarChecker
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

DEMO = Path(swarm.demo.__file__).parent / "village"
PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "animals": {"type": "array", "items": {"enum": ["frog", "dog", "cat"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}, "number": {"type": "null"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "animals", "home"],
    "additionalProperties": False,
}
BY_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


def check(text: str) -> dict[str, Any]:
    """The value, which must be as the schema says."""
    found: dict[str, Any] = json.loads(text)
    assert list(found) == ["name", "age", "animals", "home"]
    assert 3 <= len(found["name"]) <= 20
    assert isinstance(found["age"], int)
    assert 0 <= found["age"] <= 130
    assert 1 <= len(found["animals"]) <= 3
    assert {"frog", "dog", "cat"} >= set(found["animals"])
    assert re.fullmatch("[A-Z][a-z]{2,12}", found["home"]["street"])
    assert set(found["home"]) <= {"street", "number"}
    return found


@pytest.fixture(scope="module")
def processes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(DEMO, tmp_path_factory.mktemp("logs"), launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(processes: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes.url, connect_timeout_s=60) as client:
        await processes.until_serving(client, 3)
        yield client


async def ask(client: AsyncClient, grammar: Grammar, **options: Any) -> Completion:
    return await client.generate(PROMPT, grammar=grammar, timeout=60.0, **{"max_tokens": 400, **options})


async def test_an_answer_by_schema_conforms(client: AsyncClient) -> None:
    """Greedy and drawn at any temperature, it ends where it is whole."""
    for number, temperature in enumerate((0.0, 0.7, 1.0, 1.5)):
        done = await ask(client, BY_SCHEMA, temperature=temperature, seed=number)
        assert done.finish_reason == "stop"
        check(done.text)


async def test_every_kind_is_followed(client: AsyncClient) -> None:
    """All at once, in the same steps as requests without a grammar, which they leave alone."""
    free = await client.generate(PROMPT, max_tokens=30)
    kinds = {
        "json_object": Grammar("json_object"),
        "regex": Grammar("regex", r"[A-Z][a-z]{2,8}( [a-z]{1,8}){2,6}\."),
        "choice": Grammar("choice", json.dumps(["the frog", "the dog — perhaps", "nobody"])),
        "lark": Grammar("ebnf", 'start: NUM (("+"|"*") NUM){1,4}\nNUM: /[1-9][0-9]{0,2}/\n'),
        "gbnf": Grammar("ebnf", 'root ::= "<" name ">" name "</" name ">"\nname ::= [a-z]{2,5}\n'),
    }
    asked = [ask(client, grammar, temperature=0.9, seed=3, max_tokens=60) for grammar in kinds.values()]
    *found, again = await asyncio.gather(*asked, client.generate(PROMPT, max_tokens=30))
    texts = dict(zip(kinds, (done.text for done in found), strict=True))
    assert re.fullmatch(r"[A-Z][a-z]{2,8}( [a-z]{1,8}){2,6}\.", texts["regex"])
    assert texts["choice"] in ("the frog", "the dog — perhaps", "nobody")
    assert re.fullmatch(r"[1-9][0-9]{0,2}([+*][1-9][0-9]{0,2}){1,4}", texts["lark"])
    assert re.fullmatch(r"<[a-z]{2,5}>[a-z]{2,5}</[a-z]{2,5}>", texts["gbnf"])
    assert texts["json_object"].startswith("{")
    assert again.tokens == free.tokens


async def test_several_answers_to_one_prompt(client: AsyncClient) -> None:
    """Each conforms, they differ, and the same seed gives the same ones."""
    first, again = [await ask(client, BY_SCHEMA, n=4, temperature=1.0, seed=21, logprobs=2) for _ in range(2)]
    assert [choice.finish_reason for choice in first.choices] == ["stop"] * 4
    for choice in first.choices:
        check(choice.text)
    assert len({choice.text for choice in first.choices}) > 1
    assert [(c.tokens, c.logprobs) for c in first.choices] == [(c.tokens, c.logprobs) for c in again.choices]


async def test_log_probabilities_are_the_models_own(client: AsyncClient) -> None:
    """As if nothing were forbidden: the likeliest tokens after the prompt are those of a free answer, and the drawn one
    may be less likely than all of them."""
    free = await client.generate(PROMPT, max_tokens=1, logprobs=3)
    bound = await ask(client, Grammar("regex", "[QXZ]{2}"), max_tokens=5, logprobs=3)
    assert bound.choices[0].logprobs[0][1:] == free.choices[0].logprobs[0][1:]
    assert bound.choices[0].logprobs[0][0].logprob < free.choices[0].logprobs[0][-1].logprob


async def test_a_stream_is_the_same_answer(client: AsyncClient) -> None:
    """Piece by piece, and through a batch with parameters of each prompt's own."""
    done = await ask(client, BY_SCHEMA, temperature=0.8, seed=9)
    pieces = [
        piece
        async for piece in client.stream(PROMPT, grammar=BY_SCHEMA, temperature=0.8, seed=9, max_tokens=400, timeout=60)
    ]
    assert "".join(piece.text for piece in pieces) == done.text
    own = [
        SamplingParams(grammar=BY_SCHEMA, temperature=0.8, seed=9, max_tokens=400),
        SamplingParams(grammar=Grammar("choice", '["a","b"]')),
        SamplingParams(max_tokens=3),
    ]
    answers = await client.generate_batch([PROMPT] * 3, own)
    assert answers[0].text == done.text
    assert answers[1].text in ("a", "b")
    assert len(answers[2].tokens) == 3


def test_the_blocking_client_streams_a_batch_with_own_params(processes: Processes) -> None:
    """One set for each prompt; one more than there are prompts is one clear error."""
    own = [SamplingParams(grammar=Grammar("choice", f'["{word}"]')) for word in ("frog", "dog")]
    with Client(processes.url, connect_timeout_s=60) as client:
        stream = client.stream_batch([PROMPT, PROMPT], own, timeout=60)
        assert {piece.index for piece in stream} == {0, 1}
        assert stream.completions is not None
        assert [done.text for done in stream.completions] == ["frog", "dog"]
        with pytest.raises(InvalidRequest, match="2 sets of params for 1 prompts"):
            client.generate_batch([PROMPT], own)
        with pytest.raises(InvalidRequest, match=r"grammar \(regex\)"):
            client.check_grammar(SamplingParams(grammar=Grammar("regex", "(")))


async def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    client: AsyncClient, processes: Processes
) -> None:
    """In one line that says what is wrong; no request is made."""
    before = (await client.query("stats"))["pipeline"]
    with pytest.raises(InvalidRequest, match=r"grammar \(regex\): .*unclosed group") as caught:
        await ask(client, Grammar("regex", "(a"))
    assert caught.value.code == "grammar"
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        await ask(client, BY_SCHEMA, ignore_eos=True)
    after = (await client.query("stats"))["pipeline"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert after["tokens"] == before["tokens"]


async def test_what_gets_to_a_stage_all_the_same_fails_alone(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a client that doesn't look, and one that grows without bound: with the reason; others in the same steps are
    answered as ever."""
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: None)
    growing = Grammar("ebnf", 'start: a\na: "x"+ | a{0,50} "y"? a{0,50}\n')
    good = asyncio.gather(*(ask(client, BY_SCHEMA, temperature=0.7, seed=seed) for seed in range(4)))
    with pytest.raises(RequestFailed, match=r"grammar \(regex\): .*unclosed group"):
        await ask(client, Grammar("regex", "(a"), n=3)
    with pytest.raises(RequestFailed, match=r"grammar \(ebnf\): it can't be followed beyond \d+ tokens"):
        await ask(client, growing, min_tokens=200)
    for done in await good:
        check(done.text)


async def put_off(client: AsyncClient) -> float:
    """How many draws of the swarm have waited for their grammar."""
    pipeline = (await client.query("stats"))["pipeline"]
    assert isinstance(pipeline, dict)
    return float(pipeline.get("draws_put_off", 0))


async def test_a_grammar_that_takes_long_to_compile_holds_nobody_up(client: AsyncClient) -> None:
    """Its own request waits, and gets the same answer as when the grammar is known; another one's tokens come in
    between. It takes a quarter of a second here, many steps, and on a machine that is ten times as busy half of what
    is waited for at most."""
    slow = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 49991}))
    before = await put_off(client)
    asked = asyncio.create_task(ask(client, slow, seed=3, temperature=0.8, max_tokens=12))
    between = 0
    async for _ in client.stream(PROMPT, max_tokens=380, ignore_eos=True, timeout=60.0):
        between += not asked.done()
    first = await asked
    assert await put_off(client) > before
    assert between > 1
    again = await ask(client, slow, seed=3, temperature=0.8, max_tokens=12)
    assert (again.tokens, again.text) == (first.tokens, first.text)


async def test_a_model_without_a_tokenizer_has_no_grammars(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """It is said by name."""
    with Processes(random_llama, tmp_path, launch=zygote) as processes:
        processes.start(1)
        async with AsyncClient(processes.url, connect_timeout_s=60) as client:
            await processes.until_serving(client, 1)
            with pytest.raises(InvalidRequest, match="this model has no tokenizer, which grammars need"):
                await client.generate([5, 6], grammar=Grammar("json_object"))
