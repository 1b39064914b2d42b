"""The report for ``swarmctl plan``: the active plan with predicted and measured times, or a plan preview."""

from __future__ import annotations

from swarm.broker.admin import departed
from swarm.broker.admin.copies_report import copies_as_json, describe_copies
from swarm.broker.admin.standby_report import warming_progress
from swarm.broker.planner.explain import describe_extra_worker, describe_forecast, forecast_json
from swarm.broker.planner.load import PlanGauge, StageGauge
from swarm.broker.planner.problem import Shortage
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.growth import describe_move
from swarm.broker.state import Plan, PlanPhase, PlanState, State
from swarm.broker.state.constraints import PlanConstraints
from swarm.wire.messages import Json, LayerRange, Manifest, PlanWhatIf


def report_plan(state: State) -> Json:
    """Report the active plan, and the next one if there is one."""
    plans = state.plans
    body: Json = {
        "state": "serving" if plans.is_serving else plans.phase.value,
        "waits_for": plans.waits_for,
        "epoch": plans.current.epoch if plans.current else None,
        "stages": _report_stages(plans.current, state) if plans.current else [],
        "objective": plans.current.objective if plans.current else None,
        "why": [*describe_overrides(state.constraints), *(_explain(plans.current, state) if plans.current else ())],
    }
    if plans.current is not None and plans.current.forecast is not None:
        body["forecast"] = forecast_json(plans.current.forecast)
        body["measured"] = _report_measured(plans.gauge)
    if moves := state.moves.as_json(state.now):
        body["moves"] = moves
    if copies := copies_as_json(state):
        body["copies"] = copies
    if laid_down := _overrides_as_json(state.constraints):
        body["by_hand"] = laid_down
    if plans.phase is PlanPhase.PREPARING and plans.upcoming is not None:
        body["coming"] = {"epoch": plans.upcoming.epoch, "stages": _report_stages(plans.upcoming, state)}
    return body


def describe_overrides(constraints: PlanConstraints) -> list[str]:
    """Describe the operator's constraints, and the commands that remove them."""
    parts = [f"{name} is pinned to {layers.label}" for name, layers in sorted(constraints.pins.items())]
    parts += [f"{name} has at most {most} of them" for name, most in sorted(constraints.caps.items())]
    parts += [f"{name} is excluded" for name in sorted(constraints.exclude)]
    parts += [f"the objective is {constraints.objective}"] if constraints.objective else []
    overrides = [f"by hand: {', '.join(parts)}; swarmctl plan --apply restores the settings"] if parts else []
    restrictions = [f"{name} is {constraints.restriction(name)}" for name in sorted(constraints.cordoned)]
    return (
        [*overrides, f"by hand: {', '.join(restrictions)}; swarmctl uncordon reverses it"]
        if restrictions
        else overrides
    )


def _overrides_as_json(steering: PlanConstraints) -> Json:
    """Return the operator's constraints as values; parts without a value are omitted."""
    overrides: Json = {
        "pins": {name: [layers.first, layers.stop] for name, layers in steering.pins.items()},
        "caps": dict(steering.caps),
        "exclude": sorted(steering.exclude),
        "objective": steering.objective,
    }
    return {name: value for name, value in overrides.items() if value}


def _explain(plan: Plan, state: State) -> list[str]:
    """Explain the plan: a sentence per stage, the prediction and its reasons, warm standbys, then differing kernels and
    small stages."""
    manifest = state.manifest
    assert manifest is not None
    lines = [
        f"{s.name} holds {s.layers.label}: {len(s.layers)} of {manifest.num_layers}, {_mib(s.weight_bytes, 1)} of "
        f"its {_mib(s.memory_bytes)}"
        for s in plan.stages
    ]
    lines += () if plan.forecast is None else describe_forecast(plan.forecast)
    if len(plan.stages) > 1 and plan.shares_cores:
        host, device = plan.stages[0].host, plan.stages[0].device
        what, whole = ("the cores", "all of them") if device == "cpu" else (device, "all of it")
        together = f"all stages share {what} of {host}: in mode auto one step is in flight at a time"
        lines.append(f"{together}, and each stage uses {whole} in turn")
    if state.moves.is_active:
        lines.append(describe_move(state.moves.past[-1], state.moves.achieved(state.moves.past[-1]), state.now))
    if plan.recovery_choice:
        lines.append(f"fastest way to continue after the loss: {plan.recovery_choice}")
    lines += [
        _describe_standby(state, holder, ranges, manifest) for holder, ranges in plan.standby if holder in state.workers
    ]
    lines += describe_copies(state, plan)
    lines += () if plan.forecast is None else describe_extra_worker(plan.forecast)
    return [*lines, *_warn_unlike_kernels(state), *_warn_tightest(state.plans)]


