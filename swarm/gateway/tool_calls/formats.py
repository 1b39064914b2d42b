"""Registry of tool-call formats, and detection of a model's format.

Packages can add formats: an entry point of the group ``swarm.tool_families`` names a function that takes the model's
special and added tokens (ids by text) and returns a ToolCallFormat. Those are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from swarm.gateway.plugins import load_plugins
from swarm.gateway.tool_calls.deepseek import deepseek, deepseek_unfenced
from swarm.gateway.tool_calls.format import ToolCallFormat
from swarm.gateway.tool_calls.grammars import AddedTokens
from swarm.gateway.tool_calls.granite import granite, phi
from swarm.gateway.tool_calls.harmony import harmony
from swarm.gateway.tool_calls.hermes import hermes, plain
from swarm.gateway.tool_calls.llama import llama3
from swarm.gateway.tool_calls.mistral import mistral, mistral_args
from swarm.gateway.tool_calls.qwen_coder import coder

GROUP = "swarm.tool_families"

FormatFactory = Callable[[AddedTokens], ToolCallFormat]

# In the order in which they are tried: formats with specific marks come before formats whose marks are common.
BUILT_IN: Mapping[str, FormatFactory] = {
    "harmony": harmony,
    "deepseek": deepseek,
    "deepseek-v3.1": deepseek_unfenced,
    "mistral-args": mistral_args,
    "mistral": mistral,
    "qwen3-coder": coder,
    "phi": phi,
    "granite": granite,
    "hermes": hermes,
    "llama3": llama3,
    "plain": plain,
}


def detect_format(template: str | None, added: AddedTokens | None = None) -> ToolCallFormat:
    """Return the format of a chat template; ``plain`` if none fits, which describes the tools in a system message."""
    formats = (make(added or {}) for make in all_formats().values())
    return next(family for family in formats if family.fits(template or ""))


def visible_marks(tool_format: ToolCallFormat, added: AddedTokens) -> tuple[int, ...]:
    """Return the tokens that must appear as text so that calls of this format are found."""
    return tuple(added[mark] for mark in tool_format.marks if mark in added)


@cache
def all_formats() -> Mapping[str, FormatFactory]:
    """Return the formats of installed packages, then the built-in ones."""
    return {**load_plugins(GROUP, "tool-call format"), **BUILT_IN}
