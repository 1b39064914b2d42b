"""/v1/responses of real processes, as OpenAI's client and agents speak to it; /tokenize and /detokenize."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from pydantic import BaseModel, ConfigDict

from tests.faults.zygote import Zygote
from tests.integration.gateway import events_in, left_after, request
from tests.integration.http_swarm import http_swarm

Json = dict[str, Any]
MODEL = "village"


@pytest.fixture(scope="module")
def url(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_swarm(tmp_path_factory.mktemp("logs"), zygote) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def test_an_answer(client: OpenAI) -> None:
    """Whole and streamed, the same seed says the same; the stream's last event is the whole."""
    asked: Json = {"model": MODEL, "input": "Hello", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**asked, extra_body={"seed": 1})
    assert whole.usage is not None
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 6)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**asked, extra_body={"seed": 1}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


def test_the_clients_stream_helper(client: OpenAI) -> None:
    """It puts the events together and checks that they fit."""
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=4) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds.count("response.output_item.done") == 1


KEPT: dict[str, Json] = {
    "/v1/responses": {"model": MODEL, "input": "Hello", "max_output_tokens": 200},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200},
}


@pytest.mark.parametrize("way", ["header", "path"])
@pytest.mark.parametrize("path", KEPT)
def test_a_stream_that_was_left_is_gone_on_with(url: str, path: str, way: str) -> None:
    """With keep_s it runs meanwhile; the events are those that a reader to the end would have had."""
    body = KEPT[path] | {"keep_s": 30, "ignore_eos": True, "seed": 3}
    seen = left_after(url + path, body, 6)
    last = seen[-1].id
    time.sleep(0.3)  # its gateway hears of it
    if way == "header":
        status, _, content = request(url + path, body | {"stream": True}, [("last-event-id", last)])
    else:
        status, _, content = request(f"{url}/v1/streams/{last}")
    assert status == 200
    events = [*seen, *events_in(content.decode())]
    request_id = last.partition(":")[0]
    whole = events_in(request(f"{url}/v1/streams/{request_id}")[2].decode())
    assert [(event.id, event.data) for event in events] == [(event.id, event.data) for event in whole]
    assert len(events) > 150


def test_log_probabilities(client: OpenAI) -> None:
    """One entry for each token, with the alternatives."""
    answer = client.responses.create(
        model=MODEL,
        input="Hello",
        max_output_tokens=3,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    (item,) = answer.output
    assert item.type == "message"
    (content,) = item.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert [len(entry.top_logprobs) for entry in content.logprobs] == [2, 2, 2]


def test_errors(client: OpenAI) -> None:
    """They name the field, and are of the client's own classes."""
    with pytest.raises(BadRequestError, match="previous_response_id") as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(BadRequestError, match="web_search"):
        client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
    with pytest.raises(NotFoundError):
        client.responses.create(model="gpt-9", input="x")
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model=MODEL, input="word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(NotFoundError):
        client.responses.retrieve("resp_" + "0" * 32)


def test_the_tokens_of_an_input_are_counted(client: OpenAI) -> None:
    """As many as the answer's prompt has."""
    fields: dict[str, Any] = {"model": MODEL, "input": "Where is the cat?", "instructions": "Be kind."}
    counted = client.responses.input_tokens.count(**fields)
    answer = client.responses.create(**fields, max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_an_answer_is_found_again_if_it_was_to_be_stored(client: OpenAI) -> None:
    """As a whole, with the usage of the first time, and as a stream behind any event; one that was not to be stored is
    not given whole."""
    for _ in range(2):  # the second one's prompt comes from the prefix cache
        kept = client.responses.create(model=MODEL, input="Hello " * 60, max_output_tokens=4, store=True)
    assert kept.usage is not None
    assert kept.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(kept.id) == kept
    events = list(client.responses.retrieve(kept.id, stream=True))
    behind = list(client.responses.retrieve(kept.id, stream=True, starting_after=3))
    assert behind == events[4:]
    assert list(client.responses.retrieve(kept.id, stream=True, starting_after=len(events) - 1)) == []
    default = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
    assert client.responses.retrieve(default.id) == default
    lost = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4, store=False)
    with pytest.raises(NotFoundError, match="store"):
        client.responses.retrieve(lost.id)
    with pytest.raises(BadRequestError, match="background"):
        client.responses.cancel(kept.id)


def test_an_item_is_sent_back_by_its_id(client: OpenAI) -> None:
    """As the AI SDK does with a call before its result, unless ``store`` is false; the prompt is the same."""
    user: Json = {"role": "user", "content": "Where is the cat?"}
    tool: Json = {"type": "function", "name": "look", "parameters": {"type": "object", "additionalProperties": False}}
    fields: Json = {"model": MODEL, "tools": [tool], "extra_body": {"seed": 1}}
    asked = client.responses.create(input=[user], tool_choice="required", parallel_tool_calls=False, **fields)
    (call,) = asked.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "in the mill"}

    def answer(item: Json) -> tuple[str, int]:
        made = client.responses.create(input=[user, item, result], **fields)
        assert made.usage is not None
        return made.output_text, made.usage.input_tokens

    reference = {"type": "item_reference", "id": call.id}
    assert answer(reference) == answer(call.model_dump())
    counted = client.responses.input_tokens.count(model=MODEL, tools=[tool], input=[user, reference, result])
    assert counted.input_tokens == answer(reference)[1]
    lost = client.responses.create(input="Hello", max_output_tokens=4, store=False, **fields)
    for item_id in ("fc_1", call.id + "0", f"fc_{'0' * 32}_0", lost.output[0].id, "x" * 1000):
        with pytest.raises(NotFoundError, match="store: false") as caught:
            answer({"type": "item_reference", "id": item_id})
        assert caught.value.param == "input[1].id"


