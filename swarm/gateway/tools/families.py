"""Registry of tool-call formats, and detection of a model's format.

Packages can add formats: an entry point of the group ``swarm.tool_families`` names a function that takes the model's
special and added tokens (ids by text) and returns a ToolCallFormat. Those are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points

from swarm.errors import ModelError
from swarm.gateway.tools.coder import coder
from swarm.gateway.tools.deepseek import deepseek, deepseek_unfenced
from swarm.gateway.tools.family import Family
from swarm.gateway.tools.grammars import Added
from swarm.gateway.tools.granite import granite, phi
from swarm.gateway.tools.hermes import hermes, plain
from swarm.gateway.tools.llama import llama3
from swarm.gateway.tools.mistral import mistral, mistral_args

GROUP = "swarm.tool_families"

Make = Callable[[Added], Family]

# In the order in which they are tried: formats with specific marks come before formats whose marks are common.
OWN: Mapping[str, Make] = {
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


def family_of(template: str | None, added: Added | None = None) -> Family:
    """Return the format of a chat template; ``plain`` if none fits, which describes the tools in a system message."""
    made = (make(added or {}) for make in all_families().values())
    return next(family for family in made if family.fits(template or ""))


def visible(family: Family, added: Added) -> tuple[int, ...]:
    """Return the tokens that must appear as text so that calls of this format are found."""
    return tuple(added[mark] for mark in family.marks if mark in added)


@cache
def all_families() -> Mapping[str, Make]:
    """Return the formats of installed packages, then the built-in ones."""
    return {**_plugged(), **OWN}


def _plugged() -> dict[str, Make]:
    found: dict[str, Make] = {}
    for point in entry_points(group=GROUP):
        try:
            found[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            reason = f"the tool-call format {point.name!r} ({point.value}) can't be loaded: {error}"
            raise ModelError(reason) from error
    return found
