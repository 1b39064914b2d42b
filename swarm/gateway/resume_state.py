"""Resume state: data stored with a request at the broker, so that any gateway can continue its answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarm.gateway.completion_request import ToolOptions
from swarm.gateway.reasoning.format import ReasoningStart
from swarm.wire.messages import MAX_MEMO, MAX_TOKENS

ApiName = Literal["chat", "completions", "responses", "messages", "ollama"]


class OfferedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """An offered tool, reduced to what is needed to parse calls of it."""

    name: str
    custom: bool = False


def offered_tools(use: ToolOptions) -> tuple[OfferedTool, ...]:
    """Return the tools that the model may call."""
    return tuple(OfferedTool(tool.name, tool.custom) for tool in use.tools) if use.are_offered else ()


class ResumeState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State from which any gateway can write a request's answer. ``usage``: report token counts at the end of a stream.
    ``told``: fields of the body that the API repeats in its answer."""

    api: ApiName
    created: int
    tools: tuple[OfferedTool, ...] = ()
    parallel: bool = True
    usage: bool = False
    logprobs: bool = False
    hops: bool = False
    special: bool = False  # the answer's text includes special tokens
    echoes: tuple[str, ...] = ()  # texts that precede the answer, one per choice, or one for all choices
    told: dict[str, Any] = {}
    num_prompt: int = 0  # tokens; set when the prompt has been made
    adapter: str = ""  # that the request named as its model
    reasoning: ReasoningStart = "none"  # how the answer begins; set when the prompt has been made

    def encode(self) -> str:
        """Encode the state for the broker. Returns "" if it is too long; then the answer cannot be resumed."""
        encoded = msgspec.json.encode(self).decode()
        return encoded if len(encoded) <= MAX_MEMO else ""

    @property
    def can_be_stored(self) -> bool:
        """Whether the broker can store this state, with a prompt of any length."""
        return bool(msgspec.structs.replace(self, num_prompt=MAX_TOKENS).encode())

    @classmethod
    def decode(cls, text: str) -> ResumeState | None:
        """Decode the state. Returns None if a gateway did not write it."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except msgspec.MsgspecError:
            return None