def test_an_item_that_is_not_finished_is_no_part_of_a_prompt(client: OpenAI) -> None:
    fields: Json = {"model": MODEL, "input": "Hello", "extra_body": {"ignore_eos": True}}
    with client.responses.create(stream=True, max_output_tokens=1500, **fields) as events:
        item_id = next(event.item_id for event in events if event.type == "response.output_text.delta")
        with pytest.raises(ConflictError, match="not finished yet") as caught:
            client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": item_id}])
    assert caught.value.param == "input[0].id"


def test_the_items_that_references_stand_for_are_limited(client: OpenAI) -> None:
    """A short body can't become a long conversation that is built before its length is checked."""
    long = client.responses.create(model=MODEL, input="Hello", max_output_tokens=1500, extra_body={"ignore_eos": True})
    references: Any = [{"type": "item_reference", "id": long.output[0].id}] * 4096
    with pytest.raises(BadRequestError, match="refers to more than 16777216 bytes"):
        client.responses.create(model=MODEL, input=references)


CODEX: Json = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "main.py"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "call_2"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Fixed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs.",
            "strict": False,
            "parameters": {"type": "object"},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "client_metadata": {"x-codex-installation-id": "1"},
    "max_output_tokens": 5,
}


async def test_a_session_of_codex(url: str) -> None:
    """Its request as it is sent; each event is named after its type, and the stream ends by a last one."""
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/responses", json=CODEX) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    events = [dict(line.split(": ", 1) for line in each.splitlines()) for each in text.strip().split("\n\n")]
    events = [event for event in events if "data" in event]
    bodies = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [body["type"] for body in bodies]
    assert bodies[-1]["type"] in ("response.completed", "response.incomplete")
    assert bodies[-1]["response"]["prompt_cache_key"] == "0198"
    assert bodies[-1]["response"]["tools"][1]["format"] == CODEX["tools"][1]["format"]


async def test_a_stream_goes_on_by_the_id_of_its_last_event(url: str) -> None:
    """From any event, the rest comes, with the same ids and numbers."""
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/responses", json=asked) as answer:
            whole = (await answer.text()).split("\n\n")
        for number, event in enumerate(whole[:-1]):
            last = {"Last-Event-ID": event.split("\n")[0].removeprefix("id: ")}
            for body in (json.dumps(asked), "", "not JSON"):
                async with session.post(url + "/v1/responses", data=body, headers=last) as answer:
                    assert (await answer.text()).split("\n\n") == whole[number + 1 :]


async def test_tokens(url: str) -> None:
    """Texts, conversations, and back; in both servers' forms."""

    async def post(path: str, **body: Any) -> Json:
        async with session.post(url + path, json=body) as answer:
            found: Json = await answer.json()
            return found | {"status": answer.status}

    async with aiohttp.ClientSession() as session:
        bare = await post("/tokenize", content="Hello wörld")
        full = await post("/tokenize", prompt="Hello wörld", return_token_strs=True)
        assert full["tokens"][1:] == bare["tokens"]
        assert (full["count"], len(full["token_strs"])) == (len(full["tokens"]),) * 2
        back = await post("/detokenize", tokens=bare["tokens"])
        assert back["prompt"] == back["content"] == "Hello wörld"
        pieces = (await post("/tokenize", content="ö", with_pieces=True))["tokens"]
        content = b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in (each["piece"] for each in pieces))
        assert content.decode() == "ö"
        chat = await post("/tokenize", messages=[{"role": "user", "content": "Hello"}])
        assert chat["count"] > (await post("/tokenize", content="Hello"))["count"]
        for body in ({}, {"content": "x", "prompt": "x"}, {"content": "x", "frobnicate": 1}):
            assert (await post("/tokenize", **body))["status"] == 400
        assert (await post("/detokenize", tokens=[10**6]))["status"] == 400


def test_a_form_is_kept_and_a_tool_called(client: OpenAI) -> None:
    """By a real model: what is parsed has the type that was asked for, streamed or not."""

    class Cat(BaseModel):
        model_config = ConfigDict(extra="forbid")

        room: Literal["kitchen", "garden"]
        black: bool

    parsed = client.responses.parse(model=MODEL, input="Where is the cat?", text_format=Cat, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, Cat)

    weather: Any = {
        "type": "function",
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    arguments, whole = "", ""
    for event in client.responses.create(
        model=MODEL, input="Hello", tools=[weather], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=80, stream=True,
    ):  # fmt: skip
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        elif event.type == "response.function_call_arguments.done":
            whole = event.arguments
    assert arguments == whole
    assert json.loads(whole)["city"] in ("Rome", "Oslo")
