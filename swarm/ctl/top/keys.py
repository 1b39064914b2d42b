"""Key handling: the screen's state and a key go in, the next state and possibly a command come out. Pure.

Destructive commands require confirmation: ``y`` executes them, any other key cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.ctl.top.view import TopItem


@dataclass(frozen=True, slots=True)
class TopCommand:
    """A command for the broker: ``verb`` is drain, uncordon or cancel."""

    verb: str
    item: TopItem


@dataclass(frozen=True, slots=True)
class TopState:
    """State of the screen. ``asked``: command that waits for confirmation. ``ends``: the user quits. ``said``: text of
    the status line."""

    chosen: TopItem | None = None
    asked: TopCommand | None = None
    said: str = ""
    ends: bool = False


# Key -> command, and the kind of item that it needs.
_VERBS = {"d": ("drain", "worker"), "u": ("uncordon", "worker"), "c": ("cancel", "request")}


def handle_key(screen: TopState, key: str, items: Sequence[TopItem]) -> tuple[TopState, TopCommand | None]:
    """Handle a key: a letter, or up, down. ``items``: what can be selected now."""
    screen = drop_missing(screen, items)
    if screen.asked is not None:
        order = screen.asked if key == "y" else None
        return replace(screen, asked=None, said="" if order else "cancelled"), order
    if key == "q":
        return replace(screen, ends=True), None
    if key in ("up", "down"):
        return replace(screen, chosen=_next_item(screen.chosen, 1 if key == "down" else -1, items), said=""), None
    if key in _VERBS:
        return _request_command(screen, *_VERBS[key])
    return screen, None


def drop_missing(screen: TopState, items: Sequence[TopItem]) -> TopState:
    """Return the state for these items: if the selected one is gone, select the first and drop a pending
    confirmation."""
    if screen.chosen in items:
        return screen
    return replace(screen, chosen=items[0] if items else None, asked=None)


def _request_command(screen: TopState, verb: str, kind: str) -> tuple[TopState, TopCommand | None]:
    item = screen.chosen
    if item is None or item.kind != kind:
        return replace(screen, said=f"{verb}: choose a {kind} first (↑↓)"), None
    order = TopCommand(verb, item)
    if verb == "uncordon":
        return replace(screen, said=""), order
    return replace(screen, asked=order, said=f"{verb} {kind} {item.name}? y: yes, any other key: no"), None


def _next_item(chosen: TopItem | None, step: int, items: Sequence[TopItem]) -> TopItem | None:
    if chosen is None or chosen not in items:
        return items[0] if items else None
    return items[max(0, min(len(items) - 1, items.index(chosen) + step))]
