"""Description of a plan in text and figures: the prediction, the bottleneck, the effect of one more worker, the devices
that are left out and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.broker.planner import tables
from swarm.broker.planner.load import LEAST_S, Load
from swarm.broker.planner.problem import Device, Line, Problem, Share, Shortage
from swarm.broker.planner.solve import EXACT, solve
from swarm.wire.messages import Json, LayerRange

MAX_EXPLAINED = 4  # of the devices left out: each costs a search
MAX_NAMED = 8  # names in one sentence

NamedShares = tuple[tuple[str, LayerRange], ...]  # workers' names and the layers that each would have


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Forecast of one stage. ``compute_s``: in one step of the load. ``hop_s``: to the next stage. ``needed_bytes``:
    with buffers and KV. ``by_relay``: whether the stage is reached through the relay."""

    worker: str
    layers: LayerRange
    compute_s: float
    hop_s: float
    needed_bytes: int
    memory_bytes: int
    kv_positions: int
    by_relay: bool = False


@dataclass(frozen=True, slots=True)
class Weighed:
    """Alternative that was considered: the time of a step, that of the active plan as measured now, and why it is not
    made."""

    shares: NamedShares
    step_s: float
    now_s: float
    why: str


@dataclass(frozen=True, slots=True)
class OneMore:
    """Effect of another worker like ``like``. ``sequences``: number that would decode at a time; the active plan takes
    ``now_s`` for as many of them."""

    like: str
    step_s: float
    now_s: float
    sequences: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a plan. ``step_s``: from one step to the next; ``broker_s``: the part of it for the links between the
    broker and the first and last stage; ``beside_s``: the part that every plan has. ``bound``: the limit that
    determines it; ``way_s``: time of a step through all stages. ``even_s``: the time if the same workers had even
    shares; None if those would not fit. ``left_out``: (worker, reason). Parts that need a search are computed only for
    a report, never while a plan is awaited: ``one_more``, with another worker like the quickest, on a machine of its
    own, ``others``, the alternatives considered, and the time of a step with the left-out workers."""

    objective: str
    load: Load
    takes_turns: bool
    stages: tuple[StageForecast, ...]
    step_s: float
    broker_s: float
    even_s: float | None
    left_out: tuple[tuple[str, str], ...]
    one_more: OneMore | None = None
    notes: tuple[str, ...] = ()
    beside_s: float = 0.0
    others: tuple[Weighed, ...] = ()
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


def forecast(
    problem: Problem,
    line: Line,
    load: Load,
    objective: str,
    left_out: tuple[tuple[str, str], ...] = (),
    *,
    thorough: bool = False,
) -> Forecast:
    """Predict the times of this line of devices. ``left_out``: workers that were not even considered. ``thorough``:
    with searches for the time of a step with the left-out devices, where that doesn't take too long."""
    bounds = tables.bounds(problem, line)
    bound = max(bounds, key=lambda name: bounds[name])
    return Forecast(
        objective=objective,
        load=load,
        takes_turns=problem.takes_turns,
        stages=_stages(problem, line),
        step_s=bounds[bound],
        broker_s=sum(_ways(problem, line)),
        beside_s=tables.beside_s(problem),
        even_s=_even(problem, line),
        left_out=left_out + _left_out(problem, line, thorough and len(problem.devices) <= EXACT),
        bound=bound,
        way_s=tables.way_s(problem, line),
    )


def _stages(problem: Problem, line: Line) -> tuple[StageForecast, ...]:
    model, between = problem.model, tables.hops(replace(problem, takes_turns=True, free_hops=False))
    found = []
    parts = zip(line, tables.stage_seconds(problem, line), _ways(problem, line), strict=True)
    for place, (share, seconds, way) in enumerate(parts):
        device = problem.devices[share.device]
        hop = float(between[share.device, line[place + 1].device]) if place + 1 < len(line) else 0.0
        needed = model.needed_bytes(share.layers, problem.kv_positions, device.kv_share) + device.standby_bytes
        room = model.kv_positions(share.layers, device.memory_bytes - device.standby_bytes, device.kv_share)
        before = problem.devices[line[place - 1].device] if place else None
        relayed = device.is_relayed if before is None else device.name in before.relayed_to
        found.append(
            StageForecast(device.name, share.layers, seconds - way, hop, needed, device.memory_bytes, room, relayed)
        )
    return tuple(found)


