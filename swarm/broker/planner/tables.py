"""Arrays that the search works on: a device's time for every range of layers, and the time between devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swarm.broker.planner.problem import Device, Line, ModelSizes, PlanningProblem
from swarm.wire.messages import loaded_layers

Table = NDArray[np.float64]  # [first layer, layer after the last]: infinite where the device can't take the range

Bound = Literal["turns", "stage", "cores", "way"]  # limit that determines a step's time

RELAY_S = 1e-4  # time of a message inside the relay, besides both links
# Time of a step besides its stages when no other step is in flight, and the least time of a hop. Both were measured in
# serving swarms of two models, where weights have evicted everything else from the caches. In a loop that does nothing
# else, the same messages take a tenth of that.
STEP_S = 2e-3
HOP_S = 6e-4
LOOPBACK_BYTES_PER_S = 2e9
# Penalty of a blocked route. The search prefers other routes; a result that still uses a blocked route is not a plan.
BLOCKED_S = 1e6


def range_seconds(model: ModelSizes, device: Device, kv_positions: int) -> Table:
    """Return the device's time for each range of layers in one step; infinite where they don't fit or aren't allowed,
    for instance by a pin or a cap."""
    work = range_sums(model.layer_weights)
    table: Table = device.stage_s + device.layer_s * work
    table[0, :] += device.embed_s + entry_route_s(device)
    table[:, -1] += device.head_s + exit_route_s(device)
    table[~_find_allowed(model, device, kv_positions)] = np.inf
    return table


def entry_route_s(device: Device) -> float:
    """Return the cost of the broker's route to the device, if it has the first layers."""
    return BLOCKED_S if device.is_shut else device.broker_s + (RELAY_S if device.is_relayed else 0.0)


def exit_route_s(device: Device) -> float:
    """Return the cost of the device's route to the broker, for the output of the last layers."""
    return BLOCKED_S if device.is_mute else device.broker_s


def moved_bytes(model: ModelSizes, device: Device) -> Table:
    """Return the bytes that the device would have to load in addition to what it holds."""
    loaded = loaded_layers(device.held, device.kept)
    table = range_sums([0 if i in loaded else size for i, size in enumerate(model.layer_bytes)])
    table[0, :] += 0 if 0 in loaded else model.embed_bytes
    table[:, -1] += 0 if model.num_layers - 1 in loaded else model.head_bytes
    table[0, -1] -= 0 if loaded & {0, model.num_layers - 1} else model.shared_bytes
    return table


