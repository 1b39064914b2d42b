"""Ollama's /api/chat and /api/generate: what bodies become, and what is written of an answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from swarm.gateway.answer import AnswerPart, TokenCounts
from swarm.gateway.apis.ollama import (
    GenerateBody,
    OllamaChatBody,
    to_chat_request,
    to_generate_request,
    to_messages,
)
from swarm.gateway.apis.ollama_models import capabilities, describe, describe_fully
from swarm.gateway.apis.ollama_writer import OllamaWriter
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.errors import ApiError
from swarm.gateway.http.sse import EventNumbering
from swarm.gateway.resume_state import ResumeState
from swarm.params import Grammar
from swarm.wire.messages import Pooling, Timing
from tests.unit.gateway.apis.feeding import CALLED, CUT, STOPPED, Json, call, said, served, thought

TOY = served()
COUNTS = TokenCounts(11, 5, timing=Timing(queued_s=0.5, first_token_s=2.0, total_s=3.0, num_recomputed=0))
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
ENDS: Json = {
    "total_duration": 3_000_000_000,
    "load_duration": 500_000_000,
    "prompt_eval_count": 11,
    "prompt_eval_duration": 1_500_000_000,
    "eval_count": 5,
    "eval_duration": 1_000_000_000,
}


def chat(**fields: Any) -> Any:
    return to_chat_request(OllamaChatBody(model="toy", messages=HELLO, **fields), TOY)


def generate(**fields: Any) -> Any:
    return to_generate_request(GenerateBody(model="toy", prompt="Once", **fields), TOY)


def lines(parts: list[AnswerPart], **memo: Any) -> list[Json]:
    """What a stream has, by line; ids do not get in."""
    writer, numbering = OllamaWriter(ResumeState("ollama", 7, **memo), TOY, "r"), EventNumbering("r", 1)
    written = [numbering.encode(writer.start_events(), 0)]
    written += [numbering.encode(writer.write(part), 0) for part in parts]
    written.append(numbering.encode(writer.end_events(COUNTS), -1))
    return [json.loads(line) for line in b"".join(written).decode().splitlines()]


def whole(parts: list[AnswerPart], **memo: Any) -> Json:
    return OllamaWriter(ResumeState("ollama", 7, **memo), TOY, "r").full_response(parts, COUNTS)


def test_a_stream_has_a_line_for_each_text_and_one_for_the_end() -> None:
    head = {"model": "toy", "created_at": "1970-01-01T00:00:07Z"}
    *texts, end = lines([*thought("Hm"), *said("a", "b"), STOPPED])
    assert texts == [
        {**head, "message": {"role": "assistant", "content": "", "thinking": "Hm"}, "done": False},
        {**head, "message": {"role": "assistant", "content": "a"}, "done": False},
        {**head, "message": {"role": "assistant", "content": "b"}, "done": False},
    ]
    message = {"role": "assistant", "content": ""}
    assert end == {**head, "message": message, "done": True, "done_reason": "stop", **ENDS}


def test_a_generated_text_has_fields_of_its_own() -> None:
    parts = [*thought("Hm"), *said("a", "b"), CUT]
    *texts, end = lines(parts, told={"generate": True})
    assert [(text["response"], text.get("thinking")) for text in texts] == [("", "Hm"), ("a", None), ("b", None)]
    assert (end["response"], end["done_reason"]) == ("", "length")
    answer = whole(parts, told={"generate": True})
    assert (answer["response"], answer["thinking"], answer["done"]) == ("ab", "Hm", True)
    assert "message" not in answer


def test_a_call_is_one_line_whose_arguments_are_an_object() -> None:
    """Those that were cut off are empty; the end shows the cut."""
    parts = [*call(0, "weather", '{"city"', ': "Ulm"}'), *call(1, "clock", '{"zo'), CALLED]
    calls = [
        {"id": "call_0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}},
        {"id": "call_1", "function": {"index": 1, "name": "clock", "arguments": {}}},
    ]
    first, second, end = lines(parts)
    assert [first["message"]["tool_calls"], second["message"]["tool_calls"]] == [calls[:1], calls[1:]]
    assert end["done_reason"] == "stop"
    assert whole(parts)["message"] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_an_error_in_a_stream_is_a_line() -> None:
    writer = OllamaWriter(ResumeState("ollama", 7), TOY, "r")
    (event,) = writer.error_events(ApiError(503, "gone"))
    assert event.encode("r:1.0") == b'{"error":"gone"}\n'


def test_durations_that_are_unknown_divide_nothing_by_zero() -> None:
    *_, end = lines([STOPPED])
    assert end["eval_duration"] == ENDS["eval_duration"]
    unknown = OllamaWriter(ResumeState("ollama", 7), TOY, "r").full_response([STOPPED], TokenCounts(1, 1))
    assert (unknown["total_duration"], unknown["eval_duration"]) == (0, 1)


def test_options_become_parameters() -> None:
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x", "y"],
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "num_ctx": 4096,
        "num_thread": 3,
        "mirostat": 0,
        "mirostat_tau": 5.0,
    }
    params = chat(options=options).params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 3, ("x", "y"), 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)


@pytest.mark.parametrize("num_predict", [None, -1, -2, 0])
def test_without_a_length_an_answer_may_fill_the_context(num_predict: int | None) -> None:
    options = {} if num_predict is None else {"num_predict": num_predict}
    assert chat(options=options).params.max_tokens == REST_OF_CONTEXT


def test_a_seed_of_minus_one_is_none() -> None:
    assert chat(options={"seed": -1}).params.seed is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"new_sampler": 1}}, "new_sampler"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"format": "xml"}, "format"),
        ({"format": "json", "tools": [{"type": "function", "function": {"name": "f"}}]}, "format"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"think": True}, "think"),
        ({"shift": True}, "shift"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: Json, named: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, named)


@pytest.mark.parametrize("field", ["suffix", "template", "context"])
def test_fields_of_other_engines_are_refused_by_name(field: str) -> None:
    value: object = {"context": [1]}.get(field, "x")
    with pytest.raises(ApiError) as caught:
        generate(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_formats() -> None:
    assert chat(format="json").params.grammar == Grammar("json_object")
    schema = chat(format={"type": "object", "properties": {"a": {"type": "integer"}}}).params.grammar
    assert schema is not None
    assert (schema.kind, json.loads(schema.text)["properties"]) == ("json_schema", {"a": {"type": "integer"}})
    assert chat(format="").params.grammar is None


def test_a_prompt_is_a_message_unless_it_is_raw_or_the_model_has_no_template() -> None:
    assert (generate(raw=True).messages, generate(raw=True).prompt) == (None, "Once")
    with pytest.raises(ApiError, match="raw"):
        generate(raw=True, system="Be kind")
    text = TOY.text
    assert text is not None
    if text.template is None:
        asked = generate(system="Be kind")
        assert (asked.messages, asked.prompt) == (None, "Be kind\n\nOnce")
    else:
        roles = [(message["role"], message["content"]) for message in generate(system="Be kind").messages]
        assert roles == [("system", "Be kind"), ("user", "Once")]


def test_results_find_their_calls() -> None:
    """By the tool's name, or in the order of the calls; an earlier turn's calls wait no longer."""
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("a", "b", "b")]
    history = [
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "second"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "tool_name": "b", "content": "third"},
        {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "c", "arguments": {}}}]},
        {"role": "tool", "tool_name": "c", "content": "fourth"},
    ]
    messages = to_messages(history)
    assert [given["id"] for given in messages[0]["tool_calls"]] == ["call_0_0", "call_0_1", "call_0_2"]
    assert messages[0]["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"n":1}'}
    assert messages[0]["thinking"] == "Hm"
    results = [(each["tool_call_id"], each["name"]) for each in messages if each["role"] == "tool"]
    assert results == [("call_0_1", "b"), ("call_0_0", "a"), ("call_0_2", "b"), ("mine", "c")]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": "a", "images": [1]}, "messages[0].images"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {"f": 1}}, "messages[0].tool_calls"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_place(message: Json, named: str) -> None:
    with pytest.raises(ApiError) as caught:
        to_messages([message])
    assert caught.value.param == named


def test_a_tag_names_the_model_too() -> None:
    assert TOY.has_name("toy:latest")
    assert not TOY.has_name("toy:7b")
    assert not TOY.has_name("other:latest")


def test_a_model_is_described() -> None:
    row = describe(TOY, 7)
    assert (row["name"], row["size"], row["details"]["parameter_size"]) == ("toy", 24, "6")
    assert row["details"]["quantization_level"] == "F32"
    shown = describe_fully(TOY, 7)
    assert shown["model_info"]["llama.context_length"] == 128
    assert "completion" in shown["capabilities"]
    assert "thinking" not in shown["capabilities"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["completion", "tools", "embedding"]),
        ({"is_headless": True}, ["embedding"]),
        ({"is_headless": True, "pooling": Pooling("cls", True)}, []),
        ({"is_headless": True, "num_labels": 1}, []),
    ],
)
def test_capabilities_are_what_the_model_can_do(changes: Json, expected: list[str]) -> None:
    """A model for embeddings generates nothing, a classifier does neither."""
    model = served()
    model.manifest = msgspec.structs.replace(model.manifest, **changes)
    assert capabilities(model) == expected