def _ways(problem: Problem, line: Line) -> list[float]:
    """Return by stage the time of the links between it and the broker: to the first one, from the last one."""
    ways = [0.0] * len(line)
    ways[0] += tables.way_in_s(problem.devices[line[0].device])
    ways[-1] += tables.way_out_s(problem.devices[line[-1].device])
    return ways


def even_line(problem: Problem, line: Line) -> Line | None:
    """Distribute layers evenly over the same devices in the same order, the first ones one more; None if it doesn't
    fit."""
    base, extra = divmod(problem.model.num_layers, len(line))
    shares, first = [], 0
    for place, share in enumerate(line):
        layers = LayerRange(first, first + base + (place < extra))
        device = problem.devices[share.device]
        if not len(layers) or problem.model.needed_bytes(layers, 0) > device.memory_bytes:
            return None
        shares.append(Share(share.device, layers))
        first = layers.stop
    return tuple(shares)


def _even(problem: Problem, line: Line) -> float | None:
    even = even_line(problem, line)
    return None if even is None else tables.told_seconds(problem, even)


def _left_out(problem: Problem, line: Line, thorough: bool) -> tuple[tuple[str, str], ...]:
    used = {share.device for share in line}
    rest = [i for i in range(len(problem.devices)) if i not in used]
    now = tables.told_seconds(problem, line)
    return tuple(
        (problem.devices[index].name, why_left_out(problem, index, now, thorough and count < MAX_EXPLAINED))
        for count, index in enumerate(rest)
    )


def why_left_out(problem: Problem, index: int, now: float, thorough: bool) -> str:
    """Return why a device isn't in the plan, whose step takes ``now`` seconds. ``thorough``: search for the time of a
    step with this device."""
    small = _too_small(problem, problem.devices[index])
    if small or not thorough:
        return small or "the step would not be quicker with it"
    forced = solve(replace(problem, tolerance=0.0), frozenset((index,)))
    if isinstance(forced, Shortage):
        return _all_taken(problem) or "no cut of the layers leaves it a share that fits"
    then = tables.told_seconds(problem, forced)
    if _ms(then) == _ms(now):
        return f"the step would take as long with it: {_ms(then)}"
    if then < now:
        return f"the step would be too little quicker with it to move layers: {_ms(then)} instead of {_ms(now)}"
    return f"it would make the step slower: {_ms(then)} instead of {_ms(now)}"


def _all_taken(problem: Problem) -> str:
    """Return which devices hold all the layers, if pins (or cordons, which keep layers likewise) leave none."""
    held = [(device.name, device.pinned) for device in problem.devices if device.pinned is not None]
    if sum(len(pin) for _, pin in held) < problem.model.num_layers:
        return ""
    keep = ", ".join(f"{name} keeps {pin.in_words}" for name, pin in held)
    return f"no layers are left for it: {keep}, being pinned or cordoned"


def _too_small(problem: Problem, device: Device) -> str:
    missing = problem.least_bytes(device) - device.memory_bytes
    return f"{missing / 2**20:.0f} MiB of memory are missing for even one layer" if missing > 0 else ""


# --- text and JSON ----------------------------------------------------------------------------------------------------


def sentences(found: Forecast) -> tuple[str, ...]:
    """Return a forecast as sentences for people."""
    load, slowest = found.load, found.bottleneck
    decoding = f"{_many(load.rows, 'sequence')} of {_many(load.context, 'position')}"
    decoding += " that decodes" if load.rows == 1 else " that decode together"
    decoding += f" in each of {found.in_flight} steps in flight" if found.in_flight > 1 else ""
    said = [
        f"objective {found.objective}: for {decoding}, with {_many(load.prompt, 'position')} of prompt per token, "
        f"{_takes(found)} {_ms(found.step_s)} a step: {found.tokens_per_s:.0f} tokens/s"
    ]
    if len(found.stages) > 1:
        after = f"the next {found.margin:.0%} less" if found.margin >= 0.005 else "the next as long"
        said.append(f"{slowest.worker} takes longest, {_ms(slowest.compute_s)} for {slowest.layers.in_words}; {after}")
    if found.even_s is not None and len(found.stages) > 1:
        gain = quicker(found.step_s, found.even_s)
        said.append(f"even shares would take {_ms(found.even_s)}: this is {gain}" if gain else "")
    if found.broker_s >= found.step_s / 100:
        said.append(f"{_ms(found.broker_s)} of a step is latency between the broker and the end stages")
    if found.beside_s >= found.step_s / 100:
        said.append(f"{_ms(found.beside_s)} of a step is spent outside of the stages, with any plan")
    said += _said_of_relayed(found.stages)
    said += _said_of_left_out(found.left_out)
    said += [_said_of_weighed(each) for each in found.others]
    return tuple(text for text in (*said, *found.notes) if text)