def range_sums(values: Sequence[float]) -> Table:
    """Return the sums of consecutive values: from the row's up to, not including, the column's."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))
    table: Table = sums[None, :] - sums[:, None]
    return table


def _find_allowed(model: ModelSizes, device: Device, kv_positions: int) -> NDArray[np.bool_]:
    num = model.num_layers
    first, stop = np.arange(num + 1)[:, None], np.arange(num + 1)[None, :]
    weights = range_sums(list(model.layer_bytes))
    weights[0, :] += model.embed_bytes
    weights[:, -1] += model.head_bytes
    weights[0, -1] -= model.shared_bytes
    buffers = np.full_like(weights, model.buffer_bytes)
    buffers[:, -1] = model.head_buffer_bytes
    states = range_sums(list(model.state_bytes or [0] * num))
    kv = np.floor(model.add_states(kv_positions * range_sums(list(model.kv_bytes)), states) / device.kv_share)
    fits = weights + np.maximum(buffers, kv) <= device.memory_bytes - device.standby_bytes
    allowed: NDArray[np.bool_] = (stop > first) & fits & (stop >= model.first_layers)
    if device.max_layers is not None:
        allowed &= stop - first <= device.max_layers
    if device.pinned is not None:
        allowed &= (first == device.pinned.first) & (stop == device.pinned.stop)
    return allowed


def hop_seconds(problem: PlanningProblem) -> Table:
    """Return a table of the time that a step's data takes from each device to each other device.

    With several steps in flight only the time that the link is busy counts: its latency delays a step, but not the next
    one. Relayed data crosses two links: to the broker's machine, and from there to the target.
    """
    devices = problem.devices
    latency = np.array([d.link.latency_s for d in devices])
    busy = np.array([problem.model.hop_bytes / d.link.bytes_per_s for d in devices])
    hosts = np.array([d.host for d in devices])
    far = np.maximum(busy[:, None], busy[None, :])
    near = np.full_like(far, problem.model.hop_bytes / LOOPBACK_BYTES_PER_S)
    if problem.takes_turns:
        far = far + np.maximum(HOP_S, np.maximum(latency[:, None], latency[None, :]))
        near = near + HOP_S
    if problem.free_hops:
        near = np.zeros_like(near)
    seconds: Table = np.where((hosts[:, None] == hosts[None, :]) & (hosts[:, None] != ""), near, far)
    places = {device.name: place for place, device in enumerate(devices)}
    for index, device in enumerate(devices):
        for place in (places[name] for name in device.relayed_to & places.keys()):
            both = busy[index] + busy[place] + RELAY_S
            seconds[index, place] = both + (latency[index] + latency[place] if problem.takes_turns else 0.0)
        for place in (places[name] for name in device.cant_reach & places.keys()):
            seconds[index, place] += BLOCKED_S
    return seconds


def step_seconds(problem: PlanningProblem, line: Line, hop_table: Table | None = None) -> float:
    """Return the value that the search minimises: the seconds of a step, or between two steps if several are in flight.
    ``hop_table``: the result of ``hop_seconds``, if already computed."""
    parts = stage_seconds(problem, line)
    hop_table = hop_seconds(problem) if hop_table is None else hop_table
    ways = [float(hop_table[a.device, b.device]) for a, b in itertools.pairwise(line)]
    return sum(parts) + sum(ways) if problem.takes_turns else max([*parts, *ways])


def predicted_seconds(problem: PlanningProblem, line: Line) -> float:
    """Return the predicted seconds from one step to the next, including the costs that the search ignores."""
    return max(step_bounds(problem, line).values())


def step_bounds(problem: PlanningProblem, line: Line) -> dict[Bound, float]:
    """Return the limits of the time from one step to the next.

    If stages take turns, the next step starts when the previous one has passed all stages. Otherwise three limits
    apply: the time of the slowest stage; the time that the stages of one machine need of its cores, or of a GPU that
    they share; and the time of a step through all stages divided by the number of steps in flight, which is the number
    of stages.
    """
    if problem.takes_turns:
        return {"turns": step_seconds(problem, line) + overhead_s(problem)}
    return {
        "stage": step_seconds(problem, line),
        "cores": max(_core_seconds(problem, line).values(), default=0.0),
        "way": step_latency_s(problem, line) / len(line),
    }


def step_latency_s(problem: PlanningProblem, line: Line) -> float:
    """Return the time of a step from the broker through all stages and back, if it waits for no other step."""
    used, between = [problem.devices[share.device] for share in line], hop_seconds(replace(problem, takes_turns=True))
    ways = sum(float(between[a.device, b.device]) for a, b in itertools.pairwise(line))
    ends = used[0].away_s + used[-1].away_s
    return STEP_S + ends + ways + sum(stage_seconds(problem, line)) + sum(device.rest_s for device in used)


def _core_seconds(problem: PlanningProblem, line: Line) -> dict[tuple[str, str], float]:
    """Return for each machine, and for each of its GPUs, the time of a step during which its stages would use all of
    its cores, or of the GPU."""
    used: dict[tuple[str, str], float] = {}
    for share, seconds in zip(line, stage_seconds(problem, line), strict=True):
        device = problem.devices[share.device]
        used[device.place] = used.get(device.place, 0.0) + device.use * seconds
    return used


def overhead_s(problem: PlanningProblem) -> float:
    """Return the time of a step outside of its stages, which is the same for every plan. It is 0 where several steps
    are in flight, because one step waits while another one is computed."""
    return STEP_S if problem.takes_turns else 0.0


def is_connected(problem: PlanningProblem, line: Line) -> bool:
    """Whether the broker can reach the first stage, each stage the next one, and the last stage the broker."""
    used = [problem.devices[share.device] for share in line]
    ends = used[0].is_shut or used[-1].is_mute
    return not ends and all(b.name not in a.cant_reach for a, b in itertools.pairwise(used))


def stage_seconds(problem: PlanningProblem, line: Line) -> list[float]:
    """Return each stage's time, including the broker's routes to the first and from the last, whether or not the stage
    may hold these layers."""
    model, times = problem.model, []
    for share in line:
        device, layers = problem.devices[share.device], share.layers
        took = device.stage_s + device.layer_s * sum(model.layer_weights[layers.first : layers.stop])
        took += device.embed_s + entry_route_s(device) if layers.first == 0 else 0.0
        took += device.head_s + exit_route_s(device) if layers.stop == model.num_layers else 0.0
        times.append(took)
    return times
