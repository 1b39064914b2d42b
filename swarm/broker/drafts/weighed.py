"""Alternatives that came close to the active plan, and why they are not made: searched for only on demand.

Reported is the plan that would be made if none were active, then the one that is quickest by its figures alone. Where
both are the active plan, the best plan with one worker less shows what the active one was preferred to.
"""

from __future__ import annotations

from swarm.broker.drafts.candidates import Option, Proposal, Table
from swarm.broker.planner.explain import MAX_EXPLAINED, Weighed, quicker
from swarm.broker.planner.problem import TOLERANCE
from swarm.broker.planner.solve import EXACT
from swarm.broker.state import Plan

IN_TURNS = (
    "stages that take turns on the cores of one machine don't make each other quicker: each worker gets an even "
    "share, and the cost of one more stage is shown but not counted (for the objective latency it is)"
)
EQUAL = f"within {TOLERANCE:.0%} plans count as equal, since measurements are not more exact: this one moves less"
NOT_FOUND = "with this many workers not every plan is searched, and it was not found when this one was made"
DUE = "a change to it is due"


def weigh(table: Table, stands: Proposal, made: Proposal, current: Plan | None, margin: float) -> tuple[Weighed, ...]:
    """Return the alternatives. ``made``: the plan that would be made if none were active; ``current``: the active plan,
    if there is one."""
    now_s, found = stands.forecast.step_s, list[Weighed]()
    if made.named != stands.named:
        found.append(Weighed(made.named, made.forecast.step_s, now_s, _why_kept(made, now_s, current, margin)))
    quickest = table.quickest()
    known = {stands.named, *(each.shares for each in found)}
    if quickest is not None and quickest.shares not in known and quicker(quickest.step_s, now_s):
        why = _why_not(quickest, stands)
        if not found or why == IN_TURNS:
            found.append(Weighed(quickest.shares, quickest.step_s, now_s, why))
    return tuple(found) or _with_one_less(table, stands)


def _why_kept(made: Proposal, now_s: float, current: Plan | None, margin: float) -> str:
    if current is None or made.is_worth_it(current, margin):
        return DUE
    gain = quicker(made.forecast.step_s, now_s)
    if not gain:
        return "it is no quicker, so nothing is moved for it"
    return f"{gain}, and layers are moved only for more than {margin:.0%} (plan.margin; swarmctl rebalance moves them)"


def _why_not(quickest: Option, stands: Proposal) -> str:
    told = stands.forecast
    if quickest.takes_turns and told.takes_turns and told.objective == "throughput":
        return IN_TURNS
    return EQUAL if told.step_s <= quickest.step_s * (1 + TOLERANCE) else NOT_FOUND


def _with_one_less(table: Table, stands: Proposal) -> tuple[Weighed, ...]:
    if len(table) > EXACT:
        return ()
    pairs = zip(stands.shares, stands.named, strict=True)
    used = [name for (incarnation, _), (name, _) in pairs if incarnation]  # assumed workers are not taken away
    options = [each for name in used[:MAX_EXPLAINED] if (rest := table.without(name)) and (each := rest.quickest())]
    if not options:
        return ()
    best, now_s = min(options, key=lambda option: option.step_s), stands.forecast.step_s
    loss = quicker(now_s, best.step_s)
    return (Weighed(best.shares, best.step_s, now_s, f"this one is {loss}" if loss else "it is no quicker"),)
