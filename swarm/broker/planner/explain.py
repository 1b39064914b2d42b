"""Description of a plan in text and figures: the prediction, the bottleneck, the effect of one more worker, the devices
that are left out and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.broker.planner import tables
from swarm.broker.planner.load import MIN_S, PlannedLoad
from swarm.broker.planner.problem import Device, LayerShare, Line, PlanningProblem, Shortage
from swarm.broker.planner.solve import MAX_EXACT, solve
from swarm.wire.messages import Json, LayerRange

MAX_EXPLAINED = 4  # of the devices left out: each costs a search
MAX_NAMED = 8  # names in one sentence

NamedShares = tuple[tuple[str, LayerRange], ...]  # workers' names and the layers that each would have


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Forecast of one stage.

    ``compute_s``: computing time in a step of the planned load. ``hop_s``: time of the transfer to the next stage.
    ``needed_bytes``: memory for weights, buffers, and KV. ``by_relay``: whether the stage is reached through the relay.
    """

    worker: str
    layers: LayerRange
    compute_s: float
    hop_s: float
    needed_bytes: int
    memory_bytes: int
    kv_positions: int
    by_relay: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """Alternative that was considered: the time of a step, that of the active plan as measured now, and why it is not
    made."""

    shares: NamedShares
    step_s: float
    now_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ExtraWorker:
    """Forecast for one more worker with the properties of the worker ``like``.

    ``sequences``: number of sequences that could then decode at the same time. ``step_s``: time of such a step.
    ``now_s``: time of a step with as many sequences under the active plan.
    """

    like: str
    step_s: float
    now_s: float
    sequences: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a plan.

    ``step_s``: time from one step to the next; ``broker_s``: the part of it spent on the links between the broker and
    the first and last stage; ``beside_s``: the part outside the stages, the same for every plan. ``bound``: the limit
    that determines ``step_s``. ``way_s``: time of a step through all stages. ``even_s``: ``step_s`` if the same workers
    had even shares; None if those would not fit. ``left_out``: (worker, reason).

    ``one_more`` (one more worker like the fastest, on a machine of its own), ``others`` (the alternatives) and the
    reasons of left-out workers need a search. They are computed only for a report, never while a plan is awaited.
    """

    objective: str
    load: PlannedLoad
    takes_turns: bool
    stages: tuple[StageForecast, ...]
    step_s: float
    broker_s: float
    even_s: float | None
    left_out: tuple[tuple[str, str], ...]
    one_more: ExtraWorker | None = None
    notes: tuple[str, ...] = ()
    beside_s: float = 0.0
    others: tuple[Alternative, ...] = ()
    bound: tables.Bound = "turns"
    way_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of steps in flight at a time, each with all rows of the load."""
        return 1 if self.takes_turns else len(self.stages)

    @property
    def bottleneck(self) -> StageForecast:  # the slowest stage
        return max(self.stages, key=lambda stage: stage.compute_s)

    @property
    def margin(self) -> float:
        """Fraction of its time by which the slowest stage is slower than the next: the largest possible gain there."""
        times = sorted((stage.compute_s for stage in self.stages), reverse=True)
        return 1 - times[1] / times[0] if len(times) > 1 and times[0] else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.load.rows / self.step_s if self.step_s else 0.0


def make_forecast(
    problem: PlanningProblem,
    line: Line,
    load: PlannedLoad,
    objective: str,
    left_out: tuple[tuple[str, str], ...] = (),
    *,
    thorough: bool = False,
) -> Forecast:
    """Predict the times of this line of devices. ``left_out``: workers that were not even considered. ``thorough``:
    with searches for the time of a step with the left-out devices, where that doesn't take too long."""
    bounds = tables.step_bounds(problem, line)
    bound = max(bounds, key=lambda name: bounds[name])
    return Forecast(
        objective=objective,
        load=load,
        takes_turns=problem.takes_turns,
        stages=_stages(problem, line),
        step_s=bounds[bound],
        broker_s=sum(_broker_link_s(problem, line)),
        beside_s=tables.overhead_s(problem),
        even_s=_even_s(problem, line),
        left_out=left_out + _left_out(problem, line, thorough and len(problem.devices) <= MAX_EXACT),
        bound=bound,
        way_s=tables.step_latency_s(problem, line),
    )


def _stages(problem: PlanningProblem, line: Line) -> tuple[StageForecast, ...]:
    model, between = problem.model, tables.hop_seconds(replace(problem, takes_turns=True, free_hops=False))
    stages = []
    parts = zip(line, tables.stage_seconds(problem, line), _broker_link_s(problem, line), strict=True)
    for place, (share, seconds, way) in enumerate(parts):
        device = problem.devices[share.device]
        hop = float(between[share.device, line[place + 1].device]) if place + 1 < len(line) else 0.0
        needed = model.needed_bytes(share.layers, problem.kv_positions, device.kv_share) + device.standby_bytes
        room = model.kv_positions(share.layers, device.memory_bytes - device.standby_bytes, device.kv_share)
        before = problem.devices[line[place - 1].device] if place else None
        relayed = device.is_relayed if before is None else device.name in before.relayed_to
        stages.append(
            StageForecast(device.name, share.layers, seconds - way, hop, needed, device.memory_bytes, room, relayed)
        )
    return tuple(stages)


