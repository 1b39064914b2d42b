"""What bytes from a server mean: events cut anywhere, chunks of both endpoints, usage, errors, cut streams."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.bench.plan import Api, BenchTarget
from swarm.bench.prompts import BenchRequest
from swarm.bench.protocol import AnswerReader, encode_request
from swarm.bench.sse import MAX_EVENT_BYTES, BadStream, SseParser

STREAM = (
    b": comment\n\ndata: one\n\nevent: x\ndata: two\r\ndata: more\r\n\r\n"
    b"\r\nid: 7\n\ndata:three\r\rdata: [DONE]\n\ndata: last"
)
WANTED = [b"one", b"two\nmore", b"three", b"[DONE]", b"last"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    """One byte at a time, or all at once; with LF, CRLF and CR."""
    events, found = SseParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(edges):
        found += events.feed(STREAM[begin:end])
    assert found + events.finish() == WANTED


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    events = SseParser()
    for _ in range(4):
        events.feed(b"x" * (MAX_EVENT_BYTES // 4))
    with pytest.raises(BadStream, match="MiB"):
        events.feed(b"x")


def chunk(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, **choice}]}).encode()


@pytest.mark.parametrize(
    ("data", "piece"),
    [
        (chunk(delta={"role": "assistant", "content": ""}), "other"),
        (chunk(delta={"content": "a"}), "token"),
        (chunk(delta={"content": None, "reasoning_content": "hm"}), "token"),
        (chunk(delta={"tool_calls": [{"index": 0}]}), "token"),
        (chunk(text="a"), "token"),
        (chunk(text="", finish_reason="length"), "other"),
        (b'{"choices": [], "usage": null}', "other"),
        (b"[DONE]", "done"),
    ],
)
def test_only_pieces_that_carry_text_count(data: bytes, piece: str) -> None:
    assert AnswerReader().read_event(data) == piece


def test_the_servers_usage_goes_before_what_was_counted() -> None:
    reading = AnswerReader()
    reading.read_event(chunk(delta={"content": "two tokens"}))
    assert reading.num_tokens == 1
    reading.read_event(b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}')
    assert (reading.num_tokens, reading.prompt_tokens) == (2, 9)


def test_a_stream_has_ended_well_after_done_or_a_reason_to_finish() -> None:
    for data in (b"[DONE]", chunk(delta={}, finish_reason="stop")):
        reading = AnswerReader()
        reading.read_event(data)
        reading.check_end()
    reading = AnswerReader()
    reading.read_event(chunk(delta={"content": "a"}))
    with pytest.raises(BadStream, match="cut after 1 pieces"):
        reading.check_end()


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices": 3}',
        b'{"error": {"message": "x"}}',
        b"\xff\xfe",
        b'{"choices": [{"delta": 1}]}',
    ],
)
def test_garbage_and_errors_in_a_stream_are_a_bad_stream_that_shows_them(data: bytes) -> None:
    with pytest.raises(BadStream):
        AnswerReader().read_event(data)


def test_a_plain_answer_tells_its_tokens_and_must_have_an_end() -> None:
    reading = AnswerReader()
    reading.read_answer(
        b'{"choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
    )
    assert reading.num_tokens == 2
    with pytest.raises(BadStream, match="without an end"):
        AnswerReader().read_answer(b'{"choices": []}')


@pytest.mark.parametrize(("api", "field"), [("chat", "messages"), ("completions", "prompt")])
def test_a_body_says_what_its_endpoint_wants_and_asks_for_usage(api: Api, field: str) -> None:
    told = json.loads(encode_request(BenchTarget("u", "m", api), BenchRequest(0, "hello", 1, 5)))
    assert field in told
    assert (told["model"], told["max_tokens"], told["stream"]) == ("m", 5, True)
    assert told["stream_options"] == {"include_usage": True}


def test_extras_stand_above_what_the_tool_says() -> None:
    target = BenchTarget("u", "m", stream=False, extra={"ignore_eos": True, "max_tokens": 3})
    told = json.loads(encode_request(target, BenchRequest(0, "hello", 1, 5)))
    assert told["ignore_eos"] is True
    assert told["max_tokens"] == 3
    assert "stream_options" not in told


def test_newer_servers_get_the_drawn_length_under_their_own_name() -> None:
    told = json.loads(
        encode_request(BenchTarget("u", "m", extra={"max_completion_tokens": 0}), BenchRequest(0, "hello", 1, 5))
    )
    assert told["max_completion_tokens"] == 5
    assert "max_tokens" not in told
