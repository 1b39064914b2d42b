"""Alternatives to the active plan, and why the broker does not change to them. They are searched for only on demand.

Reported are the plan that would be made if none were active, and the plan with the shortest predicted step. If both are
the active plan, the best plan with one worker less is reported instead, to show what the last worker gains.
"""

from __future__ import annotations

from swarm.broker.planner.explain import MAX_EXPLAINED, Alternative, describe_speedup
from swarm.broker.planner.problem import TOLERANCE
from swarm.broker.planner.solve import MAX_EXACT
from swarm.broker.planning.candidates import CandidatePool, PlanOption, Proposal
from swarm.broker.state import Plan

TAKES_TURNS_REASON = (
    "stages that take turns on the cores of one machine don't speed each other up, so each worker gets an even share; "
    "the cost of one more stage counts only for the objective latency"
)
EQUAL_REASON = (
    f"plans within {TOLERANCE:.0%} count as equal, as measurements are no more exact, and this plan moves fewer layers"
)
NOT_SEARCHED_REASON = "with this many workers not all plans are searched, and it was not found when this plan was made"
CHANGE_DUE = "the swarm will change to it"


def find_alternatives(
    table: CandidatePool, active: Proposal, fresh: Proposal, current: Plan | None, margin: float
) -> tuple[Alternative, ...]:
    """Return the alternatives. ``fresh``: the plan that would be made if none were active; ``current``: the active
    plan, if there is one."""
    now_s, alternatives = active.forecast.step_s, list[Alternative]()
    if fresh.named_shares != active.named_shares:
        alternatives.append(
            Alternative(fresh.named_shares, fresh.forecast.step_s, now_s, _kept_reason(fresh, now_s, current, margin))
        )
    quickest = table.quickest_option()
    listed = {active.named_shares, *(each.shares for each in alternatives)}
    if quickest is not None and quickest.shares not in listed and describe_speedup(quickest.step_s, now_s):
        why = _rejection_reason(quickest, active)
        if not alternatives or why == TAKES_TURNS_REASON:
            alternatives.append(Alternative(quickest.shares, quickest.step_s, now_s, why))
    return tuple(alternatives) or _find_with_one_less(table, active)


def _kept_reason(fresh: Proposal, now_s: float, current: Plan | None, margin: float) -> str:
    if current is None or fresh.is_worth_it(current, margin):
        return CHANGE_DUE
    gain = describe_speedup(fresh.forecast.step_s, now_s)
    if not gain:
        return "it is not faster, so no layers are moved"
    return f"it is {gain}, and layers move only for more than {margin:.0%} (plan.margin), or by swarmctl rebalance"


def _rejection_reason(quickest: PlanOption, active: Proposal) -> str:
    outlook = active.forecast
    if quickest.takes_turns and outlook.takes_turns and outlook.objective == "throughput":
        return TAKES_TURNS_REASON
    return EQUAL_REASON if outlook.step_s <= quickest.step_s * (1 + TOLERANCE) else NOT_SEARCHED_REASON


def _find_with_one_less(table: CandidatePool, active: Proposal) -> tuple[Alternative, ...]:
    if len(table) > MAX_EXACT:
        return ()
    pairs = zip(active.shares, active.named_shares, strict=True)
    used = [name for (incarnation, _), (name, _) in pairs if incarnation]  # assumed workers are not taken away
    options = [
        each
        for name in used[:MAX_EXPLAINED]
        if (rest := table.exclude_worker(name)) and (each := rest.quickest_option())
    ]
    if not options:
        return ()
    best, now_s = min(options, key=lambda option: option.step_s), active.forecast.step_s
    loss = describe_speedup(now_s, best.step_s)
    return (Alternative(best.shares, best.step_s, now_s, f"this plan is {loss}" if loss else "it is not faster"),)