def _broker_link_s(problem: PlanningProblem, line: Line) -> list[float]:
    """Return by stage the time of the links between it and the broker: to the first one, from the last one."""
    ways = [0.0] * len(line)
    ways[0] += tables.entry_route_s(problem.devices[line[0].device])
    ways[-1] += tables.exit_route_s(problem.devices[line[-1].device])
    return ways


def even_line(problem: PlanningProblem, line: Line) -> Line | None:
    """Distribute layers evenly over the same devices in the same order, the first ones one more; None if it doesn't
    fit."""
    base, extra = divmod(problem.model.num_layers, len(line))
    shares, first = [], 0
    for place, share in enumerate(line):
        layers = LayerRange(first, first + base + (place < extra))
        device = problem.devices[share.device]
        if not len(layers) or problem.model.needed_bytes(layers, 0) > device.memory_bytes:
            return None
        shares.append(LayerShare(share.device, layers))
        first = layers.stop
    return tuple(shares)


def _even_s(problem: PlanningProblem, line: Line) -> float | None:
    even = even_line(problem, line)
    return None if even is None else tables.predicted_seconds(problem, even)


def _left_out(problem: PlanningProblem, line: Line, thorough: bool) -> tuple[tuple[str, str], ...]:
    used = {share.device for share in line}
    rest = [i for i in range(len(problem.devices)) if i not in used]
    now = tables.predicted_seconds(problem, line)
    return tuple(
        (problem.devices[index].name, left_out_reason(problem, index, now, thorough and count < MAX_EXPLAINED))
        for count, index in enumerate(rest)
    )


def left_out_reason(problem: PlanningProblem, index: int, now: float, thorough: bool) -> str:
    """Return why a device is not in the plan. ``now``: seconds of a step of the plan. ``thorough``: search for the time
    of a step with this device."""
    small = _memory_reason(problem, problem.devices[index])
    if small or not thorough:
        return small or "a step would not be faster with it"
    forced = solve(replace(problem, tolerance=0.0), frozenset((index,)))
    if isinstance(forced, Shortage):
        return _taken_reason(problem) or "no split of the layers gives it a share that fits into its memory"
    then = tables.predicted_seconds(problem, forced)
    if _ms(then) == _ms(now):
        return f"a step would take the same time with it: {_ms(then)}"
    if then < now:
        return f"the gain is too small to move layers: a step would take {_ms(then)} with it instead of {_ms(now)}"
    return f"a step would be slower with it: {_ms(then)} instead of {_ms(now)}"


def _taken_reason(problem: PlanningProblem) -> str:
    """Return which devices hold all layers by pins or cordons, so that none is left; empty if some are left."""
    held = [(device.name, device.pinned) for device in problem.devices if device.pinned is not None]
    if sum(len(pin) for _, pin in held) < problem.model.num_layers:
        return ""
    keep = ", ".join(f"{name} keeps {pin.label}" for name, pin in held)
    return f"no layers are left for it: {keep} (pinned or cordoned)"


def _memory_reason(problem: PlanningProblem, device: Device) -> str:
    missing = problem.min_bytes(device) - device.memory_bytes
    return f"it lacks {missing / 2**20:.0f} MiB of memory for a single layer" if missing > 0 else ""


# --- text and JSON ----------------------------------------------------------------------------------------------------


def describe_forecast(forecast: Forecast) -> tuple[str, ...]:
    """Return a forecast as sentences for people."""
    load, slowest = forecast.load, forecast.bottleneck
    decoding = f"{_pluralize(load.rows, 'sequence')} of {_pluralize(load.context, 'position')}"
    decoding += " that decodes" if load.rows == 1 else " that decode together"
    decoding += f" in each of {forecast.in_flight} steps in flight" if forecast.in_flight > 1 else ""
    lines = [
        f"objective {forecast.objective}: for {decoding}, with {_pluralize(load.prompt, 'position')} of prompt per "
        f"token, {_describe_bound(forecast)} {_ms(forecast.step_s)} a step: {forecast.tokens_per_s:.0f} tokens/s"
    ]
    if len(forecast.stages) > 1:
        after = f"{forecast.margin:.0%} less" if forecast.margin >= 0.005 else "the same time"
        time = f"{_ms(slowest.compute_s)} for {slowest.layers.label}"
        lines.append(f"the slowest stage is {slowest.worker}, {time}; the next one takes {after}")
    if forecast.even_s is not None and len(forecast.stages) > 1:
        gain = describe_speedup(forecast.step_s, forecast.even_s)
        lines.append(f"with even shares a step would take {_ms(forecast.even_s)}: this plan is {gain}" if gain else "")
    if forecast.broker_s >= forecast.step_s / 100:
        lines.append(f"{_ms(forecast.broker_s)} of a step is latency between the broker and the end stages")
    if forecast.beside_s >= forecast.step_s / 100:
        lines.append(f"{_ms(forecast.beside_s)} of a step is spent outside of the stages, with any plan")
    lines += _describe_relayed(forecast.stages)
    lines += _describe_left_out(forecast.left_out)
    lines += [_describe_alternative(each) for each in forecast.others]
    return tuple(text for text in (*lines, *forecast.notes) if text)


