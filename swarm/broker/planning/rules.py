"""Rules that a plan must follow, from the settings and, with priority, from operators' commands
(``state.constraints``); and the devices that the planner supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm.broker.planner.load import PlannedLoad, Speeds
from swarm.broker.planner.standby import StandbyPolicy
from swarm.broker.planning.demand import QUIET_SEQUENCES
from swarm.broker.state import Plan, State, Worker, WorkerState
from swarm.broker.state.constraints import PlanConstraints
from swarm.wire.messages import Hello, LayerRange, Pin, PlanOverrides

DEVICES = ("cpu", "cuda", "mps")


def is_supported(device: str) -> bool:
    """Whether ``device`` is one of DEVICES, optionally with a number: ``cuda:1``."""
    return device.partition(":")[0] in DEVICES


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules that a plan must follow. ``quiet_s``: for how long at most one sequence must be under way before objective
    ``auto`` means latency (0: it never does); ``is_quiet``: it does now. ``margin``: the active plan is changed for
    speed alone only if the new one is quicker by more than this fraction. ``pins``, ``caps``, ``exclude``: by workers'
    names. ``min_layers_per_s``: the least decoding speed of a worker, with one sequence. ``standby``: which layers are
    kept warm in case their holder dies. ``standby_kv``: which of these workers also hold copies of
    keys and values. ``cooldown_s``: time between two checks of how quick workers really are."""

    mode: str = "auto"  # how steps run: "auto", "batch" or "overlapped"
    objective: str = "auto"  # "auto", "latency" or "throughput"
    load: PlannedLoad = field(default_factory=PlannedLoad)
    kv_positions: int = 0  # positions of keys and values that every stage must have room for
    quiet_s: float = 0.0
    is_quiet: bool = False
    margin: float = 0.1
    step_positions: int = 512  # positions of the largest step, for the memory that it takes
    max_running: int = 64
    max_sequences: int = 64  # that a stage may hold at a time
    min_memory_bytes: int = 0
    min_layers_per_s: float = 0.0
    pins: Mapping[str, LayerRange] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)  # most layers of a worker
    exclude: frozenset[str] = frozenset()
    standby: StandbyPolicy = "neighbours"
    standby_kv: StandbyPolicy = "neighbours"
    cooldown_s: float = 30.0

    @property
    def busy_from(self) -> int:
        """Number of running sequences at which objective ``auto`` switches back to throughput: half of the planned
        number."""
        return max(QUIET_SEQUENCES + 1, self.load.rows // 2)

    def resolve_objective(self, workers: Sequence[Worker], hosts: Sequence[str], context: int) -> PlanRules:
        """Return the rules with objective ``auto`` resolved: latency if the load is low and several steps could be in
        flight.

        Where stages take turns, a step's time is the sum of the stages' times for any objective, so each worker keeps
        its share. A plan for latency needs KV capacity for a whole context, so that it rejects no request as too large
        that a plan for throughput would accept.
        """
        if self.objective != "auto":
            return replace(self, is_quiet=False)
        is_spread = len(set(hosts)) > 1 or any(worker.hello.device != "cpu" for worker in workers)
        if not self.is_quiet or self.mode != "auto" or not is_spread:
            return replace(self, objective="throughput", is_quiet=False)
        return replace(self, objective="latency", kv_positions=max(self.kv_positions, context))

    def admission_error(self, hello: Hello) -> str | None:
        """Return the reason why this worker is rejected as a member; None if it is accepted."""
        if hello.memory_bytes < self.min_memory_bytes:
            return (
                f"it may use {hello.memory_bytes / 2**20:.0f} MiB for the model, and this swarm takes workers from "
                f"{self.min_memory_bytes / 2**20:.0f} MiB on (plan.min_memory): raise its memory limit"
            )
        speeds = Speeds.from_costs(hello.costs, alone=True)
        if speeds is None or not self.min_layers_per_s:
            return None
        rate = 1 / max(speeds.layer_s(PlannedLoad(1, self.load.context, 0.0)), 1e-9)
        if rate >= self.min_layers_per_s:
            return None
        return (
            f"it was measured to compute {rate:.3g} layers a second, and this swarm takes workers from "
            f"{self.min_layers_per_s:.3g} on (plan.min_layers_per_s): give it more threads or another device"
        )


def apply_steering(
    state: State, rules: PlanRules, plan: Plan | None, steering: PlanConstraints | None = None
) -> PlanRules:
    """Apply an operator's commands (``steering``, by default the present ones) on top of the settings. A cordoned
    worker keeps its layers of ``plan``, and gets none if it has none there."""
    steering = state.constraints if steering is None else steering
    cordoned_layers = dict(_find_cordoned_layers(state, plan))
    idle = {name for name in steering.cordoned if name not in cordoned_layers}
    return replace(
        rules,
        objective=steering.objective or rules.objective,
        pins={**rules.pins, **steering.pins, **cordoned_layers},
        caps={**rules.caps, **steering.caps},
        exclude=rules.exclude | steering.exclude | steering.drained | idle,
        margin=rules.margin if steering.margin is None else steering.margin,
    )


def exclude_cordoned(state: State, rules: PlanRules) -> PlanRules:
    """Exclude cordoned workers altogether: the fallback if no plan leaves them their layers."""
    return replace(rules, exclude=rules.exclude | set(state.constraints.cordoned), pins=_uncordoned_pins(state, rules))


def _uncordoned_pins(state: State, rules: PlanRules) -> dict[str, LayerRange]:
    return {name: layers for name, layers in rules.pins.items() if name not in state.constraints.cordoned}


def _find_cordoned_layers(state: State, plan: Plan | None) -> Iterator[tuple[str, LayerRange]]:
    """Return the layers that cordoned workers keep. Without a plan: the layers that they served when they were
    cordoned, if they still hold them."""
    for worker in state.workers.values():
        served = state.constraints.cordoned.get(worker.name)
        if worker.is_gone or served is None:
            continue
        stage = None if plan is None else plan.stage_of(worker.incarnation)
        if stage is not None:
            yield worker.name, stage.layers
        elif plan is None and worker.layers == served:
            yield worker.name, served


# --- conflicts between commands ---------------------------------------------------------------------------------------


def exclusion_reason(steering: PlanConstraints, name: str) -> str:
    """Return by whose command a worker gets no layers, and how to undo it."""
    if held_as := steering.restriction(name):
        return f"it is {held_as} (swarmctl uncordon allows it to get layers again)"
    if name in steering.exclude:
        return "it is excluded by hand (swarmctl plan --apply restores the settings)"
    return "it is excluded by the settings (plan.exclude)"


def describe_held(steering: PlanConstraints, names: Sequence[str]) -> str:
    """Return which of these workers are drained or cordoned, and how to undo it: ``w0, w1 are drained: …``."""
    drained = [name for name in names if name in steering.drained]
    cordoned = [name for name in names if name not in steering.drained]
    parts = [
        f"{', '.join(each)} {'is' if len(each) == 1 else 'are'} {state}"
        for each, state in ((drained, "drained"), (cordoned, "cordoned"))
        if each
    ]
    return f"{', '.join(parts)}: swarmctl uncordon {' or '.join(names)}"


def find_override(state: State, rules: PlanRules, hand: PlanOverrides) -> str:
    """Return why a part of an operator's plan would have no effect because of an earlier command, and what to do first;
    empty if every part takes effect."""
    cordoned_layers = dict(_find_cordoned_layers(state, state.plans.current))
    override = next(
        (text for pin in hand.pins if (text := _find_pin_override(state, rules, hand, cordoned_layers, pin))), ""
    )
    if override:
        return override
    exceeded = next(
        (cap for cap in hand.caps if cap.worker in cordoned_layers and len(cordoned_layers[cap.worker]) > cap.most),
        None,
    )
    return (
        ""
        if exceeded is None
        else f"{_uncordon_hint(exceeded.worker, cordoned_layers[exceeded.worker])}, more than {exceeded.most}"
    )


def _find_pin_override(
    state: State, rules: PlanRules, hand: PlanOverrides, kept: Mapping[str, LayerRange], pin: Pin
) -> str:
    steering, name = state.constraints, pin.worker
    if name in steering.cordoned and (name in steering.drained or name not in kept):
        held_as = steering.restriction(name)
        return f"{name} is {held_as} and gets no layers, whatever is pinned to it: first swarmctl uncordon {name}"
    if name in kept:
        return "" if kept[name] == pin.layers else f"{_uncordon_hint(name, kept[name])}, and no others"
    if name in hand.exclude:
        return f"{name} can't be pinned and excluded at once: leave one of the two out"
    if name in rules.exclude:
        return f"{name} is excluded by the settings and gets no layers: first take it out of plan.exclude"
    if any(w.name == name and w.state is WorkerState.LEAVING for w in state.workers.values()):
        return f"{name} is leaving and gets no layers: wait until it has gone, or start another one"
    return ""


def _uncordon_hint(name: str, layers: LayerRange) -> str:
    return f"first swarmctl uncordon {name}: it is cordoned, so it keeps {layers.label}"
