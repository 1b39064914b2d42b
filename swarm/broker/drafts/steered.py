"""The rules that hold now: those of the settings, and before them what an operator has said (``state.steering``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swarm.broker.drafts.rules import PlanRules
from swarm.broker.state import Plan, State
from swarm.wire.messages import LayerRange


def steered(state: State, rules: PlanRules, of: Plan | None) -> PlanRules:
    """Put the operator's word before the settings'. Who is cordoned keeps its layers of the plan ``of``, and gets none
    where it has none there."""
    said = state.steering
    kept = dict(_kept(state, of))
    idle = {name for name in said.cordoned if name not in kept}
    return replace(
        rules,
        objective=said.objective or rules.objective,
        pins={**rules.pins, **said.pins, **kept},
        caps={**rules.caps, **said.caps},
        exclude=rules.exclude | said.exclude | said.drained | idle,
        margin=rules.margin if said.margin is None else said.margin,
    )


def without_the_cordoned(state: State, rules: PlanRules) -> PlanRules:
    """If there is no plan in which they keep what they have, one must do without them."""
    return replace(rules, exclude=rules.exclude | set(state.steering.cordoned), pins=_less(state, rules))


def _less(state: State, rules: PlanRules) -> dict[str, LayerRange]:
    return {name: layers for name, layers in rules.pins.items() if name not in state.steering.cordoned}


def _kept(state: State, of: Plan | None) -> Iterator[tuple[str, LayerRange]]:
    """Without a plan, what they served when they were cordoned, if they still hold it."""
    for worker in state.workers.values():
        known = state.steering.cordoned.get(worker.name)
        if worker.is_gone or known is None:
            continue
        stage = None if of is None else of.stage_of(worker.incarnation)
        if stage is not None:
            yield worker.name, stage.layers
        elif of is None and worker.layers == known:
            yield worker.name, known
