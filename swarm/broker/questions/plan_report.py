"""The report for ``swarmctl plan``: the active plan with predicted and measured times, or a plan preview."""

from __future__ import annotations

from swarm.broker.drafts.candidates import Proposal
from swarm.broker.planner.explain import as_json, of_one_more, sentences
from swarm.broker.planner.load import PlanGauge, StageGauge
from swarm.broker.planner.problem import Shortage
from swarm.broker.questions import absent
from swarm.broker.questions.standby_report import warming_of
from swarm.broker.state import Plan, PlanBook, PlanPhase, State
from swarm.broker.state.plans import Steering
from swarm.wire.messages import Json, LayerRange, Manifest, Suppose


def plan(state: State) -> Json:
    """Report the active plan, and the next one if there is one."""
    book = state.book
    body: Json = {
        "state": "serving" if book.serving else book.phase.value,
        "waits_for": book.waits_for,
        "epoch": book.current.epoch if book.current else None,
        "stages": _stages(book.current, state) if book.current else [],
        "objective": book.current.objective if book.current else None,
        "why": [*by_hand(state.steering), *(_why(book.current, state) if book.current else ())],
    }
    if book.current is not None and book.current.forecast is not None:
        body["forecast"] = as_json(book.current.forecast)
        body["measured"] = _measured(book.gauge)
    if laid_down := _laid_down(state.steering):
        body["by_hand"] = laid_down
    if book.phase is PlanPhase.PREPARING and book.coming is not None:
        body["coming"] = {"epoch": book.coming.epoch, "stages": _stages(book.coming, state)}
    return body


def by_hand(said: Steering) -> list[str]:
    """Describe the operator's constraints, and the commands that remove them."""
    parts = [f"{name} is pinned to {layers.in_words}" for name, layers in sorted(said.pins.items())]
    parts += [f"{name} has at most {most} of them" for name, most in sorted(said.caps.items())]
    parts += [f"{name} is excluded" for name in sorted(said.exclude)]
    parts += [f"the objective is {said.objective}"] if said.objective else []
    told = [f"by hand: {', '.join(parts)}; swarmctl plan --apply goes back to the settings"] if parts else []
    held = [f"{name} is {said.held_as(name)}" for name in sorted(said.cordoned)]
    return [*told, f"by hand: {', '.join(held)}; swarmctl uncordon takes that back"] if held else told


def _laid_down(steering: Steering) -> Json:
    """Return the operator's constraints as values; parts without a value are omitted."""
    said: Json = {
        "pins": {name: [layers.first, layers.stop] for name, layers in steering.pins.items()},
        "caps": dict(steering.caps),
        "exclude": sorted(steering.exclude),
        "objective": steering.objective,
    }
    return {name: value for name, value in said.items() if value}


def _why(plan: Plan, state: State) -> list[str]:
    """Explain the plan: a sentence per stage, the prediction and its reasons, warm standbys, then differing kernels and
    small stages."""
    manifest = state.manifest
    assert manifest is not None
    said = [
        f"{s.name} holds {s.layers.in_words}: {len(s.layers)} of {manifest.num_layers}, {_mib(s.weight_bytes, 1)} of "
        f"its {_mib(s.memory_bytes)}"
        for s in plan.stages
    ]
    said += () if plan.forecast is None else sentences(plan.forecast)
    if len(plan.stages) > 1 and plan.shares_cores:
        host = plan.stages[0].host
        together = f"all stages share the cores of {host}: in mode auto one step is in flight at a time"
        said.append(f"{together}, and each stage uses all of them in turn")
    if plan.back:
        said.append(f"quickest way to continue after the loss: {plan.back}")
    said += [_kept(state, who, ranges, manifest) for who, ranges in plan.standby if who in state.workers]
    said += () if plan.forecast is None else of_one_more(plan.forecast)
    return [*said, *_unlike_kernels(state), *_tightest(state.book)]


def _kept(state: State, incarnation: str, ranges: tuple[LayerRange, ...], manifest: Manifest) -> str:
    size = _mib(sum(manifest.weight_bytes(layers) for layers in ranges), 1)
    named = ranges[0].in_words if len(ranges) == 1 else f"layers {', '.join(map(str, ranges))}"
    name = state.workers[incarnation].name
    warming = warming_of(state.workers[incarnation], manifest, state.now)
    progress = "" if warming is None else f"; {warming.in_words}"
    return f"{name} keeps {named} warm in case their holder dies: {size} (plan.standby){progress}"


