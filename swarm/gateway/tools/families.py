"""Which family a model belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.gateway.ask import ToolUse
from swarm.gateway.errors import unsupported
from swarm.gateway.tools.family import CallReader, Family, Found, Said
from swarm.params import Grammar


class _Reader:
    def push(self, text: str) -> Sequence[Found]:
        return (Said(text),)

    def finish(self) -> Sequence[Found]:
        return ()


class _NoTools:
    name = "none"
    marks: tuple[str, ...] = ()

    def fits(self, template: str) -> bool:
        return True

    def reader(self, use: ToolUse) -> CallReader:
        return _Reader()

    def forced(self, use: ToolUse) -> Grammar:
        raise unsupported("tool_choice")


def family_of(template: str) -> Family:
    return _NoTools()
