"""Open Responses' compliance cases, asked of /v1/responses of real processes, and each of its events held against the
types of OpenAI's own client. docs/reference/conformance.md has the table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.gateway import MODEL, Event, Served, events_in, request

pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

Json = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

# What a response must have, whatever was asked: also what is null has to be there.
FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "created_at": (int,),
    "completed_at": (int, type(None)),
    "status": (str,),
    "incomplete_details": (dict, type(None)),
    "model": (str,),
    "previous_response_id": (type(None),),
    "instructions": (str, type(None)),
    "output": (list,),
    "error": (type(None),),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": (int,),
    "temperature": (int, float),
    "reasoning": (dict, type(None)),
    "usage": (dict,),
    "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, type(None)),
    "prompt_cache_key": (str, type(None)),
}
ITEMS = {
    "message": {"type", "id", "status", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
}
USAGE = {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}

HELLO = {"type": "message", "role": "user", "content": "Say hello."}
SYSTEM = {"type": "message", "role": "system", "content": "You are a miller."}
NAMED: list[Json] = [
    {"type": "message", "role": "user", "content": "My name is Anna."},
    {"type": "message", "role": "assistant", "content": "Hello Anna!"},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 12}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
# The demo model is too small to choose a tool by itself; these cases are about what a call looks like.
CALLING: Json = {"input": [HELLO], "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def check(response: Json) -> None:
    """Hold a response against what all must have."""
    assert response["object"] == "response"
    for name, kinds in FIELDS.items():
        assert isinstance(response[name], kinds), name
    for item in response["output"]:
        assert item.keys() >= ITEMS[item["type"]]
    assert response["usage"].keys() >= USAGE
    assert all(tool.keys() >= {"type", "name", "description", "parameters", "strict"} for tool in response["tools"])
    Response.model_validate(response, strict=False)


def answer(served: Served, body: Json) -> Json:
    code, _, content = request(served.v1 + "/responses", {"model": MODEL, "seed": 1, **body})
    assert code == 200, content
    response: Json = json.loads(content)
    check(response)
    return response


def stream(served: Served, body: Json) -> list[Event]:
    """The events of an answer; each is one that OpenAI's client knows, and is named after its type."""
    code, headers, content = request(served.v1 + "/responses", {"model": MODEL, "seed": 1, "stream": True, **body})
    assert code == 200, content
    assert headers["content-type"].startswith("text/event-stream")
    events = events_in(content.decode())
    for number, event in enumerate(events):
        EVENT.validate_python(event.json)
        assert (event.json["type"], event.json["sequence_number"]) == (event.event, number)
    check(events[-1].json["response"])
    return events


@pytest.mark.parametrize("items", [[HELLO], [SYSTEM, HELLO], NAMED], ids=["basic", "system-prompt", "multi-turn"])
def test_a_conversation_is_answered(served: Served, items: list[Json]) -> None:
    """Whole, and to its own end."""
    response = answer(served, {"input": items})
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["usage"]["total_tokens"] == sum(response["usage"][f"{way}_tokens"] for way in ("input", "output"))


def test_what_was_said_before_is_read(served: Served) -> None:
    """All turns are part of the prompt, with what the assistant said."""
    counts = [answer(served, {"input": NAMED[at:], "max_output_tokens": 1})["usage"]["input_tokens"] for at in range(3)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3


def test_a_stream_ends_with_the_whole_answer(served: Served) -> None:
    """The same as one that isn't streamed, but for ids and times."""
    events = stream(served, {"input": [HELLO]})
    kinds = [event.event for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.json["delta"] for event in events if event.event == "response.output_text.delta")
    last = events[-1].json["response"]
    whole = answer(served, {"input": [HELLO]})
    assert text == last["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    assert len({event.json["item_id"] for event in events if "item_id" in event.json} | {last["output"][0]["id"]}) == 1
    own = {"id", "created_at", "completed_at", "output", "usage"}
    assert {name: last[name] for name in last.keys() - own} == {name: whole[name] for name in whole.keys() - own}


def test_a_tool_is_called(served: Served) -> None:
    """As an item of its own, with arguments that are the schema's."""
    response = answer(served, CALLING)
    assert response["status"] == "completed"
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["name"], call["status"]) == ("weather", "completed")
    assert isinstance(json.loads(call["arguments"])["town"], str)


def test_a_call_streams(served: Served) -> None:
    """It is added empty, grows by its deltas, and is done with the same as a whole."""
    events = stream(served, CALLING)
    added = [event.json["item"] for event in events if event.event == "response.output_item.added"]
    done = [event.json["item"] for event in events if event.event == "response.output_item.done"]
    (begun,) = [item for item in added if item["type"] == "function_call"]
    (ended,) = [item for item in done if item["type"] == "function_call"]
    deltas = [event.json for event in events if event.event == "response.function_call_arguments.delta"]
    (whole,) = [event.json for event in events if event.event == "response.function_call_arguments.done"]
    assert (begun["arguments"], begun["id"], begun["call_id"]) == ("", ended["id"], ended["call_id"])
    assert "".join(delta["delta"] for delta in deltas) == whole["arguments"] == ended["arguments"]
    assert {delta["item_id"] for delta in [*deltas, whole]} == {ended["id"]}
    assert json.loads(ended["arguments"]).keys() == {"town"}


def test_a_model_that_reads_text_refuses_images(served: Served) -> None:
    """A 400 that says so, whole and streamed."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    content = [{"type": "input_text", "text": "What is this?"}, image]
    for streaming in (False, True):
        body = {"model": MODEL, "input": [{**HELLO, "content": content}], "stream": streaming}
        code, _, told = request(served.v1 + "/responses", body)
        error = json.loads(told)["error"]
        assert (code, error["param"]) == (400, "input")
        assert "reads text only" in error["message"]
