"""What other projects check of their own servers, and of OpenAI's, asked of ours. docs/conformance.md has the table."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from swarm import AsyncClient
from tests.integration.gateway import LONG, MODEL, Served, events_in, request

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
from openai.resources.chat.completions import Completions as Chats  # noqa: E402
from openai.resources.completions import Completions as Texts  # noqa: E402

QUESTION = [{"role": "user", "content": "Who lives in the village?"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "The miller", "max_tokens": 8, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

# Fields of OpenAI's client with a value that means something: is that answered, or refused by name?
ANSWERED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "metadata": {"a": "b"},
    "n": 2,
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "prompt_cache_key": "key",
    "safety_identifier": "me",
    "seed": 7,
    "service_tier": "auto",
    "stop": ["\n"],
    "store": False,
    "stream": False,
    "temperature": 0.7,
    "tool_choice": "none",
    "top_p": 0.9,
    "user": "me",
}
CHAT_ANSWERED = ANSWERED | {
    "logprobs": True,
    "modalities": ["text"],
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "tools": [],
    "verbosity": "medium",
}
CHAT_REFUSED: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "x"},
    "function_call": {"name": "weather"},
    "functions": [{"name": "weather"}],
    "prediction": {"type": "content", "content": "x"},
    "stream_options": {"include_usage": True},  # without a stream
    "top_logprobs": 2,  # without logprobs
    "web_search_options": {},
}
TEXT_ANSWERED = {name: value for name, value in ANSWERED.items() if "tool" not in name} | {
    "best_of": 1,
    "echo": True,
    "logprobs": 2,
}
TEXT_REFUSED: dict[str, Any] = {"suffix": "end", "stream_options": {"include_usage": True}}
OWN = {"self", "messages", "prompt", "model", "extra_headers", "extra_query", "extra_body", "timeout"}


def fields_of(create: Any, table: dict[str, Any]) -> list[str]:
    """The client's own parameters that the table has: those that a newer client adds are told by the next test."""
    return sorted((set(inspect.signature(create).parameters) - OWN) & set(table))


def post(served: Served, path: str, body: Any) -> tuple[int, Any]:
    code, _, content = request(served.v1 + path, body)
    return code, json.loads(content)


@pytest.mark.parametrize("name", fields_of(Chats.create, CHAT_ANSWERED))
def test_a_field_of_a_chat_is_answered(served: Served, name: str) -> None:
    code, answer = post(served, "/chat/completions", CHAT | {name: CHAT_ANSWERED[name]})
    assert code == 200, answer
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("name", fields_of(Texts.create, TEXT_ANSWERED))
def test_a_field_of_a_text_is_answered(served: Served, name: str) -> None:
    both = {"echo": True} if name == "echo" else {name: TEXT_ANSWERED[name]}
    code, answer = post(served, "/completions", TEXT | both)
    assert code == 200, answer


