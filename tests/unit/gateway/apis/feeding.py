"""What tests of writers feed them, and how they read what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swarm.client.text.tokenizer import TextModel
from swarm.gateway.answer import CallBegins, CallEnds, CallText, Counts, End, Part, Text
from swarm.gateway.apis.writer import Sse, Writer
from swarm.gateway.desk.served import Served
from swarm.grammar import vocabulary
from swarm.wire.messages import Manifest
from tests.integration.fake_broker import tokenizer_files

Json = dict[str, Any]
COUNTS = Counts(11, 5, 3)


def served(aliases: tuple[str, ...] = ()) -> Served:
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
    made = Served.of(manifest, text, 128, aliases)
    made.words = vocabulary(text.tokenizer.to_str(), manifest.eos_token_ids)
    return made


def call(number: int, name: str, *texts: str) -> list[Part]:
    """A whole call."""
    begins = CallBegins(0, number, f"call_{number}", name)
    return [begins, *(CallText(0, number, text) for text in texts), CallEnds(0, number)]


def said(*texts: str) -> list[Part]:
    return [Text(0, text) for text in texts]


def streamed(writer: Writer, parts: Sequence[Part], counts: Counts = COUNTS) -> list[Json]:
    """The events of a stream; each is named after its type."""
    events = [*writer.head(counts.prompt)]
    for part in parts:
        events += writer.write(part)
    return [decoded(event) for event in [*events, *writer.tail(counts)]]


def decoded(event: Sse) -> Json:
    body: Json = msgspec.json.decode(event.data)
    assert event.event == body["type"]
    return body


STOPPED = End(0, "stop", 5)
CUT = End(0, "length", 5)
CALLED = End(0, "tool_calls", 5)
