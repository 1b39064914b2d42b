"""What tests of writers feed them, and how they read what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swarm.client.text.tokenizer import TextModel
from swarm.gateway.answer import (
    AnswerPart,
    CallArgumentsPart,
    CallEndPart,
    CallStartPart,
    ChoiceEndPart,
    ReasoningPart,
    TextPart,
    TokenCounts,
)
from swarm.gateway.apis.writer import AnswerWriter, SseEvent
from swarm.gateway.completion.served_model import ServedModel
from swarm.grammar import grammar_vocabulary
from swarm.wire.messages import Manifest
from tests.integration.fake_broker import tokenizer_files

Json = dict[str, Any]
COUNTS = TokenCounts(11, 5, 3)


def served(aliases: tuple[str, ...] = ()) -> ServedModel:
    """A model that nobody runs."""
    manifest = Manifest(
        name="toy",
        architecture="llama",
        num_layers=1,
        hidden_size=8,
        vocab_size=300,
        context=128,
        eos_token_ids=(0,),
        dtype="float32",
        layer_bytes=(8,),
        embed_bytes=8,
        head_bytes=8,
        kv_bytes_per_token=(8,),
        files=(),
        assets=(),
    )
    text = TextModel.load(tokenizer_files())
    assert text is not None
    made = ServedModel.create(manifest, text, 128, aliases)
    made.vocabulary = grammar_vocabulary(text.tokenizer.to_str(), manifest.eos_token_ids)
    return made


def call(number: int, name: str, *texts: str) -> list[AnswerPart]:
    """A whole call."""
    begins = CallStartPart(0, number, f"call_{number}", name)
    return [begins, *(CallArgumentsPart(0, number, text) for text in texts), CallEndPart(0, number)]


def thought(*texts: str) -> list[AnswerPart]:
    return [ReasoningPart(0, text) for text in texts]


def said(*texts: str) -> list[AnswerPart]:
    return [TextPart(0, text) for text in texts]


def streamed(writer: AnswerWriter, parts: Sequence[AnswerPart], counts: TokenCounts = COUNTS) -> list[Json]:
    """The events of a stream; each is named after its type."""
    events = [*writer.start_events(counts.prompt)]
    for part in parts:
        events += writer.write(part)
    return [decoded(event) for event in [*events, *writer.end_events(counts)]]


def decoded(event: SseEvent) -> Json:
    body: Json = msgspec.json.decode(event.data)
    assert event.event == body["type"]
    return body


STOPPED = ChoiceEndPart(0, "stop", 5)
CUT = ChoiceEndPart(0, "length", 5)
CALLED = ChoiceEndPart(0, "tool_calls", 5)
