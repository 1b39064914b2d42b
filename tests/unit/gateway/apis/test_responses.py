"""/v1/responses: from bodies to asks, from parts to items and events."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.client.results import Piece
from swarm.gateway.answer import AnswerPart, TextPart
from swarm.gateway.apis.items import MAX_ANSWERS, find_references
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.apis.responses import ResponseBody, to_request, to_resume_state
from swarm.gateway.completion.assembler import AnswerAssembler, make_call_id
from swarm.gateway.completion_request import CompletionRequest, ToolOptions
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState
from swarm.gateway.tool_calls.format import ArgumentsDelta, CallFinished, CallStarted, ParseResult, TextDelta
from swarm.params import Grammar
from swarm.wire.messages import TokenLogprob
from tests.integration.fake_broker import say
from tests.unit.gateway.apis.feeding import CALLED, COUNTS, CUT, STOPPED, Json, call, said, served, streamed, thought

TOY = served()
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK}


def body(**fields: Any) -> ResponseBody:
    return ResponseBody.model_validate({"model": "toy", "input": "Hi", **fields})


def asked(**fields: Any) -> CompletionRequest:
    return to_request(body(**fields), TOY)


def writer(**fields: Any) -> ResponseWriter:
    made = body(**fields)
    memo = ResumeState.decode(to_resume_state(made, to_request(made, TOY), 77).encode())  # as any gateway finds it
    assert memo is not None
    return ResponseWriter(memo, TOY, "r1")


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    return caught.value


def test_what_is_looked_up_before_its_end_is_in_progress() -> None:
    """With what has come so far."""
    answer = writer().full_response(said("Once ", "upon"), COUNTS)
    assert (answer["status"], answer["usage"]) == ("in_progress", None)
    (item,) = answer["output"]
    assert (item["status"], item["content"][0]["text"]) == ("in_progress", "Once upon")


# --- bodies


def test_a_text_is_what_the_user_says() -> None:
    assert asked(instructions="Be kind.").messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    )


def test_a_history_of_an_agent() -> None:
    """What the assistant thought, said and called in a row is one message; empty items are left out, and thoughts that
    are encrypted."""
    items = [
        {"role": "developer", "content": "You may write."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix "}, {}]},
        {},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "reasoning", "id": "rs_3", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command":["ls"]}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Well?"},
    ]
    shell = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command":["ls"]}'}}
    patch = {"id": "c2", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    assert asked(input=items).messages == (
        {"role": "developer", "content": "You may write."},
        {"role": "user", "content": "Fix "},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.\nSo.", "tool_calls": [shell, patch]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "user", "content": "Well?"},
    )


def test_references_name_the_answer_that_has_the_item() -> None:
    """By the ids that its writer gave to the items."""
    made = writer()
    item = made.full_response([*said("Hi"), STOPPED], COUNTS)["output"][0]
    given = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": item["id"]}]
    assert find_references(given * 2) == {"r1": [(1, item["id"]), (3, item["id"])]}
    assert find_references([{"type": "item_reference", "id": "other"}]) == {"": [(0, "other")]}
    answers = [{"type": "item_reference", "id": f"msg_{number}_0"} for number in range(MAX_ANSWERS + 1)]
    assert len(find_references(answers[1:])) == MAX_ANSWERS
    for wrong in ([{"type": "item_reference"}], answers):
        with pytest.raises(ApiError, match="input"):
            find_references(wrong)


def test_bookkeeping_is_accepted() -> None:
    """What Codex and others send that changes nothing."""
    ask = asked(
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        service_tier="auto",
        reasoning={"summary": "auto"},
        metadata={"a": "b"},
        user="u",
        max_tool_calls=3,
        truncation="disabled",
        text={"verbosity": "low"},
    )
    assert ask == asked()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"hops": True}, "hops"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "text"}, "colour": "red"}}, "text.colour"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"keep_s": 5.0}, "keep_s"),
        ({"speculation": "always"}, "speculation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ],
)
def test_what_is_wrong_is_named(fields: Json, param: str) -> None:
    problem = refused(**fields)
    assert (problem.status, problem.param) == (400, param)
    assert param in problem.message


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [SHELL], "tool_choice": "required"}, "tools"),
    ],
)
def test_what_turns_out_to_be_wrong_later_has_the_clients_name(fields: Json, name: str) -> None:
    """A grammar comes of several fields."""
    assert asked(**fields).client_name_of("grammar") == name
    assert asked(**fields).client_name_of("max_tokens") == "max_output_tokens"
    assert asked(**fields).client_name_of("temperature") == "temperature"


def test_a_format_does_not_hold_for_a_call_that_must_come() -> None:
    """The answer is the call."""
    form = {"text": {"format": {"type": "json_object"}}}
    for choice in ("required", {"type": "function", "name": "shell"}):
        assert asked(tools=[SHELL], tool_choice=choice, **form) == asked(tools=[SHELL], tool_choice=choice)
    assert asked(**form).params.grammar is not None


def test_a_stream_may_go_on_without_its_reader() -> None:
    assert asked(stream=True, keep_s=5.0).keep_s == 5.0
    assert (asked().speculation, asked(speculation="suffix").speculation) == (None, "suffix")


def test_another_model_is_not_found() -> None:
    assert refused(model="gpt-9").status == 404


def test_fields_of_sampling() -> None:
    """The grammar of the text, log probabilities, and as many tokens as there is room for."""
    schema = {"type": "object"}
    ask = asked(
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        include=["message.output_text.logprobs"],
        temperature=0,
        top_p=0.5,
    )
    grammar = ask.params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("json_schema", '{"type": "object"}')
    assert (ask.params.logprobs, ask.params.temperature, ask.params.top_p) == (0, 0.0, 0.5)
    assert ask.params.max_tokens == 0
    assert asked(top_logprobs=2).params.logprobs == 2


def test_tools_of_both_kinds() -> None:
    ask = asked(tools=[SHELL, PATCH], tool_choice="required", parallel_tool_calls=False)
    shell, patch = ask.tools.tools
    assert (shell.name, shell.custom, patch.name, patch.custom) == ("shell", False, "apply_patch", True)
    assert patch.grammar is not None
    assert patch.grammar.kind == "ebnf"
    assert (ask.tools.choice, ask.tools.parallel) == ("required", False)
    named = asked(tools=[SHELL, PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).tools
    assert (named.choice, named.required_name) == ("named", "apply_patch")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]}
    assert [tool.name for tool in asked(tools=[SHELL, PATCH], tool_choice=allowed).tools.tools] == ["shell"]


# --- answers


def kinds(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_as_events() -> None:
    events = streamed(writer(), [*said("Hel", "lo"), STOPPED])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[6]["text"] == "Hello"
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_r1_0"}
    assert events[2]["item"]["content"] == []  # as it was then
    assert events[8]["item"] == events[9]["response"]["output"][0]
    assert events[9]["response"]["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }


@pytest.mark.parametrize("summary", [None, "auto"])
def test_thinking_as_events(summary: str | None) -> None:
    """An item of its own: with content, or with a summary for clients that ask for one."""
    parts = [*thought("H", "m"), *said("Yes"), STOPPED]
    events = streamed(writer(reasoning={"effort": "low", "summary": summary}), parts)
    added, delta, done, part_done = (
        ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done")
        if summary is None
        else (
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
        )
    )
    assert kinds(events)[2:10] == [
        "output_item.added",
        *(added, delta, delta, done, part_done),
        *("output_item.done", "output_item.added"),
    ]
    item, message = events[-1]["response"]["output"]
    assert events[8]["item"] == item
    assert (item["type"], item["status"], item["id"], message["type"]) == (
        "reasoning",
        "completed",
        "rs_r1_0",
        "message",
    )
    if summary is None:
        assert (item["content"], item["summary"]) == ([{"type": "reasoning_text", "text": "Hm"}], [])
    else:
        assert (item["content"], item["summary"]) == ([], [{"type": "summary_text", "text": "Hm"}])


def test_calls_as_events() -> None:
    """A function's arguments and a custom tool's input; each item has one id from its first event to its last."""
    parts = [*said("Look"), *call(0, "shell", '{"a"', ":1}"), *call(1, "apply_patch", "*** "), CALLED]
    events = streamed(writer(tools=[SHELL, PATCH]), parts)
    assert kinds(events)[5:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    ids: dict[int, set[str]] = {}
    for event in events:
        if "output_index" in event:
            ids.setdefault(event["output_index"], set()).add(event.get("item_id") or event["item"]["id"])
    assert ids == {0: {"msg_r1_0"}, 1: {"fc_r1_1"}, 2: {"ctc_r1_2"}}
    _, function, custom = events[-1]["response"]["output"]
    assert (function["call_id"], function["name"], function["arguments"]) == ("call_0", "shell", '{"a":1}')
    assert (custom["call_id"], custom["name"], custom["input"]) == ("call_1", "apply_patch", "*** ")
    assert events[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    "parts",
    [
        [*said("a", "b"), STOPPED],
        [STOPPED],
        [*said("a"), CUT],
        [*call(0, "shell", "{}"), *said("so"), STOPPED],
        [*call(0, "shell", '{"a'), CUT],
        [*thought("Hm", "."), *said("so"), STOPPED],
        [*thought("Hm"), CUT],
    ],
)
def test_whole_is_what_the_stream_ends_with(parts: list[AnswerPart]) -> None:
    fields = {"tools": [SHELL], "metadata": {"a": "b"}, "instructions": "Be kind.", "max_output_tokens": 9}
    last = streamed(writer(**fields), parts)[-1]["response"]
    whole = writer(**fields).full_response(parts, COUNTS)
    assert whole == last
    assert (whole["id"], whole["object"], whole["created_at"], whole["model"]) == ("resp_r1", "response", 77, "toy")
    assert (whole["metadata"], whole["instructions"], whole["max_output_tokens"]) == ({"a": "b"}, "Be kind.", 9)
    assert whole["tools"] == [{"description": None, **SHELL}]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    """So is its last item: a call that looks whole may not be."""
    whole = writer(tools=[SHELL]).full_response([*said("x"), *call(0, "shell", '{"a"'), CUT], COUNTS)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,) = writer().full_response([STOPPED], COUNTS)["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_a_failure_is_told_in_the_stream() -> None:
    """Before the first event and behind others; with a code that OpenAI's clients know."""
    early = writer().error_events(ApiError(400, "too long", code="context_length_exceeded"))
    assert [event.event for event in early] == ["response.created", "response.in_progress", "response.failed"]
    made = writer()
    made.start_events()
    (late,) = made.error_events(ApiError(503, "gone"))
    assert b'"code":"server_error"' in late.data
    assert b'"sequence_number":2' in late.data


