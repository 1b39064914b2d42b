"""Which workers hold copies of which layers' keys and values (``kv_copies``), by the policy ``plan.standby_kv``:

* ``neighbours``: one holder for each layer. Of the workers that keep the layer warm, the one with the most free memory
  is chosen; a worker that is busy computing counts for less. A holder stays as long as it can.
* ``all``: every worker that keeps the layer warm.

A worker holds copies only from workers that compute the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from swarm.broker.planner.standby import StandbyPolicy
from swarm.broker.state import StagePlan, State, Worker, WorkerState
from swarm.broker.state.kv_copies import CopyRoute
from swarm.broker.state.workers import RouteState
from swarm.wire.messages import LayerRange, layers_of

PROTOCOL = 4  # version with which workers can send and receive copies
CONNECTION_SHARE = 0.1  # of the throughput between two hosts that copies may take


def choose_routes(state: State, policy: StandbyPolicy) -> tuple[CopyRoute, ...]:
    """Return the routes of replicas under the active plan."""
    plan = state.plans.current
    if plan is None or policy == "none" or state.manifest is None:
        return ()
    present = {
        (r.source, layer): r.holder for r in state.kv_copies.replicas for layer in range(r.layers.first, r.layers.stop)
    }
    assigned: dict[str, int] = defaultdict(int)  # by holder: bytes per position of the layers that it got so far
    routes: list[CopyRoute] = []
    for stage in plan.stages:
        for layers, holders in _find_holders(state, stage):
            chosen = holders
            if policy == "neighbours":
                former = present.get((stage.incarnation, layers.first))
                best = max(holders, key=lambda holder: _score(state, holder, assigned[holder]))
                chosen = [former if former in holders else best]
            for holder in chosen:
                assigned[holder] += position_bytes(state, layers)
                routes.append(CopyRoute(stage.incarnation, holder, layers))
    return tuple(routes)


def _find_holders(state: State, stage: StagePlan) -> Iterator[tuple[LayerRange, list[str]]]:
    """Yield the stage's layers in ranges, each with the workers that may hold their copies."""
    able = [
        (worker.incarnation, layers_of(worker.warm_layers))
        for worker in state.workers.values()
        if _can_copy(state, stage.incarnation, worker) and _fits_connection(state, stage, worker)
    ]
    first, holders = stage.layers.first, [name for name, warm in able if stage.layers.first in warm]
    for layer in range(stage.layers.first + 1, stage.layers.stop + 1):
        those = [name for name, warm in able if layer in warm] if layer < stage.layers.stop else []
        if those == holders and layer < stage.layers.stop:
            continue
        if holders:
            yield LayerRange(first, layer), holders
        first, holders = layer, those


def _can_copy(state: State, source: str, holder: Worker) -> bool:
    """Whether a worker can send keys and values to another one, which can use them."""
    sender, bits, plans = state.workers[source], reported_bits(state, source), state.plans
    upcoming = None if plans.upcoming is None else plans.prepared.get(holder.incarnation)
    return (
        holder.incarnation != source
        and holder.state is WorkerState.MEMBER
        and bool(holder.hello.kv_endpoint)
        and sender.may_copies_count
        and max(sender.hello.wire_versions) >= PROTOCOL
        and bool(bits)
        and bits == reported_bits(state, holder.incarnation)
        and (upcoming is None or bits == upcoming.bits)
        and sender.hello.dtype == holder.hello.dtype
        and state.routes.state_of(source, holder.incarnation, state.now) is RouteState.OPEN
        and state.now >= state.kv_copies.paused_until.get(holder.incarnation, 0.0)
    )


def reported_bits(state: State, incarnation: str) -> str:
    """Return whose bits a worker computes: as a stage of the active plan, or with the layers that it keeps warm. Empty
    if it has reported neither, or is unknown."""
    ready, worker = state.plans.capacity.get(incarnation), state.workers.get(incarnation)
    return ready.bits if ready is not None else "" if worker is None else worker.bits


def _fits_connection(state: State, stage: StagePlan, holder: Worker) -> bool:
    """Whether a stage's copies take a small part of the throughput between two hosts, at the predicted rate of
    positions: on a slow connection they would delay the steps."""
    forecast = None if state.plans.current is None else state.plans.current.forecast
    if stage.host == holder.hello.host or forecast is None:
        return True
    links = (state.workers[stage.incarnation].hello.link, holder.hello.link)
    throughput = min((link.bytes_per_s for link in links if link is not None), default=inf)
    return position_bytes(state, stage.layers) * forecast.tokens_per_s <= CONNECTION_SHARE * throughput


def _score(state: State, holder: str, assigned: int) -> float:
    """Return how suitable a worker is as a holder: its memory for copies, and the less, the busier it is.

    ``assigned``: bytes per position of the layers that it is to hold already.
    """
    worker, plans = state.workers[holder], state.plans
    stage = None if plans.current is None else plans.current.stage_of(holder)
    gauge = plans.gauge.stages.get(worker.name)
    if stage is None or state.manifest is None:
        busy = 0.0
    elif gauge is not None and gauge.num_steps and plans.gauge.seconds:
        busy = min(1.0, gauge.measured_s / plans.gauge.seconds)
    else:
        busy = len(stage.layers) / state.manifest.num_layers
    taken = assigned * sum(sequence.kv for sequence in state.running)
    return (_free_bytes(state, worker) - taken) * (2 - busy)


def _free_bytes(state: State, worker: Worker) -> int:
    """Return the memory that a worker has for copies, as it reported or as its weights and positions leave."""
    held, manifest = state.kv_copies.held.get(worker.incarnation), state.manifest
    if held is not None and held.free_bytes is not None:
        return held.free_bytes + held.num_bytes
    assert manifest is not None
    stage = None if state.plans.current is None else state.plans.current.stage_of(worker.incarnation)
    own = () if stage is None else (stage.layers,)
    weights = sum(map(manifest.weight_bytes, (*own, *worker.warm_layers)))
    used = sum(sequence.kv for sequence in state.running) * sum(position_bytes(state, layers) for layers in own)
    return int((worker.hello.memory_bytes - weights) * worker.hello.kv_share) - used


def position_bytes(state: State, layers: LayerRange) -> int:
    """Return the bytes of one position's keys and values in these layers."""
    assert state.manifest is not None
    return sum(state.manifest.kv_bytes_per_token[layers.first : layers.stop])
