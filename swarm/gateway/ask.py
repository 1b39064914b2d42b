"""A request as the gateway understands it, whatever API it came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.params import Grammar, SamplingParams

Json = dict[str, Any]
Choice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """Something the model may call. A custom one takes free text, perhaps by a grammar, instead of JSON."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False
    custom: bool = False
    grammar: Grammar | None = None  # of a custom tool's text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether they must be used."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str = ""  # the tool that must be called, if ``choice`` says so
    parallel: bool = True  # several calls in one answer

    @property
    def offered(self) -> bool:
        """May the model call any of them?"""
        return bool(self.tools) and self.choice != "none"


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and what is wanted of it. Either ``messages`` (in the form that chat templates take: OpenAI's chat
    messages) or ``prompt``. ``prefix`` (of an answer that the caller has begun) is for templates that can go on."""

    params: SamplingParams
    messages: tuple[Json, ...] | None = None
    prompt: str | tuple[int, ...] = ""
    tools: ToolUse = ToolUse()
    template: Mapping[str, Any] = field(default_factory=dict)  # variables for the chat template
    priority: int = 0
    deadline_s: float | None = None
    timeout_s: float | None = None
    hops: bool = False
    keep_s: float = 0.0  # for which the answer goes on when nobody reads it
    called: Mapping[str, str] = field(default_factory=dict)  # what its API calls parameters, if not as we do

    def name_of(self, parameter: str) -> str:
        """What the client knows it by."""
        if parameter == "grammar" and self.tools.choice in ("required", "named"):
            return "tools"
        return self.called.get(parameter, parameter)