def test_log_probabilities_come_with_the_text() -> None:
    """One entry for each token, in the delta and in the part."""
    (token,) = say("a")
    piece = Piece(token, "a", 0, logprobs=(TokenLogprob(token, -0.5), TokenLogprob(token, -0.5)))
    events = streamed(writer(top_logprobs=1), [TextPart(0, "a", (piece,)), STOPPED])
    (entry,) = events[4]["logprobs"]
    assert (entry["token"], entry["logprob"], len(entry["top_logprobs"])) == ("a", -0.5, 1)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]


def test_calls_that_a_family_finds_in_text() -> None:
    """From pieces, however they were cut, to one function call with its own id."""
    parts = AnswerAssembler("r1", asked(tools=[SHELL]).tools, Shouting())
    pieces = [Piece(1, "So ", 0), Piece(2, "CALL shell {", 1), Piece(3, "}", 2), Piece(4, "", 3, finish_reason="stop")]
    whole = writer(tools=[SHELL]).full_response([part for piece in pieces for part in parts.add(piece)], COUNTS)
    text, called = whole["output"]
    assert text["content"][0]["text"] == "So "
    assert (called["name"], called["arguments"], called["call_id"]) == ("shell", "{}", make_call_id("r1", 0, 0))
    assert whole["status"] == "completed"


