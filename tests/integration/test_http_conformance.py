"""What other projects check of their own servers, and of OpenAI's, asked of ours.
docs/reference/conformance.md has the table."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from typing import Any

import pytest

from swarm import AsyncClient
from tests.integration.gateway import LONG, MODEL, Served, events_in, request

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
from openai.resources.chat.completions import Completions as Chats  # noqa: E402
from openai.resources.completions import Completions as Texts  # noqa: E402
from openai.resources.responses import Responses  # noqa: E402

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
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
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
    "reasoning_effort": "high",
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
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": "Who lives in the village?",
    "max_output_tokens": 8,
    "temperature": 0,
}
RESPONSE_TOLD: dict[str, Any] = {  # answered, and told again in the answer
    "background": False,
    "instructions": "Be kind.",
    "max_output_tokens": 5,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "prompt_cache_key": "key",
    "safety_identifier": "me",
    "store": False,
    "temperature": 0.7,
    "tool_choice": "none",
    "top_logprobs": 2,
    "top_p": 0.9,
    "truncation": "disabled",
    "user": "me",
}
RESPONSE_ANSWERED = RESPONSE_TOLD | {
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "service_tier": "auto",
    "stream": False,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [{"type": "function", "name": "weather", "parameters": None, "strict": False}],
}
RESPONSE_REFUSED: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "background_options": {"completion_window": "soonest"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "moderation": {"model": "omni-moderation-latest"},
    "previous_response_id": "resp_1",
    "prompt": {"id": "pmpt_1"},
    "stream_options": {"include_obfuscation": False},  # without a stream
    "truncation": "auto",
}
VALUES: list[Any] = ["x", {"x": 1}, [1], [[{}]], 1e9, -1, True, "\ud800"]  # of any field
OWN = {"self", "messages", "prompt", "model", "extra_headers", "extra_query", "extra_body", "timeout"}
PATHS = {"/chat/completions": (CHAT, CHAT_REFUSED), "/completions": (TEXT, TEXT_REFUSED)} | {
    "/responses": (RESPONSE, RESPONSE_REFUSED)
}


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


@pytest.mark.parametrize("name", fields_of(Responses.create, RESPONSE_ANSWERED))
def test_a_field_of_a_response_is_answered(served: Served, name: str) -> None:
    """And told again, where OpenAI's answers do."""
    code, answer = post(served, "/responses", RESPONSE | {name: RESPONSE_ANSWERED[name]})
    assert code == 200, answer
    assert answer["output"][0]["role"] == "assistant"
    if name in RESPONSE_TOLD:
        assert answer[name] == RESPONSE_TOLD[name]


def test_every_field_of_a_response_is_known_here() -> None:
    """Of the client that is installed: answered or refused, each by its name, and nothing else. A new one of a newer
    client must be decided about."""
    if openai.VERSION.split(".")[:2] != ["3", "54"]:
        pytest.skip(f"the table is of openai 3.54, and {openai.VERSION} is installed")
    known = RESPONSE_ANSWERED.keys() | RESPONSE_REFUSED.keys() | {"input"}
    assert set(inspect.signature(Responses.create).parameters) - OWN - known == set()


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, (_, refused) in PATHS.items() for name in refused])
def test_a_field_that_would_change_the_answer_is_refused_by_name(served: Served, path: str, name: str) -> None:
    body, refused = PATHS[path]
    code, answer = post(served, path, body | {name: refused[name]})
    assert code == 400
    assert answer["error"]["param"] == name


def test_a_field_that_nobody_knows_is_refused_or_put_aside_but_breaks_nothing(served: Served) -> None:
    """Also of clients newer than this server."""
    for create, path in (
        (Chats.create, "/chat/completions"),
        (Texts.create, "/completions"),
        (Responses.create, "/responses"),
    ):
        body = PATHS[path][0] | {"max_output_tokens" if path == "/responses" else "max_tokens": 1}
        for name in sorted(set(inspect.signature(create).parameters) - OWN):
            for value in VALUES:
                code, _, content = request(served.v1 + path, body | {name: value})
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


