"""The events of streams: their numbers, their form, what is left out for who has it."""

from __future__ import annotations

import json

import pytest
from openai._streaming import SSEDecoder

from swarm.client.results import Piece
from swarm.errors import InvalidRequest
from swarm.gateway.answer import AnswerPart, ChoiceEndPart, TextPart, TokenCounts
from swarm.gateway.apis.chat import ChatWriter
from swarm.gateway.apis.completions import CompletionWriter
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.apis.writer import AnswerWriter, EventTemplate, SseEvent
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import ApiError, to_api_error
from swarm.gateway.http.sse import COMMENT, EventNumbering, parse_event_id
from swarm.gateway.resume_state import ResumeState
from tests.integration.fake_broker import manifest_of

SERVED = ServedModel.create(manifest_of({}), None, 100, ())
PARTS: list[AnswerPart] = [
    TextPart(0, "one "),
    TextPart(1, "eins \"'\\ \x00text\x00 🙂"),
    TextPart(0, "two\n"),
    ChoiceEndPart(1, "stop", 1),
    ChoiceEndPart(0, "length", 2),
]


def bytes_of(writer: AnswerWriter, numbering: EventNumbering) -> bytes:
    """A whole stream."""
    written = b"".join(numbering.encode(writer.write(part), part.choice) for part in PARTS)
    return written + numbering.encode(writer.end_events(TokenCounts(3, 3)), -1)


def writers() -> list[AnswerWriter]:
    return [
        ChatWriter(ResumeState("chat", 7, usage=True), SERVED, "r"),
        CompletionWriter(ResumeState("completions", 7, usage=True), SERVED, "r"),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_whoever_has_an_event_gets_those_behind_it(kind: int) -> None:
    """From any place on: what was seen and what comes then are the whole stream, byte for byte."""
    whole = bytes_of(writers()[kind], EventNumbering("r", 2))
    events = whole.split(b"\n\n")[:-1]
    assert len(events) > len(PARTS)
    for place, event in enumerate(events):
        request_id, seen = parse_event_id(event.split(b"\n")[0].decode().removeprefix("id: "))
        rest = bytes_of(writers()[kind], EventNumbering(request_id, 2, seen))
        assert rest.split(b"\n\n")[:-1] == events[place + 1 :]


def test_whoever_has_the_first_events_gets_those_behind_them() -> None:
    """The number of an event of /v1/responses says how many came before it; none is left behind the last one."""

    def events(num_seen: int) -> list[bytes]:
        writer, numbering = (
            ResponseWriter(ResumeState("responses", 7), SERVED, "r"),
            EventNumbering("r", 1, (), num_seen),
        )
        written = numbering.encode(writer.start_events(), 0)
        for part in (TextPart(0, "one "), TextPart(0, "two"), ChoiceEndPart(0, "stop", 2)):
            written += numbering.encode(writer.write(part), part.choice)
        return (written + numbering.encode(writer.end_events(TokenCounts(3, 2)), -1)).split(b"\n\n")[:-1]

    whole = events(0)
    assert b"response.completed" in whole[-1]
    for num_seen in range(len(whole) + 2):
        assert events(num_seen) == whole[num_seen:]


def test_choices_may_come_in_another_order_the_second_time() -> None:
    """Which one is ahead depends on time; nothing comes twice, nothing is left out."""
    numbering = EventNumbering("r", 2, (1, 2, 0))
    first, second = ([SseEvent(f"{choice}{at}".encode()) for at in range(3)] for choice in range(2))
    assert b"data: 12" in numbering.encode(second, 1)
    late = numbering.encode(first, 0)
    assert b"data: 00" not in late
    assert b"id: r:2.3.0\ndata: 01" in late
    assert b"id: r:3.3.0\ndata: 02" in late


def test_a_mould_gives_what_the_encoder_would() -> None:
    """Whatever the text is, also one like the mark in it."""
    for text in ("", "plain", "\"'\\\n\t", "🙂", EventTemplate.PLACEHOLDER, "\x7f"):
        body = {"a": [{"text": EventTemplate.PLACEHOLDER, "b": None}], "c": 1}
        assert json.loads(EventTemplate(body).render(text).data) == {"a": [{"text": text, "b": None}], "c": 1}


@pytest.mark.parametrize("kind", [0, 1])
def test_texts_are_written_the_same_with_something_beside_them(kind: int) -> None:
    """The usual event is cast, one with hops is not: but for these they are the same."""
    plain, other = writers()[kind], writers()[kind]
    other._memo = ResumeState("chat", 7, usage=True, hops=True)  # type: ignore[attr-defined]
    for one, two in zip(plain.write(PARTS[1]), other.write(PARTS[1]), strict=True):
        told = json.loads(two.data)
        told["choices"][0].pop("hops", None)
        told["choices"][0].get("delta", {}).pop("hops", None)
        assert json.loads(one.data) == told


@pytest.mark.parametrize("text", ["", ":", "r:", "r:1", "r:1.", "r:x.1", "r r:1.1", "r:" + "1." * 80 + "1", "r:1.1\n"])
def test_what_is_no_id_of_an_event_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_event_id(text)
    assert caught.value.status == 400


def test_a_request_alone_is_its_stream_from_the_beginning() -> None:
    assert parse_event_id("abc") == ("abc", ())
    assert EventNumbering("abc", 1, ()).encode([SseEvent(b"x")], 0) == b"id: abc:1.0\ndata: x\n\n"


@pytest.mark.parametrize(
    ("code", "text", "param"),
    [
        ("temperature", "temperature must be between 0 and 100", "temperature"),
        ("invalid", "logit_bias: token 9 is out of range, the vocabulary has 8", "logit_bias"),
        ("invalid", "n is 64, but at most 12 sequences of one request may wait: ask for fewer", "n"),
        ("context", "the prompt has 10 tokens; village holds 5", "prompt"),
        ("too_large", "prompt and max_tokens make 99 positions", "max_tokens"),
    ],
)
def test_the_brokers_refusals_name_a_field(code: str, text: str, param: str) -> None:
    problem = to_api_error(InvalidRequest(text, code=code))
    assert (problem.status, problem.param) == (400, param)


def test_a_piece_is_kept_apart_from_its_text() -> None:
    from swarm.client.text.assemble import replace_text

    piece = Piece(5, "", 3, 1, "stop", (), ())
    assert replace_text(piece, "word") == Piece(5, "word", 3, 1, "stop", (), ())


def test_a_comment_is_no_event_to_openais_client_also_behind_an_event_with_an_id():
    numbering = EventNumbering("r", 1)
    one, two = (numbering.encode([SseEvent(data)], 0) for data in (b'{"a": 1}', b'{"a": 2}'))
    events = SSEDecoder().iter_bytes(iter([COMMENT, one, COMMENT, COMMENT, two, COMMENT]))
    assert [event.data for event in events] == ['{"a": 1}', '{"a": 2}']