class Shouting:
    """A family that writes CALL, a name, and arguments up to the end."""

    name = "shouting"
    marks = ()

    def __init__(self) -> None:
        self._called = False

    def fits(self, template: str) -> bool:
        return True

    def parser(self, use: ToolOptions) -> Shouting:
        return self

    def forced_call_grammar(self, use: ToolOptions) -> Grammar:
        return Grammar("regex", "CALL .*")

    def push(self, text: str) -> list[ParseResult]:
        if self._called:
            return [ArgumentsDelta(text)]
        if not text.startswith("CALL "):
            return [TextDelta(text)]
        self._called = True
        _, name, arguments = text.split(" ", 2)
        return [CallStarted(name), ArgumentsDelta(arguments)]

    def finish(self) -> list[ParseResult]:
        return [CallFinished()] if self._called else []


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "\ud800"}},
        {"input": [{"role": "user", "content": [{"type": []}]}]},
        {"input": [{"role": [], "content": 7}]},
        {"input": [{"role": "user", "content": 7}]},
        {"tools": [SHELL], "tool_choice": {"type": [], "name": []}},
        {"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "tools": "all"}},
        {"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]}},
        {"tools": [{**PATCH, "format": {"type": "grammar", "grammar": "x"}}]},
        {"text": {"format": "json"}},
    ],
)
def test_what_makes_no_sense_is_refused(fields: Json) -> None:
    """With a 400, not by falling over it."""
    with pytest.raises(ApiError) as caught:
        writer(**fields)
    assert caught.value.status == 400
