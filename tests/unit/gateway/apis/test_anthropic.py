"""/v1/messages: from bodies to asks, from parts to blocks and events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm.gateway.answer import AnswerPart, ChoiceEndPart, TokenCounts
from swarm.gateway.apis.anthropic import CountBody, MessageBody, to_count_request, to_request, to_resume_state
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.completion_request import CompletionRequest, ReasoningOptions
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState
from tests.unit.gateway.apis.feeding import CALLED, COUNTS, CUT, STOPPED, Json, call, said, served, streamed, thought

TOY = served()
READ = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
USER = {"role": "user", "content": "Hi"}
HALF = {"role": "assistant", "content": "It is"}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


def body(**fields: Any) -> MessageBody:
    return MessageBody.model_validate({"model": "toy", "max_tokens": 9, "messages": [USER], **fields})


def asked(**fields: Any) -> CompletionRequest:
    return to_request(body(**fields), TOY)


def writer(**fields: Any) -> MessageWriter:
    made = body(**fields)
    memo = ResumeState.decode(to_resume_state(made, to_request(made, TOY), 77).encode())
    assert memo is not None
    return MessageWriter(memo, TOY, "r1")


# --- bodies


def test_a_history_of_an_agent() -> None:
    """System blocks, thoughts, calls and their results; results stand before what the user says with them."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "A"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Fix", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I read."}, use]},
        {"role": "user", "content": [{"type": "text", "text": "Quick"}, result]},
    ]
    system = [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Two"}]
    function = {"name": "Read", "arguments": '{"path":"a"}'}
    assert asked(system=system, messages=messages).messages == (
        {"role": "system", "content": "One\nTwo"},
        {"role": "user", "content": "Fix"},
        {
            "role": "assistant",
            "content": "I read.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "A"},
        {"role": "user", "content": "Quick"},
    )


def test_bookkeeping_is_accepted() -> None:
    """What Claude Code and others send that changes nothing here."""
    ask = asked(
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": []},
    )
    assert ask == asked()


def test_an_empty_list_of_what_is_not_supported_is_accepted() -> None:
    assert asked(mcp_servers=[]) == asked()


def test_an_answer_continues_a_last_message_of_the_assistant() -> None:
    assert asked(messages=[USER, HALF]).continues
    assert not asked(messages=[USER, HALF, USER]).continues
    count = CountBody.model_validate({"model": "toy", "messages": [USER, HALF]})
    assert to_count_request(count, TOY).continues


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [READ], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, HALF], "output_config": {"format": FORM}}, "output_config.format"),
        ({"messages": []}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"keep_s": 5.0}, "keep_s"),
        ({"speculation": "always"}, "speculation"),
    ],
)
def test_what_is_wrong_is_named(fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert caught.value.to_anthropic()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("ignores_unknown_fields", [False, True])
def test_a_thread_is_refused_so_that_the_clients_tool_runner_goes_on_without_one(ignores_unknown_fields: bool) -> None:
    """Also where unknown fields are ignored: the next request of a thread has only its new messages."""
    with pytest.raises(ApiError) as caught:
        to_request(body(thread={"type": "create"}), replace(TOY, ignores_unknown_fields=ignores_unknown_fields))
    assert caught.value.to_anthropic()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert asked(thread=None) == asked()


def test_fields_of_sampling() -> None:
    params = asked(stop_sequences=["END"], temperature=0.3, top_p=0.9, top_k=5).params
    assert (params.max_tokens, params.stop, params.temperature, params.top_p, params.top_k) == (
        9,
        ("END",),
        0.3,
        0.9,
        5,
    )
    assert asked().params.temperature == 1.0


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "", False)),
        ({"type": "tool", "name": "Read"}, ("named", "Read", True)),
        ({"type": "none"}, ("none", "", True)),
    ],
)
def test_choices_of_tools(choice: Json, expected: tuple[str, str, bool]) -> None:
    use = asked(tools=[{**READ, "type": "custom"}], tool_choice=choice).tools
    assert (use.choice, use.required_name, use.parallel) == expected
    assert use.tools[0].parameters == {"type": "object"}


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "Read"}, {"type": "none"}])
def test_what_is_counted_is_what_would_be_asked(choice: Json | None) -> None:
    """The same messages and tools, and whether one must be called: prompts say that."""
    fields: Json = {"model": "toy", "messages": [USER], "system": "Be kind.", "tools": [READ], "tool_choice": choice}
    counted = to_count_request(CountBody.model_validate(fields), TOY)
    ask = asked(**fields)
    assert (counted.messages, counted.tools) == (ask.messages, ask.tools)


