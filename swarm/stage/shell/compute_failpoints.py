"""Failpoints of the compute thread: the names of the places that an event or a computation passes."""

from __future__ import annotations

from dataclasses import replace

from swarm import failpoints
from swarm.stage import actions as act
from swarm.stage.events import Event, OrderArrived
from swarm.stage.executor import ForwardResult
from swarm.wire.messages import REPLAY_STEP


def reach_order_point(when: str, event: Event) -> None:
    if failpoints.armed and isinstance(event, OrderArrived):
        failpoints.hit(f"{when}.{event.order.__struct_config__.tag}")


def before_compute(action: act.Compute) -> None:
    batch = action.batch
    if action.step == REPLAY_STEP:
        failpoints.hit("replay.begins")
        return
    failpoints.hit("step.computes", token=batch.tokens.tolist(), sequence=[row.sequence for row in batch.rows])
    if any(row.count > 1 for row in batch.rows):
        failpoints.hit("step.prefill")


def after_compute(action: act.Compute, forwarded: ForwardResult) -> ForwardResult:
    place = "replay.computed" if action.step == REPLAY_STEP else "step.computed"
    if forwarded.hidden is not None:
        forwarded = replace(forwarded, hidden=failpoints.falsified_values(place, forwarded.hidden))
    else:
        failpoints.hit(place)
    if forwarded.sampled:
        failpoints.hit("step.sampled")
    return forwarded
