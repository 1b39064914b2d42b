"""Failpoints of the compute thread: the names of the places that an event or a computation passes."""

from __future__ import annotations

from dataclasses import replace

from swarm import failpoints
from swarm.stage import actions as act
from swarm.stage.events import Event, OrderArrived
from swarm.stage.executor import Forwarded
from swarm.wire.messages import REPLAY_STEP


def point(when: str, event: Event) -> None:
    if failpoints.armed and isinstance(event, OrderArrived):
        failpoints.reached(f"{when}.{event.order.__struct_config__.tag}")


def point_before(action: act.Compute) -> None:
    batch = action.batch
    if action.step == REPLAY_STEP:
        failpoints.reached("replay.begins")
        return
    failpoints.reached("step.computes", token=batch.tokens.tolist(), sequence=[row.sequence for row in batch.rows])
    if any(row.count > 1 for row in batch.rows):
        failpoints.reached("step.prefill")


def point_after(action: act.Compute, forwarded: Forwarded) -> Forwarded:
    place = "replay.computed" if action.step == REPLAY_STEP else "step.computed"
    if forwarded.hidden is not None:
        forwarded = replace(forwarded, hidden=failpoints.altered(place, forwarded.hidden))
    else:
        failpoints.reached(place)
    if forwarded.sampled:
        failpoints.reached("step.sampled")
    return forwarded