@pytest.mark.parametrize(
    ("path", "name"),
    [("/chat/completions", name) for name in CHAT_REFUSED] + [("/completions", name) for name in TEXT_REFUSED],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(served: Served, path: str, name: str) -> None:
    body, refused = (CHAT, CHAT_REFUSED) if "chat" in path else (TEXT, TEXT_REFUSED)
    code, answer = post(served, path, body | {name: refused[name]})
    assert code == 400
    assert answer["error"]["param"] == name


def test_a_field_that_nobody_knows_is_refused_or_put_aside_but_breaks_nothing(served: Served) -> None:
    """Also of clients newer than this server."""
    for create, path, body in ((Chats.create, "/chat/completions", CHAT), (Texts.create, "/completions", TEXT)):
        for name in sorted(set(inspect.signature(create).parameters) - OWN):
            for value in ("x", {"x": 1}, [1], 1e9, True):
                code, _, content = request(served.v1 + path, body | {name: value, "max_tokens": 1})
                assert code in (200, 400), (name, value, content)


# --- llama.cpp's server tests: chat -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
def test_messages_that_are_none_are_refused(served: Served, messages: Any) -> None:
    code, answer = post(served, "/chat/completions", CHAT | {"messages": messages})
    assert code == 400
    assert answer["error"]["param"].startswith("messages")


def test_a_stream_says_what_the_whole_says(served: Served) -> None:
    """Text and counts, of chats and of texts; the role comes once, the model and the id everywhere."""
    for path, body in (("/chat/completions", CHAT), ("/completions", TEXT)):
        _, whole = post(served, path, body)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        _, headers, content = request(served.v1 + path, body | more)
        assert headers["content-type"].startswith("text/event-stream")
        chunks = [event.json for event in events_in(content.decode())[:-1]]
        said = [choice for chunk in chunks for choice in chunk["choices"]]
        if "chat" in path:
            text = "".join(choice["delta"].get("content") or "" for choice in said)
            assert [choice["delta"].get("role") for choice in said].count("assistant") == 1
            assert text == whole["choices"][0]["message"]["content"]
        else:
            assert "".join(choice["text"] for choice in said) == whole["choices"][0]["text"]
        assert {chunk["model"] for chunk in chunks} == {whole["model"]}
        assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
        usage = chunks[-1]["usage"] | {"prompt_tokens_details": None}  # more is cached the second time
        assert usage == whole["usage"] | {"prompt_tokens_details": None}


def test_biased_tokens_are_never_said(served: Served) -> None:
    """Ask, forbid what was said, ask again: none of it comes."""
    body = TEXT | {"logprobs": 0}
    ids = asyncio.run(_ids(served, post(served, "/completions", body)[1]["choices"][0]["text"]))
    _, other = post(served, "/completions", TEXT | {"logit_bias": {str(token): -100 for token in ids}})
    assert not set(ids) & set(asyncio.run(_ids(served, other["choices"][0]["text"])))


async def _ids(served: Served, text: str) -> tuple[int, ...]:
    async with AsyncClient(served.swarm.url) as client:
        model = await client.text_model()
        assert model is not None
        return model.encode(text, add_special_tokens=False)


def test_a_second_time_the_prompt_is_found(served: Served) -> None:
    """The same answer, and some of its prompt was computed already."""
    long = CHAT | {"messages": [{"role": "user", "content": "Anna bakes bread for the village. " * 12}]}
    answers = [post(served, "/chat/completions", long)[1] for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert 0 < cached[1] <= answers[1]["usage"]["prompt_tokens"]


# --- llama.cpp's server tests: texts ----------------------------------------------------------------------------------


def test_many_at_once_answer_as_one_alone(served: Served) -> None:
    """Greedy or drawn with a seed, whatever runs beside."""
    bodies = [TEXT | {"prompt": f"Anna has {number}", "temperature": number % 2, "seed": 3} for number in range(8)]
    alone = [post(served, "/completions", body)[1]["choices"] for body in bodies]

    async def together() -> list[Any]:
        calls = (asyncio.to_thread(post, served, "/completions", body) for body in bodies)
        return [answer["choices"] for _, answer in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == alone


def test_prompts_are_all_of_one_kind(served: Served) -> None:
    """Several lists of token ids are as many prompts; lists and texts in one list are refused, as OpenAI does."""
    ids = list(asyncio.run(_ids_with_ends(served, "The miller")))
    _, plain = post(served, "/completions", TEXT)
    _, lists = post(served, "/completions", TEXT | {"prompt": [ids, ids]})
    assert [choice["text"] for choice in lists["choices"]] == [plain["choices"][0]["text"]] * 2
    code, answer = post(served, "/completions", TEXT | {"prompt": [ids, "The miller"]})
    assert code == 400
    assert answer["error"]["param"].startswith("prompt")


async def _ids_with_ends(served: Served, text: str) -> tuple[int, ...]:
    async with AsyncClient(served.swarm.url) as client:
        model = await client.text_model()
        assert model is not None
        return model.encode(text)


def test_an_answer_that_ignores_its_end_is_as_long_as_it_may_be(served: Served) -> None:
    _, answer = post(served, "/completions", TEXT | LONG | {"max_tokens": 60})
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["choices"][0]["finish_reason"] == "length"


def test_alternatives_are_the_likeliest_and_in_order(served: Served) -> None:
    """As many as asked for at every place, their probabilities fall, none is above one together."""
    import math

    _, answer = post(served, "/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 10, "temperature": 0.0})
    for entry in answer["choices"][0]["logprobs"]["content"]:
        told = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(told) == 10
        assert told == sorted(told, reverse=True)
        assert sum(map(math.exp, told)) <= 1.0 + 1e-6
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
