"""Fields of request bodies about thinking: whether the model thinks before it answers, and how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from swarm.gateway.apis.bodies import Body
from swarm.gateway.completion_request import ReasoningOptions
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.gateway.reasoning.switches import EFFORTS

MAX_BUDGET = 1_000_000  # tokens
_SWITCHES = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}  # types of other servers' thinking
_BUDGETS = ("thinking_budget", "max_reasoning_tokens", "thinking_token_budget")  # the same, as servers name it


class ConversationBody(Body):
    """Fields of conversations, as other servers name them."""

    enable_thinking: Annotated[bool | None, Field(description="Swarm extension: think before the answer.")] = None
    thinking_budget: Annotated[int | None, Field(description="Swarm extension: most tokens of thinking.")] = None
    max_reasoning_tokens: Annotated[int | None, Field(description="The same as thinking_budget.")] = None
    thinking_token_budget: Annotated[int | None, Field(description="The same as thinking_budget.")] = None


def to_reasoning_options(
    body: ConversationBody, effort: tuple[str, object], *, enabled: bool | None = None, budget: tuple[str, object]
) -> ReasoningOptions:
    """Return the options of a body. ``effort`` and ``budget`` are the API's own fields, by name and value. Raises
    ApiError."""
    name, value = effort
    if value is not None and (not isinstance(value, str) or value not in EFFORTS):
        raise invalid_field(name, f"must be one of {', '.join(EFFORTS)}, not {value!r}")
    given = [budget, *((each, getattr(body, each)) for each in _BUDGETS)]
    limits = [check_budget(field, number) for field, number in given if number is not None]
    limit = min(limits, default=None)
    enabled = body.enable_thinking if body.enable_thinking is not None else enabled
    return ReasoningOptions(enabled=False if limit == 0 else enabled, effort=value, budget=limit)


def check_budget(field: str, value: object) -> int:
    """Return a budget of thinking. Raises ApiError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BUDGET:
        raise invalid_field(field, f"must be a number of tokens between 0 and {MAX_BUDGET:,}, not {value!r}")
    return value


def read_thinking(
    thinking: Mapping[str, Any], switches: Mapping[str, bool | None]
) -> tuple[bool | None, tuple[str, object]]:
    """Return whether to think (None: as the template does by itself), and the budget, by name and value, of an object
    with ``type`` and ``budget_tokens``. ``switches``: the types. Raises ApiError."""
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in switches:
        raise invalid_field("thinking.type", f"must be one of {', '.join(switches)}")
    return switches[kind], ("thinking.budget_tokens", thinking.get("budget_tokens") if kind == "enabled" else None)


def chat_options(
    body: ConversationBody,
    effort: object,
    reasoning: Mapping[str, Any] | None,
    thinking: bool | Mapping[str, Any] | None = None,
) -> ReasoningOptions:
    """Return the options of a chat body: OpenAI's effort, or an object with more (``reasoning``), or what other servers
    take (``thinking``: a switch, or ``type`` and ``budget_tokens``). Raises ApiError."""
    given = reasoning or {}
    for name, value in given.items():
        if name not in ("effort", "max_tokens", "enabled") and value:
            raise unsupported_field(f"reasoning.{name}")
    enabled = given.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise invalid_field("reasoning.enabled", f"must be true or false, not {enabled!r}")
    named = ("reasoning_effort", effort) if effort is not None else ("reasoning.effort", given.get("effort"))
    budget: tuple[str, object] = ("reasoning.max_tokens", given.get("max_tokens"))
    if isinstance(thinking, bool):
        enabled = thinking if enabled is None else enabled
    elif thinking is not None:
        switch, other = read_thinking(thinking, _SWITCHES)
        enabled = switch if enabled is None else enabled
        budget = other if budget[1] is None else budget
    return to_reasoning_options(body, named, enabled=enabled, budget=budget)
