"""The broker's model as the gateway needs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llguidance import LLTokenizer

from swarm.client.text.tokenizer import TextModel
from swarm.gateway.errors import Problem
from swarm.gateway.tools.chat import Habits, learn
from swarm.gateway.tools.families import family_of, visible
from swarm.gateway.tools.family import Family
from swarm.wire.messages import Manifest


@dataclass(slots=True)
class Served:
    """The served model. ``max_context``: positions that a sequence can currently have. ``aliases``: other names that
    clients may use for the model; ``*`` allows any."""

    manifest: Manifest
    text: TextModel | None
    max_context: int
    family: Family
    habits: Habits
    aliases: tuple[str, ...] = ()
    # the vocabulary as bytes per token; None without a tokenizer
    words: LLTokenizer | None = field(default=None, repr=False)

    @classmethod
    def of(cls, manifest: Manifest, text: TextModel | None, max_context: int, aliases: tuple[str, ...]) -> Served:
        """Describe a model: determine its tool-call format and the features of its chat template."""
        if text is None:
            return cls(manifest, None, max_context, family_of(None), Habits(), aliases)
        family = family_of(text.template_source, text.added)
        return cls(manifest, text, max_context, family, learn(text) if text.template else Habits(), aliases)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def marks(self) -> tuple[int, ...]:
        """The special tokens with which the model marks tool calls."""
        return () if self.text is None else visible(self.family, self.text.added)

    def is_called(self, name: str) -> bool:
        """Whether clients may use this name for the model."""
        return name == self.name or name in self.aliases or "*" in self.aliases

    def check_name(self, name: str | None) -> None:
        if name is None or self.is_called(name):
            return
        text = f"the model {name!r} does not exist: this swarm serves {self.name!r}"
        raise Problem(404, text, param="model", code="model_not_found")

    def needs_text(self, what: str) -> TextModel:
        if self.text is None:
            raise Problem(400, f"this model has no tokenizer: {what}", param="prompt", code="tokenizer")
        return self.text

    def room(self, num_prompt: int) -> int:
        """Return how many tokens an answer may have, at least 1: the broker reports the error if there is no space."""
        return max(1, min(self.max_context or self.manifest.context, self.manifest.context) - num_prompt)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        content: bytes = b"" if self.words is None else self.words.decode_bytes([token])
        return content.removeprefix(b"\xff") if content.startswith(b"\xff<") else content
