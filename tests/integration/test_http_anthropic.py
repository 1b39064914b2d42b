"""Anthropic's /v1/messages of real processes, as its client and agents speak to it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.faults.zygote import Zygote
from tests.integration.http_swarm import http_swarm

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

Json = dict[str, Any]
MODEL = "village"


@pytest.fixture(scope="module")
def url(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_swarm(tmp_path_factory.mktemp("logs"), zygote) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def asked(**fields: Any) -> Json:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, **fields}


def test_an_answer(client: Any) -> None:
    """Whole and streamed say the same; the input's tokens are told at the beginning of a stream already."""
    whole = client.messages.create(**asked(), extra_body={"top_k": 1})
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
    with client.messages.stream(**asked(), extra_body={"top_k": 1}) as stream:
        start = next(event for event in stream if event.type == "message_start")
        final = stream.get_final_message()
    assert start.message.usage.input_tokens == whole.usage.input_tokens
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens"


def test_a_stop_sequence_is_told(client: Any) -> None:
    """Which it was, whole and streamed; it is no part of the text."""
    text = client.messages.create(**asked(max_tokens=12), extra_body={"top_k": 1}).content[0].text
    stop = text[4:7]
    fields = asked(max_tokens=12, stop_sequences=["never said", stop])
    whole = client.messages.create(**fields, extra_body={"top_k": 1})
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in whole.content) == text[: text.index(stop)]
    with client.messages.stream(**fields, extra_body={"top_k": 1}) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_an_answer_goes_on_where_its_beginning_ends(client: Any) -> None:
    """Without saying it again; counted as an answer's prompt is."""
    whole, half = (client.messages.create(**asked(max_tokens=most), extra_body={"top_k": 1}) for most in (12, 5))
    messages = [*asked()["messages"], {"role": "assistant", "content": half.content[0].text}]
    rest = client.messages.create(**asked(messages=messages, max_tokens=7), extra_body={"top_k": 1})
    assert half.content[0].text + rest.content[0].text == whole.content[0].text
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == rest.usage.input_tokens


def test_the_model_is_listed_in_its_form(client: Any) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.type, listed.max_input_tokens) == (MODEL, "model", 2048)
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-x")


def test_counting(client: Any) -> None:
    """As many as the answer says that there were."""
    fields = {"messages": [{"role": "user", "content": "Hello"}], "system": "Be kind."}
    counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
    assert counted == client.messages.create(**asked(**fields)).usage.input_tokens


