"""Switches of thinking: the variables with which a chat template turns thinking on and off, or sets how much of it.

Clients ask for thinking in the words of their API. Templates have no common word for it, so each template's variables
are found by reading it, and their effect by rendering a small conversation (``probe_switches``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta

from swarm.client.text.template import MAX_SOURCE, make_environment
from swarm.client.text.tokenizer import TextModel
from swarm.errors import InvalidRequest
from swarm.gateway.completion_request import ReasoningOptions

# Variables that are true or false, in the order of how common they are.
BOOLEANS = ("enable_thinking", "thinking", "reasoning")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"

# For each effort that clients ask for, the values to try, best first. The first that the template names is used, else
# the first of the common ones.
_COMMON = ("low", "medium", "high")
_EFFORTS: Mapping[str, Sequence[str]] = {
    "none": ("none", "minimal", "low"),
    "minimal": ("minimal", "low"),
    "low": ("low", "minimal"),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
EFFORTS = tuple(_EFFORTS)
_PROBE = ({"role": "user", "content": "ask"},)


@dataclass(frozen=True, slots=True)
class ThinkingSwitches:
    """Variables of a chat template that concern thinking."""

    booleans: tuple[str, ...] = ()
    is_on: bool = False  # without any variable, the booleans are on
    efforts: Mapping[str, str] | None = None  # the template's value for each effort; None: it has no variable for it
    takes_budget: bool = False

    def variables(self, options: ReasoningOptions) -> dict[str, Any]:
        """Return the variables that express these options; those that the template lacks are left out."""
        enabled = options.enabled
        if enabled is None and options.effort is not None:
            enabled = options.effort != "none"
        variables: dict[str, Any] = {} if enabled is None else dict.fromkeys(self.booleans, enabled)
        effort = "none" if options.enabled is False else options.effort
        if effort is not None and self.efforts is not None and effort in self.efforts:
            variables[EFFORT] = self.efforts[effort]
        if options.budget is not None and self.takes_budget:
            variables[BUDGET] = options.budget
        return variables

    def is_thinking(self, variables: Mapping[str, Any]) -> bool:
        """Whether these variables turn thinking on by a switch of the template."""
        given = [variables[name] for name in self.booleans if name in variables]
        return bool(self.booleans) and bool(given[0] if given else self.is_on)


def probe_switches(text: TextModel) -> ThinkingSwitches:
    """Find the variables in the model's chat template."""
    names = _find_variables(text.template_source)
    booleans = tuple(name for name in BOOLEANS if name in names)
    return ThinkingSwitches(
        booleans,
        is_on=bool(booleans) and _render(text, {}) == _render(text, dict.fromkeys(booleans, True)),
        efforts=_probe_efforts(text) if EFFORT in names else None,
        takes_budget=BUDGET in names,
    )


def _find_variables(source: str) -> set[str]:
    if len(source) > MAX_SOURCE:
        return set()
    try:
        return meta.find_undeclared_variables(make_environment().parse(source))
    except (jinja2.TemplateError, RecursionError):
        return set()


def _probe_efforts(text: TextModel) -> dict[str, str]:
    """Return the template's value for each effort, if it takes one."""
    source = text.template_source
    named = {value for value in EFFORTS if f"'{value}'" in source or f'"{value}"' in source}
    efforts: dict[str, str] = {}
    for effort, values in _EFFORTS.items():
        known = [value for value in values if value in named] + [value for value in values if value in _COMMON]
        fits = next((value for value in known if _render(text, {EFFORT: value}) is not None), None)
        if fits is not None:
            efforts[effort] = fits
    return efforts


def _render(text: TextModel, variables: Mapping[str, Any]) -> str | None:
    """Render a small conversation. Returns None if the template refuses it."""
    try:
        return text.render_chat(_PROBE, **variables)
    except InvalidRequest:
        return None