def _describe_bound(forecast: Forecast) -> str:
    """Return a phrase for the part that determines a step's time."""
    if len(forecast.stages) == 1:
        return f"the only stage, {forecast.bottleneck.worker}, takes"
    if forecast.bound == "turns":
        return "all stages one after the other take"
    if forecast.bound == "cores":
        return "stages that share a machine's cores, or a GPU, take"
    if forecast.bound == "way":
        return f"a step is {_ms(forecast.way_s)} in transit through all stages, so {forecast.in_flight} in flight take"
    return f"the slowest stage, {forecast.bottleneck.worker}, takes"


def describe_extra_worker(forecast: Forecast) -> tuple[str, ...]:
    """Return the effect of one more worker as text, if it was computed."""
    more = forecast.one_more
    if more is None:
        return ()
    gain = describe_speedup(more.step_s, more.now_s)
    what = f"{_ms(more.step_s)} a step, {gain}" if gain else "no faster step"
    if gain and more.sequences != forecast.load.rows * forecast.in_flight:
        what = f"{what} for {more.sequences} sequences at a time, which take {_ms(more.now_s)} now"
    return (f"one more worker like {more.like}, on a machine of its own, would give {what}",)


def _describe_relayed(stages: Sequence[StageForecast]) -> list[str]:
    """Return a sentence for each stage that is reached through the relay, with the cost."""
    sentences = []
    for before, stage in itertools.pairwise((None, *stages)):
        if stage is not None and stage.by_relay:
            price = "" if before is None else f", in {_ms(before.hop_s)} from {before.worker}"
            sentences.append(f"{stage.worker} is reached only through the broker's relay{price}")
    return sentences


def _describe_left_out(left_out: tuple[tuple[str, str], ...]) -> list[str]:
    """Return a sentence for each reason, not for each worker."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out:
        groups.setdefault(why, []).append(name)
    return [
        f"{names[0]} is left out: {why}"
        if len(names) == 1
        else f"{_join_names(names)} are left out, for the same reason: {why}"
        for why, names in groups.items()
    ]


def _describe_alternative(other: Alternative) -> str:
    seconds = f"{_ms(other.step_s)} a step, this plan takes {_ms(other.now_s)}"
    return f"alternative, {_describe_shares(other.shares)}: {seconds}; {other.why}"


def _describe_shares(shares: NamedShares) -> str:
    if len(shares) == 1:
        return f"all layers on {shares[0][0]}"
    return _join_names([f"{worker} {layers}" for worker, layers in shares])


def _join_names(names: list[str]) -> str:
    shown = names if len(names) <= MAX_NAMED else names[: MAX_NAMED - 1]
    rest = len(names) - len(shown)
    return f"{', '.join(shown)} and {rest} more" if rest else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _pluralize(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def forecast_json(forecast: Forecast) -> Json:
    """Return a forecast as JSON."""
    return {
        "objective": forecast.objective,
        "load": {"rows": forecast.load.rows, "context": forecast.load.context, "prompt": forecast.load.prompt},
        "takes_turns": forecast.takes_turns,
        "step_s": forecast.step_s,
        "broker_s": forecast.broker_s,
        "beside_s": forecast.beside_s,
        "tokens_per_second": round(forecast.tokens_per_s, 2),
        "bottleneck": forecast.bottleneck.worker,
        "margin": round(forecast.margin, 4),
        "even_s": forecast.even_s,
        "one_more": None if forecast.one_more is None else _one_more_json(forecast.one_more),
        "in_flight": forecast.in_flight,
        "left_out": [{"worker": name, "why": why} for name, why in forecast.left_out],
        "others": [
            {
                "shares": {worker: [layers.first, layers.stop] for worker, layers in alternative.shares},
                "step_s": alternative.step_s,
                "now_step_s": alternative.now_s,
                "why": alternative.why,
            }
            for alternative in forecast.others
        ],
        "stages": [stage_json(stage) for stage in forecast.stages],
    }


def _one_more_json(more: ExtraWorker) -> Json:
    return {"like": more.like, "step_s": more.step_s, "now_step_s": more.now_s, "sequences": more.sequences}


def stage_json(stage: StageForecast) -> Json:
    return {
        "worker": stage.worker,
        "layers": [stage.layers.first, stage.layers.stop],
        "predicted_s": stage.compute_s,
        "hop_s": stage.hop_s,
        "needed_bytes": stage.needed_bytes,
        "memory_bytes": stage.memory_bytes,
        "kv_positions": stage.kv_positions,
        "by_relay": stage.by_relay,
    }


def describe_speedup(quick_s: float, slow_s: float) -> str:
    """Return how much faster the first time is than the second, as text; empty if the difference is negligible."""
    ratio = slow_s / max(quick_s, MIN_S)
    if ratio < 1.005:
        return ""
    return f"{ratio - 1:.0%} faster" if ratio < 2 else f"{ratio:.1f} × as fast"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
