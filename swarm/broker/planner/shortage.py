"""Reason why there is no plan, in one sentence, with the number of bytes that are missing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from swarm.broker.planner.problem import Device, PlanningProblem, Shortage
from swarm.wire.messages import LayerRange

MAX_LISTED = 16  # devices or routes listed in one sentence


def explain_shortage(problem: PlanningProblem, *, fits_unconstrained: bool) -> Shortage:
    """Explain why a problem has no plan. ``fits_unconstrained``: there would be a plan without pins and caps."""
    by_hand = find_contradiction(problem) or _find_oversized_pin(problem)
    if by_hand is not None:
        return by_hand
    model, devices = problem.model, problem.devices
    needed = model.weight_bytes(model.all_layers) + model.buffer_bytes * len(devices)
    missing = max(0, needed - sum(d.memory_bytes - d.standby_bytes for d in devices))
    where = _list_devices(problem)
    if missing:
        text = f"{_mib(missing)} more memory: {model.name} needs {_mib(needed)} on {len(devices)} workers, joined are"
        return Shortage(f"{text} {where}", missing)
    if fits_unconstrained:
        return Shortage(f"other pins or caps: with those of [plan], the layers can't be laid out over {where}", 0)
    return Shortage(f"workers with more memory each: the layers don't pack into {where}", 0)


def explain_blocked_routes(problem: PlanningProblem) -> Shortage:
    """Explain which routes are blocked, where every plan would need one of them."""
    blocked = [f"the broker can't reach {device.name}" for device in problem.devices if device.is_shut]
    blocked += [f"{device.name} can't reach the broker's data port" for device in problem.devices if device.is_mute]
    for device in problem.devices:
        if device.cant_reach:
            blocked.append(f"{device.name} can't reach {', '.join(sorted(device.cant_reach)[:MAX_LISTED])}")
    text = f"open routes between the workers: {'; '.join(blocked[:MAX_LISTED])}: let worker.data_ports in there"
    if any(device.is_mute for device in problem.devices):
        text += ", and the broker's own ports at the broker"
    return Shortage(text, 0)


def find_contradiction(problem: PlanningProblem) -> Shortage | None:
    """Return a shortage that more memory can't cure: pins that contradict each other, the caps or the model, or that
    leave layers without a device."""
    num = problem.model.num_layers
    pinned = sorted(((d.pinned, d) for d in problem.devices if d.pinned is not None), key=lambda each: each[0].first)
    for pin, device in pinned:
        if pin.stop > num:
            text = f"another pin for {device.name}: it is pinned to {pin.label}, and the model has 0–{num - 1}"
            return Shortage(text, 0)
        if pin.stop < problem.model.first_layers or 0 < pin.first < problem.model.first_layers:
            text = f"another pin for {device.name}: it is pinned to {pin.label}, and the first stage of a model that"
            return Shortage(f"{text} reads images has layers 0–{problem.model.first_layers - 1} at least", 0)
        if device.max_layers is not None and len(pin) > device.max_layers:
            text = f"another pin or cap for {device.name}: it is pinned to {pin.label}, which are {len(pin)}"
            return Shortage(f"{text}, and its cap is {device.max_layers}", 0)
    for (one, first), (other, second) in itertools.pairwise(pinned):
        if other.first < one.stop:
            text = f"other pins: {first.name} and {second.name} are pinned to layers {one} and {other}, which overlap"
            return Shortage(text, 0)
    return _find_uncovered(problem, [pin for pin, _ in pinned])


def _find_uncovered(problem: PlanningProblem, pins: Sequence[LayerRange]) -> Shortage | None:
    """Return the shortage if no device can take the layers between pins: more gaps than devices, or more layers than
    caps allow."""
    num = problem.model.num_layers
    edges = [0, *(edge for pin in pins for edge in (pin.first, pin.stop)), num]
    gaps = [LayerRange(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    free = [device for device in problem.devices if device.pinned is None]
    uncovered = " and ".join(str(gap) for gap in gaps)
    if len(gaps) > len(free):
        cause = f"without a pin there is only {_names(free)}" if free else "all workers hold others by their pins"
        return Shortage(f"other pins or caps, or another worker: no worker is left for layers {uncovered}: {cause}", 0)
    wanted, allowed = sum(map(len, gaps)), sum(num if d.max_layers is None else d.max_layers for d in free)
    if wanted <= allowed:
        return None
    caps = ", ".join(f"{d.name} {d.max_layers}" for d in free[:MAX_LISTED])
    caps += f" and {len(free) - MAX_LISTED} more" if len(free) > MAX_LISTED else ""
    text = (
        f"other pins or caps, or another worker: for the {wanted} layers {uncovered} the caps allow {allowed} ({caps})"
    )
    return Shortage(text, 0)


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(d.name for d in devices)


def _find_oversized_pin(problem: PlanningProblem) -> Shortage | None:
    for device in problem.devices:
        if device.pinned is not None:
            needed = (
                problem.model.needed_bytes(device.pinned, problem.kv_positions, device.kv_share) + device.standby_bytes
            )
            missing = needed - device.memory_bytes
            if missing > 0:
                text = f"{_mib(missing)} more memory for {device.name}: it is pinned to {device.pinned.label}, which"
                needs = f"{'need' if len(device.pinned) > 1 else 'needs'} {_mib(needed)}"
                return Shortage(f"{text} {needs}, and it has {_mib(device.memory_bytes)}", missing)
    return None


def _list_devices(problem: PlanningProblem) -> str:
    """List every device with its memory, and the memory that it lacks for one layer."""
    shown = [f"{d.name} {_mib(d.memory_bytes)}{_missing_memory(problem, d)}" for d in problem.devices[:MAX_LISTED]]
    more = len(problem.devices) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _missing_memory(problem: PlanningProblem, device: Device) -> str:
    """Return how much memory a device lacks for even the smallest layer."""
    missing = problem.min_bytes(device) - device.memory_bytes
    return f" ({_mib(missing)} short of one layer)" if missing > 0 else ""


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