def _takes(found: Forecast) -> str:
    """Return a phrase for the part that determines a step's time."""
    if len(found.stages) == 1:
        return f"the only stage, {found.bottleneck.worker}, takes"
    if found.bound == "turns":
        return "all stages one after the other take"
    if found.bound == "cores":
        return "stages that share the cores of a machine take"
    if found.bound == "way":
        return f"a step is {_ms(found.way_s)} in transit through all stages, so {found.in_flight} in flight take"
    return f"the slowest stage, {found.bottleneck.worker}, takes"


def of_one_more(found: Forecast) -> tuple[str, ...]:
    """Return the effect of one more worker as text, if it was computed."""
    more = found.one_more
    if more is None:
        return ()
    gain = quicker(more.step_s, more.now_s)
    what = f"{_ms(more.step_s)} a step, {gain}" if gain else "no quicker step"
    if gain and more.sequences != found.load.rows * found.in_flight:
        what = f"{what} for {more.sequences} sequences at a time, which take {_ms(more.now_s)} now"
    return (f"one more worker like {more.like}, on a machine of its own, would give {what}",)


def _said_of_relayed(stages: Sequence[StageForecast]) -> list[str]:
    """Return a sentence for each stage that is reached through the relay, with the cost."""
    said = []
    for before, stage in itertools.pairwise((None, *stages)):
        if stage is not None and stage.by_relay:
            price = "" if before is None else f", in {_ms(before.hop_s)} from {before.worker}"
            said.append(f"{stage.worker} is reached only through the broker's relay{price}")
    return said


def _said_of_left_out(left_out: tuple[tuple[str, str], ...]) -> list[str]:
    """Return a sentence for each reason, not for each worker."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out:
        groups.setdefault(why, []).append(name)
    return [
        f"{names[0]} is left out: {why}" if len(names) == 1 else f"{_listed(names)} are left out, each because: {why}"
        for why, names in groups.items()
    ]


def _said_of_weighed(other: Weighed) -> str:
    seconds = f"{_ms(other.step_s)} a step instead of {_ms(other.now_s)}"
    return f"compared with {_shared(other.shares)}, {seconds}: {other.why}"


def _shared(shares: NamedShares) -> str:
    if len(shares) == 1:
        return f"all layers with {shares[0][0]} alone"
    return _listed([f"{worker} {layers}" for worker, layers in shares])


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= MAX_NAMED else names[: MAX_NAMED - 1]
    rest = len(names) - len(shown)
    return f"{', '.join(shown)} and {rest} more" if rest else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _many(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def as_json(found: Forecast) -> Json:
    """Return a forecast as JSON."""
    return {
        "objective": found.objective,
        "load": {"rows": found.load.rows, "context": found.load.context, "prompt": found.load.prompt},
        "takes_turns": found.takes_turns,
        "step_s": found.step_s,
        "broker_s": found.broker_s,
        "beside_s": found.beside_s,
        "tokens_per_second": round(found.tokens_per_s, 2),
        "bottleneck": found.bottleneck.worker,
        "margin": round(found.margin, 4),
        "even_s": found.even_s,
        "one_more": None if found.one_more is None else _one_more_json(found.one_more),
        "in_flight": found.in_flight,
        "left_out": [{"worker": name, "why": why} for name, why in found.left_out],
        "others": [
            {
                "shares": {worker: [layers.first, layers.stop] for worker, layers in each.shares},
                "step_s": each.step_s,
                "now_step_s": each.now_s,
                "why": each.why,
            }
            for each in found.others
        ],
        "stages": [stage_json(stage) for stage in found.stages],
    }


def _one_more_json(more: OneMore) -> Json:
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


def quicker(quick_s: float, slow_s: float) -> str:
    """Return how much quicker the one is than the other, as text; empty if the difference is negligible."""
    ratio = slow_s / max(quick_s, LEAST_S)
    if ratio < 1.005:
        return ""
    return f"{ratio - 1:.0%} quicker" if ratio < 2 else f"{ratio:.1f} × as quick"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
