"""Resume state: data stored with a request at the broker, so that any gateway can continue its answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarm.gateway.ask import ToolUse
from swarm.wire.messages import MAX_MEMO, MAX_TOKENS

ApiName = Literal["chat", "completions", "responses", "messages"]


class NotedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """An offered tool, reduced to what is needed to parse calls of it."""

    name: str
    custom: bool = False


def noted(use: ToolUse) -> tuple[NotedTool, ...]:
    """Return the tools that the model may call."""
    return tuple(NotedTool(tool.name, tool.custom) for tool in use.tools) if use.offered else ()


class Memo(msgspec.Struct, frozen=True, omit_defaults=True):
    """State from which any gateway can write a request's answer. ``usage``: report token counts at the end of a stream.
    ``told``: fields of the body that the API repeats in its answer."""

    api: ApiName
    created: int
    tools: tuple[NotedTool, ...] = ()
    parallel: bool = True
    usage: bool = False
    logprobs: bool = False
    hops: bool = False
    echoes: tuple[str, ...] = ()  # texts that precede the answer, one per choice, or one for all choices
    told: dict[str, Any] = {}
    num_prompt: int = 0  # tokens; set when the prompt has been made

    def text(self) -> str:
        """Encode the state for the broker. Returns "" if it is too long; then the answer cannot be resumed."""
        written = msgspec.json.encode(self).decode()
        return written if len(written) <= MAX_MEMO else ""

    @property
    def is_kept(self) -> bool:
        """Whether the broker can store this state, with a prompt of any length."""
        return bool(msgspec.structs.replace(self, num_prompt=MAX_TOKENS).text())

    @classmethod
    def read(cls, text: str) -> Memo | None:
        """Decode the state. Returns None if a gateway did not write it."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except msgspec.MsgspecError:
            return None
