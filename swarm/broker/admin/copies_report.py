"""Copies of keys and values for ``swarmctl``: who holds which, how far they are behind, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.broker.recovery.kv_copies import copy_unit, lag
from swarm.broker.recovery.kv_holders import position_bytes
from swarm.broker.state import Plan, State, Worker
from swarm.broker.state.kv_copies import CopyRoute
from swarm.wire.messages import BLOCK, Json


def copies_as_json(state: State) -> list[Json]:
    """Return each route with its price: memory per position and with a full cache, and the traffic at the present rate.

    ``positions``: those held of all running sequences. ``behind``: the most that one of them lacks, in finished blocks.
    """
    return [_report_route(state, route) for route in state.kv_copies.replicas]


def _report_route(state: State, route: CopyRoute) -> Json:
    per_position = position_bytes(state, route.layers)
    positions = (min(s.kv, state.kv_copies.position(route.holder, s.id, route.layers)) for s in state.running)
    return {
        "source": _name(state, route.source),
        "holder": _name(state, route.holder),
        "layers": [route.layers.first, route.layers.stop],
        "positions": sum(positions),
        "behind": _behind(state, route),
        "bytes_per_position": per_position,
        "full_bytes": per_position * state.plans.kv_blocks * BLOCK,
        "bytes_per_s": round(per_position * state.kv_copies.positions_per_s),
    }


def describe_copies(state: State, plan: Plan) -> Iterator[str]:
    """Describe each route in a sentence with its price."""
    rate, kind = state.kv_copies.positions_per_s, "measured"
    if not rate and plan.forecast is not None and plan.forecast.step_s:
        rate, kind = plan.forecast.tokens_per_s, "predicted"
    for route in state.kv_copies.replicas:
        per_position = position_bytes(state, route.layers)
        full = per_position * state.plans.kv_blocks * BLOCK
        yield (
            f"{_name(state, route.holder)} holds copies of {_name(state, route.source)}'s keys and values in "
            f"{route.layers.label}: {per_position / 1024:.1f} KiB for each position, up to {full / 2**20:.1f} MiB "
            f"beside a full cache, {per_position * rate / 2**20:.2f} MiB/s at the {kind} {rate:.0f} positions/s "
            "(plan.standby_kv)"
        )


def held_as_json(state: State, worker: Worker) -> Json | None:
    """Return what a worker holds for others; None if it holds nothing and is to hold nothing."""
    held = state.kv_copies.held.get(worker.incarnation)
    routes = [_report_route(state, route) for route in state.kv_copies.replicas if route.holder == worker.incarnation]
    if worker.is_gone or (not routes and (held is None or not held.sequences)):
        return None
    return {
        "routes": [{key: row[key] for key in ("source", "layers", "positions", "behind")} for row in routes],
        "num_bytes": 0 if held is None else held.num_bytes,
        "free_bytes": None if held is None else held.free_bytes,
    }


def report_copies(state: State) -> Json:
    """Return totals over all routes, for statistics."""
    return {
        "routes": len(state.kv_copies.replicas),
        "bytes": sum(held.num_bytes for held in state.kv_copies.held.values()),
        "behind": max((_behind(state, route) for route in state.kv_copies.replicas), default=0),
    }


def _behind(state: State, route: CopyRoute) -> int:
    copies, unit = state.kv_copies, copy_unit(state, route.holder)
    return max((lag(s, copies.position(route.holder, s.id, route.layers), unit) for s in state.running), default=0)


def _name(state: State, incarnation: str) -> str:
    worker = state.workers.get(incarnation)
    return incarnation if worker is None else worker.name
