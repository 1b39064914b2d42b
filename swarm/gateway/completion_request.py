"""A completion request as the gateway processes it, independent of its API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.params import Grammar, SamplingParams, SpeculationMode

Json = dict[str, Any]
ToolChoice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. A custom tool takes free text, perhaps restricted by a grammar, instead of
    JSON."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False
    custom: bool = False
    grammar: Grammar | None = None  # of a custom tool's text


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request, and whether the model must call one."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    required_name: str = ""  # the tool that must be called, if ``choice`` is "named"
    parallel: bool = True  # allow several calls in one answer

    @property
    def are_offered(self) -> bool:
        """Whether the model may call any of the tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def have_strict(self) -> bool:
        """Whether the model may call a tool whose arguments must follow its schema."""
        return self.are_offered and any(tool.strict for tool in self.tools)


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How much the model may think before it answers, as far as its chat template knows. None: not requested."""

    enabled: bool | None = None
    effort: str | None = None  # "none" to "max"
    budget: int | None = None  # tokens


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One prompt with its parameters. Either ``messages`` (in the form that chat templates take: OpenAI's chat
    messages) or ``prompt`` is set."""

    params: SamplingParams
    messages: tuple[Json, ...] | None = None
    continues: bool = False  # the answer continues the last message, which is the assistant's
    prompt: str | tuple[int, ...] = ""
    tools: ToolOptions = ToolOptions()
    template: Mapping[str, Any] = field(default_factory=dict)  # variables for the chat template
    reasoning: ReasoningOptions = ReasoningOptions()
    priority: int = 0
    deadline_s: float | None = None
    timeout_s: float | None = None
    hops: bool = False
    show_special: bool = False  # the answer's text includes special tokens
    # limit of an answer whose length is the rest of the context; 0: no token is drawn; None: only the context
    rest_limit: int | None = None
    pixels: tuple[bytes, ...] = ()  # of the images in ``params``
    keep_s: float = 0.0  # seconds that the answer continues without a reader
    speculation: SpeculationMode | None = None  # what may guess tokens ahead; None: the broker's setting
    # the API's names of parameters, where they differ from ours
    api_names: Mapping[str, str] = field(default_factory=dict)

    def client_name_of(self, parameter: str) -> str:
        """Return the client's name for a parameter."""
        comes_from_tools = self.tools.choice in ("required", "named") or (
            self.tools.have_strict and self.params.grammar is None
        )
        if parameter == "grammar" and comes_from_tools:
            return "tools"
        return self.api_names.get(parameter, parameter)