def _mib(num_bytes: int, digits: int = 0) -> str:
    return f"{num_bytes / 2**20:.{digits}f} MiB"


def _tightest(book: PlanBook) -> list[str]:
    """Warn of the stage with the least KV capacity: a sequence needs blocks in every stage."""
    plan = book.current
    assert plan is not None
    room = sorted(
        (ready.kv_capacity, stage.name) for stage in plan.stages if (ready := book.capacity.get(stage.incarnation))
    )
    if len(room) < 2 or 2 * room[0][0] > room[1][0]:  # only warn if it has less than half of the next one
        return []
    (least, name), (next_, other) = room[:2]
    return [
        f"{name} limits all stages to {least} KV positions, {other} could hold {next_}: give {name} more memory or "
        "fewer layers (plan.caps), or leave it out (plan.exclude)"
    ]


def _unlike_kernels(state: State) -> list[str]:
    """Warn of differing kernels: results are bit-identical on any worker only if all kernels compute the same bits."""
    kinds = {ready.bits for ready in state.book.capacity.values() if ready.bits}
    if len(kinds) < 2:
        return []
    return [
        "the stages' kernels differ: when layers move from one worker to another, the last bits of their results "
        "change, and occasionally a token that is not drawn yet (worker.bits = portable on all workers gives equal "
        "bits on different processors; worker.dtype can be set to one value)"
    ]


def _stages(of: Plan, state: State) -> list[Json]:
    is_current = of is state.book.current
    prepared = state.book.capacity if is_current else state.book.prepared
    forecasts = {stage.worker: stage for stage in of.forecast.stages} if of.forecast else {}
    found: list[Json] = []
    for stage in of.stages:
        row: Json = {
            "worker": stage.name,
            "layers": [stage.layers.first, stage.layers.stop],
            "weight_bytes": stage.weight_bytes,
            "by_relay": bool(stage.relay),
        }
        predicted = forecasts.get(stage.name)
        if predicted is not None:
            row["predicted_s"] = predicted.compute_s
            row["needed_bytes"] = predicted.needed_bytes
        gauge = state.book.gauge.stages.get(stage.name) if is_current else None
        if gauge is not None and gauge.num_steps:
            row |= _seen(gauge)
        ready = prepared.get(stage.incarnation)
        if ready is not None:
            row |= {
                "kv_capacity": ready.kv_capacity,
                "load_s": round(ready.load_s, 3),
                "warm_up_s": round(ready.warm_up_s, 3),
                "resident_bytes": ready.resident_bytes,
                "kernels": ready.kernels,
            }
        found.append(row)
    return found


def _seen(gauge: StageGauge) -> Json:
    """Return means over the steps under this plan, and the prediction for exactly these steps."""
    return {
        "seen_steps": gauge.num_steps,
        "seen_s": gauge.measured_s / gauge.num_steps,
        "expected_s": gauge.predicted_s / gauge.num_steps,
    }


def _measured(gauge: PlanGauge) -> Json:
    """Return the times of whole steps. ``outside_s``: time outside of the stages: networks, sockets, the broker."""
    num = gauge.num_steps
    return {
        "steps": num,
        "step_s": gauge.seconds / num if num else None,
        "outside_s": gauge.outside_s / num if num else None,
    }


def unknown_worker(state: State, suppose: Suppose) -> str | None:
    """Return an error if a named worker is not a member."""
    named = [*suppose.without, *([suppose.like] if suppose.like else [])]
    return next((absent.why_none(state, name) for name in named if absent.member(state, name) is None), None)


def supposed(state: State, found: Proposal | Shortage, said: Steering) -> Json:
    """Report a plan preview. ``constraints``: the operator's constraints it is based on."""
    if isinstance(found, Shortage):
        return {"state": "no plan", "waits_for": found.text, "missing_bytes": found.missing_bytes, "stages": []}
    body = as_json(found.forecast)
    is_same = state.book.current is not None and list(found.shares) == [
        (stage.incarnation, stage.layers) for stage in state.book.current.stages
    ]
    return {
        "state": "would stay as it is" if is_same else "would be made",
        "objective": found.forecast.objective,
        "now_step_s": found.now_s,
        "step_s": found.forecast.step_s,
        "tokens_per_second": body["tokens_per_second"],
        "stages": body["stages"],
        "why": [*by_hand(said), *sentences(found.forecast)],
        "forecast": body,
    }
