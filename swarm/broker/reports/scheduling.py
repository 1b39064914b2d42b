"""The scheduler's part of ``swarmctl stats``: its last decision, the queue, and measured costs of steps."""

from __future__ import annotations

from swarm.broker.state import State
from swarm.broker.state.ended_requests import ClientAccount, can_see
from swarm.params import PRIORITIES
from swarm.wire.messages import BLOCK, Json

MAX_TENANTS = 20  # tenants in the report, those with the longest queues


def report_scheduler(state: State) -> Json:
    """Return the scheduler's last decision. ``mode`` is the active one. ``prompt_throttle`` is what limited prompts in
    the last step that had any: "none", "pending" (shared out over the micro-batches), "kv" (blocks are short) or "time"
    (``broker.step_target_s``)."""
    decided, costs, plans = state.decision, state.costs, state.plans
    return {
        "mode": decided.mode,
        "depth": decided.depth,
        "steps_in_flight": len(state.in_flight),
        "step_budget": decided.step_budget,
        "prompt_tokens": decided.prompt_tokens,
        "prompt_throttle": decided.throttle,
        "pending_prompt_tokens": state.running.num_pending,
        "kv_used": (state.reserved_blocks - state.cached_blocks) * BLOCK,
        "kv_cached": state.cached_blocks * BLOCK,
        "kv_shared": state.shared.saved,
        "kv_capacity": plans.kv_blocks * BLOCK if plans.current else 0,
        "preemptions": int(state.counters.get("preemptions", 0)),
        "tokens_per_s": round(costs.tokens_per_s or 0.0, 1),
        "quickest_step_s": costs.min_step_s,
        "answers_fill": round(costs.fill_ratio, 3),
    }


def report_queue(state: State, account: ClientAccount | None = None) -> Json:
    """Return the numbers of waiting sequences: in total, by class, by tenant (with an account, only its own), and those
    that wait for a plan with more capacity."""
    tenants = [item for item in state.waiting.loads_by_tenant() if can_see(account, item[0])]
    return {
        "waiting": len(state.waiting),
        "too_large_for_now": len(state.waiting.aside),
        "classes": {
            class_name(priority): num for priority, num in sorted(state.waiting.counts_by_class().items())[::-1]
        },
        "tenants": {name: {"waiting": num, "served": int(served)} for name, num, served in tenants[:MAX_TENANTS]},
        "num_tenants": len(tenants),
    }


def class_name(priority: int) -> str:
    """Return the name of a priority class, or its number if it has none."""
    return next((name for name, value in PRIORITIES.items() if value == priority), str(priority))
