"""The families, and which of them a model belongs to.

Packages can bring families of their own: an entry point of the group ``swarm.tool_families`` names a function that
takes the model's special and added tokens (their ids by their texts) and returns a Family. Those are asked first.
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

# In the order in which they are asked: those whose marks say more stand before those whose marks others use as well.
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
    """The family that a chat template belongs to. ``plain`` if none does: then a system text tells of the tools."""
    made = (make(added or {}) for make in all_families().values())
    return next(family for family in made if family.fits(template or ""))


def visible(family: Family, added: Added) -> tuple[int, ...]:
    """The tokens that must be seen as text, for the family's calls to be found."""
    return tuple(added[mark] for mark in family.marks if mark in added)


@cache
def all_families() -> Mapping[str, Make]:
    """Those of installed packages, then ours."""
    return {**_plugged(), **OWN}


def _plugged() -> dict[str, Make]:
    found: dict[str, Make] = {}
    for point in entry_points(group=GROUP):
        try:
            found[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            reason = f"the family of tool calls {point.name!r} ({point.value}) can't be loaded: {error}"
            raise ModelError(reason) from error
    return found
