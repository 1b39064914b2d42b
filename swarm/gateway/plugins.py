"""Formats that installed packages add to the built-in ones, by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from swarm.errors import ModelError


def load_plugins(group: str, kind: str) -> dict[str, Any]:
    """Return what the entry points of a group name, by their names. ``kind``: what they are, for errors. Raises
    ModelError if one cannot be loaded."""
    plugins: dict[str, Any] = {}
    for point in entry_points(group=group):
        try:
            plugins[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            reason = f"the {kind} {point.name!r} ({point.value}) can't be loaded: {error}"
            raise ModelError(reason) from error
    return plugins