# --- answers


def test_a_text_as_events() -> None:
    events = streamed(writer(), [*said("Hel", "lo"), STOPPED])
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["usage"]["input_tokens"], start["stop_reason"], start["content"]) == (11, None, [])
    assert events[3]["delta"] == {"type": "text_delta", "text": "Hel"}
    assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[6]["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_a_call_as_events() -> None:
    """Blocks follow one another; a call's input comes as pieces of JSON."""
    parts = [*said("I read."), *call(0, "Read", '{"pa', 'th":1}'), *call(1, "Read", "{}"), CALLED]
    events = streamed(writer(tools=[READ]), parts)
    told = [(e["type"], e["index"]) for e in events if "index" in e]
    assert told == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
    ]
    assert events[5]["content_block"] == {"type": "tool_use", "id": "toolu_0", "name": "Read", "input": {}}
    assert events[6]["delta"] == {"type": "input_json_delta", "partial_json": '{"pa'}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_answer_as_a_whole() -> None:
    whole = writer(tools=[READ]).full_response(
        [*said("I ", "read."), *call(0, "Read", '{"path"', ":1}"), CALLED], COUNTS
    )
    assert whole["content"] == [
        {"type": "text", "text": "I read."},
        {"type": "tool_use", "id": "toolu_0", "name": "Read", "input": {"path": 1}},
    ]
    assert (whole["id"], whole["type"], whole["role"], whole["model"]) == ("msg_r1", "message", "assistant", "toy")
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (STOPPED, ("end_turn", None)),
        (CUT, ("max_tokens", None)),
        (ChoiceEndPart(0, "stop", 5, "END"), ("stop_sequence", "END")),
    ],
)
def test_why_it_ended(end: AnswerPart, expected: tuple[str, str | None]) -> None:
    whole = writer().full_response([*said("x"), end], COUNTS)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_a_call_that_was_cut_off_has_no_input() -> None:
    """Half of an object is none; the stop reason says why."""
    whole = writer(tools=[READ]).full_response([*call(0, "Read", '{"pa'), CUT], COUNTS)
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")


def test_a_failure_is_told_in_the_stream() -> None:
    (event,) = writer().error_events(ApiError(503, "gone"))
    assert event.event == "error"
    assert event.data == b'{"type":"error","error":{"type":"overloaded_error","message":"gone"}}'


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_is_a_block_with_a_signature(display: str) -> None:
    """Clients keep the signature and send it back; "omitted" leaves the block empty."""
    thinking = {"type": "enabled", "budget_tokens": 9, "display": display}
    parts = [*thought("H", "m"), *said("Yes"), STOPPED]
    events = streamed(writer(thinking=thinking), parts)
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    shown = [delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta"]
    assert shown == (["H", "m"] if display == "summarized" else [])
    (signature,) = (delta["signature"] for delta in deltas if delta["type"] == "signature_delta")
    whole = writer(thinking=thinking).full_response(parts, TokenCounts(1, 9, reasoning=4))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "".join(shown), "signature": signature},
        {"type": "text", "text": "Yes"},
    ]
    assert signature
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 4}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ReasoningOptions()),
        ({"thinking": {"type": "disabled"}}, ReasoningOptions(enabled=False)),
        ({"thinking": {"type": "adaptive"}}, ReasoningOptions(enabled=True)),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, ReasoningOptions(enabled=True, budget=64)),
        ({"output_config": {"effort": "max"}}, ReasoningOptions(effort="max")),
        ({"thinking_budget": 0}, ReasoningOptions(enabled=False, budget=0)),
    ],
)
def test_how_much_is_thought(fields: Json, options: ReasoningOptions) -> None:
    """Of an answer and of what is counted."""
    assert asked(**fields).reasoning == options
    counted = CountBody.model_validate({"model": "toy", "messages": [USER], **fields})
    assert to_count_request(counted, TOY).reasoning == options