def _describe_standby(state: State, incarnation: str, ranges: tuple[LayerRange, ...], manifest: Manifest) -> str:
    size = _mib(sum(manifest.weight_bytes(layers) for layers in ranges), 1)
    named = ranges[0].label if len(ranges) == 1 else f"layers {', '.join(map(str, ranges))}"
    name = state.workers[incarnation].name
    warming = warming_progress(state.workers[incarnation], manifest, state.now)
    progress = "" if warming is None else f"; {warming.in_words}"
    return f"{name} keeps {named} warm in case their holder dies: {size} (plan.standby){progress}"


def _mib(num_bytes: int, digits: int = 0) -> str:
    return f"{num_bytes / 2**20:.{digits}f} MiB"


def _warn_tightest(plans: PlanState) -> list[str]:
    """Warn of the stage with the least KV capacity: a sequence needs blocks in every stage."""
    plan = plans.current
    assert plan is not None
    capacities = sorted(
        (ready.kv_capacity, stage.name) for stage in plan.stages if (ready := plans.capacity.get(stage.incarnation))
    )
    # only warn if it has less than half of the next one
    if len(capacities) < 2 or 2 * capacities[0][0] > capacities[1][0]:
        return []
    (least, name), (next_, other) = capacities[:2]
    return [
        f"{name} limits all stages to {least} KV positions, {other} could hold {next_}: give {name} more memory or "
        "fewer layers (plan.caps), or leave it out (plan.exclude)"
    ]


def _warn_unlike_kernels(state: State) -> list[str]:
    """Warn of differing kernels: results are bit-identical on any worker only if all kernels compute the same bits."""
    kinds = {ready.bits for ready in state.plans.capacity.values() if ready.bits}
    if len(kinds) < 2:
        return []
    return [
        "the stages' kernels differ: when layers move from one worker to another, the last bits of their results "
        "change, and occasionally a token that is not drawn yet (worker.bits = portable on all workers gives equal "
        "bits on different processors; worker.dtype can be set to one value)"
    ]


def _report_stages(plan: Plan, state: State) -> list[Json]:
    is_current = plan is state.plans.current
    prepared = state.plans.capacity if is_current else state.plans.prepared
    forecasts = {stage.worker: stage for stage in plan.forecast.stages} if plan.forecast else {}
    rows: list[Json] = []
    for stage in plan.stages:
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
        gauge = state.plans.gauge.stages.get(stage.name) if is_current else None
        if gauge is not None and gauge.num_steps:
            row |= _report_step_times(gauge)
        ready = prepared.get(stage.incarnation)
        if ready is not None:
            row |= {
                "kv_capacity": ready.kv_capacity,
                "load_s": round(ready.load_s, 3),
                "warm_up_s": round(ready.warm_up_s, 3),
                "resident_bytes": ready.resident_bytes,
                "kernels": ready.kernels,
            }
        rows.append(row)
    return rows


def _report_step_times(gauge: StageGauge) -> Json:
    """Return means over the steps under this plan, and the prediction for exactly these steps."""
    return {
        "seen_steps": gauge.num_steps,
        "seen_s": gauge.measured_s / gauge.num_steps,
        "expected_s": gauge.predicted_s / gauge.num_steps,
    }


def _report_measured(gauge: PlanGauge) -> Json:
    """Return the times of whole steps. ``outside_s``: time outside of the stages: networks, sockets, the broker."""
    num = gauge.num_steps
    return {
        "steps": num,
        "step_s": gauge.seconds / num if num else None,
        "outside_s": gauge.outside_s / num if num else None,
    }


def unknown_worker_error(state: State, suppose: PlanWhatIf) -> str | None:
    """Return an error if a named worker is not a member."""
    named = [*suppose.without, *([suppose.like] if suppose.like else [])]
    return next(
        (departed.absence_reason(state, name) for name in named if departed.find_member(state, name) is None), None
    )


def report_preview(state: State, preview: Proposal | Shortage, constraints: PlanConstraints) -> Json:
    """Report a plan preview. ``constraints``: the operator's constraints it is based on."""
    if isinstance(preview, Shortage):
        return {"state": "no plan", "waits_for": preview.text, "missing_bytes": preview.missing_bytes, "stages": []}
    body = forecast_json(preview.forecast)
    is_same = state.plans.current is not None and list(preview.shares) == [
        (stage.incarnation, stage.layers) for stage in state.plans.current.stages
    ]
    return {
        "state": "would stay as it is" if is_same else "would be made",
        "objective": preview.forecast.objective,
        "now_step_s": preview.now_s,
        "step_s": preview.forecast.step_s,
        "tokens_per_second": body["tokens_per_second"],
        "stages": body["stages"],
        "why": [*describe_overrides(constraints), *describe_forecast(preview.forecast)],
        "forecast": body,
    }