def test_the_clients_request_id_is_the_answers(client: Any) -> None:
    """Of a message, a count and an error; the swarm knows the request by it."""
    raw = client.messages.with_raw_response.create(**asked())
    message = raw.parse()
    assert message._request_id == raw.headers["request-id"] == message.id.removeprefix("msg_")
    assert client.messages.count_tokens(model=MODEL, messages=asked()["messages"])._request_id
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**asked(model="claude-x"))
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]
    with client.messages.stream(**asked()) as stream:
        assert stream.request_id == stream.get_final_message().id.removeprefix("msg_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(client: Any, stream: bool) -> None:
    """By which agents begin to compact."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**asked(messages=[{"role": "user", "content": "word " * 5000}], stream=stream))
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 2047 maximum", caught.value.body["error"]["message"])


ANSWERED: Json = {
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "eu",
    "metadata": {"user_id": "me"},
    "output_config": {"effort": "low"},
    "service_tier": "auto",
    "speed": "standard",
    "stop_sequences": ["\n"],
    "stream": False,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "temperature": 0.7,
    "thinking": {"type": "adaptive"},
    "tool_choice": {"type": "none"},
    "tools": [{"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
    "top_k": 5,
    "top_p": 0.9,
    "user_profile_id": "uprof_1",
    "workspace_id": "wrkspc_1",
}
REFUSED: Json = {"container": "container_1"}
VALUES: list[Any] = ["x", {"x": 1}, [1], [[{}]], [{"role": "user"}], 1e9, -1, True, "\ud800"]  # of any field
OWN = {"self", "model", "messages", "max_tokens", "extra_headers", "extra_query", "extra_body", "timeout"}


def test_every_field_of_the_client_is_answered_or_refused_by_name(client: Any) -> None:
    """Those of the client that is installed; what a newer one adds is at least borne, by the next test."""
    fields = set(inspect.signature(client.messages.create).parameters)
    if anthropic.__version__.startswith("2.12."):
        assert fields - OWN <= ANSWERED.keys() | REFUSED.keys()
    for name, value in ANSWERED.items():
        more = {name: value} if name in fields else {"extra_body": {name: value}}  # older clients have more
        answer = client.messages.create(**asked(**more))
        assert (answer.type, answer.role) == ("message", "assistant"), name
    for name, value in REFUSED.items():
        with pytest.raises(anthropic.BadRequestError, match=name):
            client.messages.create(**asked(extra_body={name: value}))


async def test_any_value_of_any_field_is_answered_or_refused(url: str, client: Any) -> None:
    """In Anthropic's form, at both routes."""
    names = sorted((set(inspect.signature(client.messages.create).parameters) - OWN) | {"messages", "max_tokens"})
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for name in names:
                for value in VALUES:
                    body = json.dumps({**asked(max_tokens=1), name: value})
                    async with session.post(url + path, data=body) as answer:
                        told = await answer.text()
                        assert answer.status in (200, 400), (name, value, told)
                        assert answer.status == 200 or json.loads(told)["type"] == "error"


def test_messages_that_are_none_are_refused(client: Any) -> None:
    """There must be some; images are refused wherever they stand, in the result of a tool, too."""
    for body in ({"model": MODEL, "max_tokens": 5}, asked(messages=[])):
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            client.post("/v1/messages", cast_to=object, body=body)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.png"}, image]}
    said = {"role": "assistant", "content": [call]}
    turns = [{"role": "user", "content": "x"}, said, {"role": "user", "content": [result]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\].content\[0\].content\[1\].type"):
        client.messages.create(**asked(messages=turns))


def test_errors(client: Any) -> None:
    """They have Anthropic's form, and name what is wrong."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="image") as caught:
        client.messages.create(**asked(messages=[{"role": "user", "content": [image]}]))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model="claude-x"))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", cast_to=object, body={"model": MODEL, "messages": []})
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client.messages.create(**asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]))


MARK = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: Json = {
    "model": MODEL,
    "max_tokens": 8,
    "system": [
        {"type": "text", "text": "You are a coding agent.", **MARK},
        {"type": "text", "text": "Answer in a line.", **MARK},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Let me see.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Tool1", "input": {"path": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Tool2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1: x"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": [], **MARK},
                {"type": "text", "text": "Hello!", **MARK},
            ],
        },
    ],
    "tools": [
        {
            "name": f"Tool{number}",
            "description": "Does it.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for number in range(6)  # as many as the demo model has room for
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "temperature": 1,
    "stream": True,
}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}


async def test_a_session_of_claude_code(url: str) -> None:
    """Its request as it is sent: the events come in order, and each is named after its type."""
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(url + "/v1/messages?beta=true", json=CLAUDE_CODE) as answer,
    ):
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    events = [dict(line.split(": ", 1) for line in each.splitlines()) for each in text.strip().split("\n\n")]
    events = [event for event in events if "data" in event]
    kinds = [event["event"] for event in events]
    assert kinds == [json.loads(event["data"])["type"] for event in events]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    assert json.loads(events[0]["data"])["message"]["usage"]["input_tokens"] > 10


async def test_a_tool_that_must_be_called_is_called(url: str) -> None:
    """By a real model: the arguments are of the tool's schema, and the result goes into the next question."""
    weather = {
        "name": "weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    question = {"role": "user", "content": "Where is the cat?"}
    body = {"model": MODEL, "max_tokens": 80, "messages": [question], "tools": [weather]}
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        forced = {**body, "tool_choice": {"type": "tool", "name": "weather"}}
        async with session.post(url + "/v1/messages", json=forced) as answer:
            told = await answer.json()
        assert told["stop_reason"] == "tool_use"
        (call,) = [block for block in told["content"] if block["type"] == "tool_use"]
        assert call["name"] == "weather"
        assert call["input"]["city"] in ("Rome", "Oslo")
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}]}
        again = {**body, "messages": [question, {"role": "assistant", "content": told["content"]}, result]}
        async with session.post(url + "/v1/messages", json=again) as answer:
            assert answer.status == 200, await answer.text()
            after = await answer.json()
    assert read(after) > read(told)


def read(message: Json) -> int:
    """How many tokens the prompt had, those in the prefix cache too."""
    usage: Json = message["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
