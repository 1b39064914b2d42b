"""/v1/chat/completions: the traps that others fell into, in what is written of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.gateway.answer import AnswerPart, ChoiceEndPart, TokenCounts
from swarm.gateway.apis.chat import ChatWriter
from swarm.gateway.apis.completions import CompletionWriter
from swarm.gateway.resume_state import ResumeState
from tests.unit.gateway.apis.feeding import CALLED, COUNTS, CUT, STOPPED, Json, call, said, served, thought

TOY = served()


def chunks(parts: list[AnswerPart], **memo: Any) -> list[Json]:
    """What a stream says, without its last word."""
    writer = ChatWriter(ResumeState("chat", 7, **memo), TOY, "r")
    events = [
        *writer.start_events(),
        *(event for part in parts for event in writer.write(part)),
        *writer.end_events(COUNTS),
    ]
    assert events[-1].data == b"[DONE]"
    return [json.loads(event.data) for event in events[:-1]]


def test_the_usage_chunk_has_no_choices() -> None:
    """An empty list of them, for clients look into it; all others say that there is no usage yet."""
    *others, last = chunks([*said("a", "b"), STOPPED], usage=True)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == COUNTS.prompt + COUNTS.answer
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    text = CompletionWriter(ResumeState("completions", 7, usage=True), TOY, "r").end_events(COUNTS)[0]
    assert json.loads(text.data)["choices"] == []


def test_usage_that_was_not_asked_for_does_not_come() -> None:
    made = chunks([*said("a"), STOPPED])
    assert not any("usage" in chunk for chunk in made)
    assert all(len(chunk["choices"]) == 1 for chunk in made)


@pytest.mark.parametrize("end", [STOPPED, CUT, CALLED])
def test_the_reason_comes_once_and_last(end: ChoiceEndPart) -> None:
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks([*said("a", "b"), end])]
    assert reasons == [None] * (len(reasons) - 1) + [end.reason]
    whole = ChatWriter(ResumeState("chat", 7), TOY, "r").full_response([*said("a", "b"), end], COUNTS)
    assert whole["choices"][0]["finish_reason"] == end.reason


def test_texts_have_no_calls_and_calls_no_text() -> None:
    """No delta has an empty list of calls; arguments are a string; a message that only calls has no content."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks([*said("a"), STOPPED])]
    assert not any("tool_calls" in delta for delta in deltas)
    parts = [*call(0, "weather", '{"a"', ": 1}"), CALLED]
    calls = [chunk["choices"][0]["delta"] for chunk in chunks(parts)]
    arguments = [each["function"]["arguments"] for delta in calls for each in delta.get("tool_calls", [])]
    assert "".join(arguments) == '{"a": 1}'
    whole = ChatWriter(ResumeState("chat", 7), TOY, "r").full_response(parts, TokenCounts(1, 1))
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_thinking_has_fields_of_its_own() -> None:
    """Both names by which clients know it; an answer without thinking has neither."""
    parts = [*thought("H", "m"), *said("Yes"), STOPPED]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(parts)]
    assert deltas[1:4] == [
        {"reasoning_content": "H", "reasoning": "H"},
        {"reasoning_content": "m", "reasoning": "m"},
        {"content": "Yes"},
    ]
    whole = ChatWriter(ResumeState("chat", 7), TOY, "r").full_response(parts, TokenCounts(1, 9, reasoning=4))
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes", "Hm", "Hm")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    other = ChatWriter(ResumeState("chat", 7), TOY, "r").full_response([*said("Yes"), STOPPED], COUNTS)
    assert not {"reasoning", "reasoning_content"} & other["choices"][0]["message"].keys()
