"""The broker's model as the gateway needs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from llguidance import LLTokenizer

from swarm.client.text.tokenizer import TextModel
from swarm.client.vectors import find_pooling
from swarm.errors import InvalidRequest
from swarm.gateway.errors import ApiError
from swarm.gateway.images import DEFAULT_RULES, ImageRules
from swarm.gateway.reasoning import formats as reasoning_formats
from swarm.gateway.reasoning.format import ReasoningFormat, ReasoningParser, ReasoningStart
from swarm.gateway.reasoning.switches import ThinkingSwitches, probe_switches
from swarm.gateway.tool_calls.format import ToolCallFormat
from swarm.gateway.tool_calls.formats import detect_format, visible_marks
from swarm.gateway.tool_calls.template_adapter import TemplateFeatures, probe_template
from swarm.params import SamplingParams
from swarm.wire.messages import Manifest

LATEST = ":latest"  # tag that Ollama's clients append to names
PROMPT_END = 64  # tokens of a prompt's end in which its template may have opened or ended thinking


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Values for requests that give none. ``max_tokens`` None: the API's own."""

    max_tokens: int | None = None
    temperature: float = 1.0


API_DEFAULTS = RequestDefaults()


@dataclass(slots=True)
class ServedModel:
    """The served model. ``max_context``: positions that a sequence can currently have. ``aliases``: other names that
    clients may use for the model; ``*`` allows any. ``ignores_unknown_fields``: bodies may have unknown fields.
    ``defaults``: for requests that give no value. ``images``: limits of images."""

    manifest: Manifest
    text: TextModel | None
    max_context: int
    tool_format: ToolCallFormat
    template_features: TemplateFeatures
    aliases: tuple[str, ...] = ()
    reasoning_format: ReasoningFormat | None = None  # None: the model's template has no marks of thinking
    switches: ThinkingSwitches = field(default_factory=ThinkingSwitches)
    # the vocabulary as bytes per token; None without a tokenizer
    vocabulary: LLTokenizer | None = field(default=None, repr=False)
    ignores_unknown_fields: bool = False
    defaults: RequestDefaults = API_DEFAULTS
    images: ImageRules = DEFAULT_RULES
    adapter: str = ""  # the one that the request names as its model

    @classmethod
    def create(
        cls, manifest: Manifest, text: TextModel | None, max_context: int, aliases: tuple[str, ...]
    ) -> ServedModel:
        """Describe a model: determine its tool-call and reasoning formats, and the features of its chat template."""
        if text is None:
            return cls(manifest, None, max_context, detect_format(None), TemplateFeatures(), aliases)
        tool_format = detect_format(text.template_source, text.added)
        return cls(
            manifest,
            text,
            max_context,
            tool_format,
            probe_template(text) if text.template else TemplateFeatures(),
            aliases,
            reasoning_formats.detect_format(text.template_source),
            probe_switches(text) if text.template else ThinkingSwitches(),
        )

    @property
    def name(self) -> str:
        return self.adapter or self.manifest.name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, which clients use as names of models."""
        return tuple(adapter.name for adapter in self.manifest.adapters)

    def named(self, model: str | None) -> ServedModel:
        """Return the model as a client names it: with an adapter, if that is the name of one."""
        if model is None or self.manifest.name in (model, model.removesuffix(LATEST)):
            return self
        adapter = next((name for name in self.adapters if name in (model, model.removesuffix(LATEST))), "")
        return replace(self, adapter=adapter) if adapter else self

    def adapted(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the adapter."""
        return msgspec.structs.replace(params, adapter=self.adapter) if self.adapter else params

    @property
    def embeds(self) -> bool:
        """Whether the model makes embeddings."""
        with suppress(InvalidRequest):
            find_pooling(self.manifest)
            return True
        return False

    @property
    def call_marks(self) -> tuple[int, ...]:
        """The special tokens with which the model marks tool calls."""
        return () if self.text is None else visible_marks(self.tool_format, self.text.added)

    @property
    def reasoning_marks(self) -> tuple[int, ...]:
        """The special tokens with which the model marks its thinking."""
        if self.text is None or self.reasoning_format is None:
            return ()
        return reasoning_formats.visible_marks(self.reasoning_format, self.text.added)

    def reasoning_start(self, ids: Sequence[int]) -> ReasoningStart:
        """Return how the answer to this prompt begins."""
        if self.text is None or self.reasoning_format is None:
            return "none"
        return self.reasoning_format.start(self.text.decode_all(ids[-PROMPT_END:]))

    def reasoning_parser(self, start: ReasoningStart) -> ReasoningParser | None:
        """Return a new parser for the thinking of an answer that begins in this way; None if none is split off."""
        if self.reasoning_format is None or start == "none":
            return None
        return self.reasoning_format.parser(is_opened=start == "opened")

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """The special tokens, which answers do not show unless a request asks for them."""
        return () if self.text is None else tuple(self.text.silent)

    def has_name(self, name: str) -> bool:
        """Whether clients may use this name for the model."""
        return self.is_own_name(name) or not {name, name.removesuffix(LATEST), "*"}.isdisjoint(self.aliases)

    def is_own_name(self, name: str) -> bool:
        """Whether this is the model's name or an adapter's, and no alias."""
        return not {self.manifest.name, *self.adapters}.isdisjoint((name, name.removesuffix(LATEST)))

    def check_name(self, name: str | None) -> None:
        if name is None or self.has_name(name):
            return
        names = ", ".join(map(repr, (self.manifest.name, *self.adapters)))
        text = f"the model {name!r} does not exist: this swarm serves {names}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def require_text_model(self, instead: str) -> TextModel:
        if self.text is None:
            raise ApiError(400, f"this model has no tokenizer: {instead}", param="prompt", code="tokenizer")
        return self.text

    def max_answer_tokens(self, num_prompt: int) -> int:
        """Return how many tokens an answer may have, at least 1: the broker reports the error if there is no space."""
        return max(1, min(self.max_context or self.manifest.context, self.manifest.context) - num_prompt)

    def temperature_of(self, given: float | None) -> float:
        """Return a request's temperature: the given one, or the default."""
        return self.defaults.temperature if given is None else given

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        content: bytes = b"" if self.vocabulary is None else self.vocabulary.decode_bytes([token])
        return content.removeprefix(b"\xff") if content.startswith(b"\xff<") else content