LETTERS = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_object"}, r"\{.*\}"),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"const": "42"}}}, r'"42"'),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": LETTERS}}, r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),
    ({"type": "json_schema", "schema": LETTERS}, r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),  # that server's own form
    ({"type": "regex", "regex": "[ab]{3}"}, "[ab]{3}"),
    ({"type": "choice", "choice": ["Rome", "Oslo"]}, "Rome|Oslo"),
    ({"type": "ebnf", "ebnf": 'start: "a" /[bc]/ "d"'}, "a[bc]d"),
]
BAD_FORMS: list[Any] = [
    {"type": "sound"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": 123}},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "hiccup"}}},
    {"type": "regex", "regex": "("},
    {"type": "regex"},
    {"type": "choice", "choice": []},
    {"type": "ebnf", "ebnf": 'start: "a" nowhere'},
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_an_answer_has_its_form(served: Served, form: dict[str, Any], pattern: str) -> None:
    """Of chats and of texts, whole and streamed."""
    more = {"response_format": form, "max_tokens": 200, "temperature": 0}
    _, chat = post(served, "/chat/completions", CHAT | more)
    _, text = post(served, "/completions", TEXT | more)
    for answer, said in ((chat, chat["choices"][0]["message"]["content"]), (text, text["choices"][0]["text"])):
        if answer["choices"][0]["finish_reason"] == "stop":
            assert re.fullmatch(pattern, said, re.DOTALL), said
        else:
            assert form == {"type": "json_object"}  # which may go on
    _, _, content = request(served.v1 + "/chat/completions", CHAT | more | {"stream": True})
    deltas = [event.json["choices"][0]["delta"] for event in events_in(content.decode())[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("form", BAD_FORMS)
def test_a_form_that_is_none_is_refused(served: Served, form: Any) -> None:
    """Before anything runs, also where a stream was asked for."""
    for stream in (False, True):
        code, answer = post(served, "/chat/completions", CHAT | {"response_format": form, "stream": stream})
        assert (code, answer["error"]["type"]) == (400, "invalid_request_error"), answer
        assert answer["error"]["param"] in ("response_format", "grammar"), answer


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


# --- llama.cpp's server tests: tools ----------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CALL = CHAT | {
    "max_tokens": 100,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def test_a_tool_that_must_be_called_is_called_once(served: Served) -> None:
    """Whole: nothing is said beside it, and the arguments are a string. Streamed: the id and the name come once, text
    never, and no delta has an empty list of calls."""
    _, whole = post(served, "/chat/completions", CALL)
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")

    _, _, content = request(served.v1 + "/chat/completions", CALL | {"stream": True})
    choices = [event.json["choices"][0] for event in events_in(content.decode())[:-1]]
    deltas = [choice["delta"] for choice in choices]
    calls = [each for delta in deltas if "tool_calls" in delta for each in delta["tool_calls"]]
    assert all(delta.get("tool_calls", [0]) for delta in deltas)
    assert not any(delta.get("content") for delta in deltas)
    assert [each["function"]["name"] for each in calls if "name" in each["function"]] == ["weather"]
    assert [bool(each.get("id")) for each in calls] == [True] + [False] * (len(calls) - 1)
    assert {each["index"] for each in calls} == {0}
    assert "".join(each["function"]["arguments"] for each in calls) == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices][-1] == "tool_calls"


def test_a_strict_tool_that_may_be_called_hinders_no_answer(served: Served) -> None:
    """Without a call it is the answer without tools' rules; begun by the client, a call follows a schema."""
    may = CALL | {"tool_choice": "auto", "temperature": 0}
    _, free = post(served, "/chat/completions", may | {"max_tokens": 16})
    loose = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    _, plain = post(served, "/chat/completions", may | {"max_tokens": 16, "tools": [loose]})
    assert free["choices"] == plain["choices"]
    begun = {"role": "assistant", "content": '<tool_call>\n{"name": "weather", "arguments": '}
    more = {"messages": [*QUESTION, begun], "continue_final_message": True, "tools": None, "tool_choice": None}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}
    _, answer = post(served, "/chat/completions", may | more | {"response_format": form})
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    "fields", [{"tools": None, "tool_choice": None}, {"tools": [], "tool_choice": None}, {"tool_choice": "none"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_to_call_none_is_called(served: Served, fields: dict[str, Any], stream: bool) -> None:
    code, _, content = request(served.v1 + "/chat/completions", CALL | fields | {"stream": stream})
    assert code == 200
    assert b"tool_calls" not in content
