"""Registry of reasoning formats, and detection of a model's format.

Packages can add formats: an entry point of the group ``swarm.reasoning_formats`` names a function that returns a
ReasoningFormat. Those are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from swarm.gateway.plugins import load_plugins
from swarm.gateway.reasoning import marks
from swarm.gateway.reasoning.format import ReasoningFormat
from swarm.gateway.reasoning.harmony import harmony

GROUP = "swarm.reasoning_formats"

FormatFactory = Callable[[], ReasoningFormat]

# In the order in which they are tried: formats with specific marks come before formats whose marks are common.
BUILT_IN: Mapping[str, FormatFactory] = {
    "harmony": harmony,
    "seed": marks.seed,
    "magistral": marks.magistral,
    "command": marks.command,
    "apertus": marks.apertus,
    "kimi": marks.kimi,
    "granite": marks.granite,
    "exaone": marks.exaone,
    "think": marks.think,
}


def detect_format(template: str | None) -> ReasoningFormat | None:
    """Return the format of a chat template; None if it has no marks of thinking."""
    return next((found for make in all_formats().values() if (found := make()).fits(template or "")), None)


def visible_marks(reasoning_format: ReasoningFormat, added: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tokens that must appear as text so that thinking of this format is found."""
    return tuple(added[mark] for mark in reasoning_format.marks if mark in added)


@cache
def all_formats() -> Mapping[str, FormatFactory]:
    """Return the formats of installed packages, then the built-in ones."""
    return {**load_plugins(GROUP, "reasoning format"), **BUILT_IN}
