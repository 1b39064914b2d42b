"""What the gateway notes beside a request, so that any gateway can go on with its answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarm.gateway.ask import ToolUse
from swarm.wire.messages import MAX_MEMO, MAX_TOKENS

ApiName = Literal["chat", "completions", "responses", "messages"]


class NotedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that was offered: what is needed to read calls of it."""

    name: str
    custom: bool = False


def noted(use: ToolUse) -> tuple[NotedTool, ...]:
    """The tools that the model may call."""
    return tuple(NotedTool(tool.name, tool.custom) for tool in use.tools) if use.offered else ()


class Memo(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an answer is to be written. ``usage``: told at the end of a stream; ``told``: fields of the body that the API
    repeats in its answer."""

    api: ApiName
    created: int
    tools: tuple[NotedTool, ...] = ()
    parallel: bool = True
    usage: bool = False
    logprobs: bool = False
    hops: bool = False
    echoes: tuple[str, ...] = ()  # texts that are said first, by choice; or one for all choices
    told: dict[str, Any] = {}
    num_prompt: int = 0  # tokens; set when the prompt has been made

    def text(self) -> str:
        """As the broker keeps it. Too long: nothing, and the answer can't be read on from elsewhere."""
        written = msgspec.json.encode(self).decode()
        return written if len(written) <= MAX_MEMO else ""

    @property
    def is_kept(self) -> bool:
        """Whether the broker keeps it, with a prompt of any length."""
        return bool(msgspec.structs.replace(self, num_prompt=MAX_TOKENS).text())

    @classmethod
    def read(cls, text: str) -> Memo | None:
        """None if it isn't one of ours."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except msgspec.MsgspecError:
            return None
