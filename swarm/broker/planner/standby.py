"""Choice of the layers that each worker keeps warm for others: loaded, without keys and values, in case their holder
dies.

* ``neighbours``: the first part of a stage's layers is kept by the stage before it, the second part by the stage behind
  it: after a loss both grow by layers that they already have, and no other worker is involved. Together the swarm loads
  every layer twice. Each of the two gets a part by its speed, and less if its memory would not hold all of the layers.
  Where one has no memory left, the other takes more.
* ``all``: beyond that, every stage extends in both directions as long as it has memory.
* A worker without a part in the plan keeps as much as fits, unless the policy is ``none``: its memory has no other use.

Standby layers take memory from keys and values: they get at most half of what a stage's own weights leave, and never
the memory for the positions that every stage must have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from swarm.broker.planner.problem import Line, PlanningProblem
from swarm.wire.messages import LayerRange, layers_of, to_ranges

StandbyPolicy = Literal["none", "neighbours", "all"]
NEAR_PART = 4  # a cut that differs from the best one by at most this part of the layers is near
MAX_SHARE = 0.5  # most of the memory besides weights that standby layers may take


def choose_standby(problem: PlanningProblem, line: Line, policy: StandbyPolicy) -> dict[int, tuple[LayerRange, ...]]:
    """Return the layers to keep warm besides its own, for each device that keeps any."""
    if policy == "none" or len(problem.devices) < 2:
        return {}
    stages = [_Stage(problem, share.device, share.layers) for share in line]
    gaps = [_Gap(stages, place) for place in range(len(stages))]
    _cover(gaps, halves=True)
    _cover(gaps, halves=False)
    if policy == "all":
        for stage in stages:
            stage.spread()
    kept = {stage.device: to_ranges(stage.kept) for stage in stages if stage.kept}
    return kept | _assign_spares(problem, {stage.device for stage in stages})


@dataclass(slots=True)
class _Stage:
    problem: PlanningProblem
    device: int
    layers: LayerRange
    kept: set[int] = field(default_factory=set)
    free_bytes: int = field(init=False)  # remaining bytes for standby layers

    def __post_init__(self) -> None:
        model, device = self.problem.model, self.problem.devices[self.device]
        free = device.memory_bytes - model.weight_bytes(self.layers)
        kv = model.needed_kv(self.layers, self.problem.kv_positions)
        needed = max(model.buffers(self.layers), int(kv / device.kv_share))
        self.free_bytes = min(int(free * MAX_SHARE), free - needed)

    def keep(self, layer: int) -> bool:
        """Keep this layer, too, if there is memory for it; return whether it is kept."""
        size = self.problem.model.weight_bytes(LayerRange(layer, layer + 1))
        if layer in self.kept:
            return True
        if size > self.free_bytes:
            return False
        self.kept.add(layer)
        self.free_bytes -= size
        return True

    @property
    def present(self) -> frozenset[int]:
        """Layers that the device keeps warm already."""
        return layers_of(self.problem.devices[self.device].kept)

    def weight(self, layers: LayerRange) -> float:
        """Return how large a part of these layers this stage should keep, relative to the other neighbour: by its speed
        and the fraction of them that its memory can hold."""
        device = self.problem.devices[self.device]
        fits = min(1.0, max(0, self.free_bytes) / max(1, self.problem.model.weight_bytes(layers)))
        return fits / device.layer_s if device.layer_s > 0 else fits

    def spread(self) -> None:
        """Keep more layers, outwards on both sides, as far as memory allows."""
        down, up, num = self.layers.stop, self.layers.first - 1, self.problem.model.num_layers
        while down < num or up >= 0:
            down = down + 1 if down < num and self.keep(down) else num
            up = up - 1 if up >= 0 and self.keep(up) else -1


class _Gap:
    """Layers that would be missing without one stage, and how far its neighbours cover them from both ends."""

    def __init__(self, stages: list[_Stage], place: int) -> None:
        self.before = stages[place - 1] if place > 0 else None
        self.behind = stages[place + 1] if place + 1 < len(stages) else None
        self.low, self.high = stages[place].layers.first, stages[place].layers.stop
        before, behind = (
            0.0 if each is None else each.weight(stages[place].layers) for each in (self.before, self.behind)
        )
        part = before / (before + behind) if before + behind else 0.5
        best = self.low + math.floor(part * (self.high - self.low) + 0.5)
        self.middle = self._find_present_cut(best)  # where the second part begins

    def _find_present_cut(self, best: int) -> int:
        """Return the cut at which both neighbours keep their parts already, if it is near the best one: other layers
        would have to be loaded, and their keys and values copied once more."""
        if self.before is None or self.behind is None:
            return best
        before, behind = self.before.present, self.behind.present
        cuts = [
            cut
            for cut in range(self.low, self.high + 1)
            if before.issuperset(range(self.low, cut)) and behind.issuperset(range(cut, self.high))
        ]
        nearest = min(cuts, key=lambda cut: abs(cut - best), default=best)
        return nearest if abs(nearest - best) <= max(1, (self.high - self.low) // NEAR_PART) else best

    def grow(self, *, halves: bool) -> bool:
        """Cover one layer more at each end; False if there was no memory, or nothing left to do."""
        grew = False
        if self.before is not None and self.low < (self.middle if halves else self.high) and self.before.keep(self.low):
            self.low, grew = self.low + 1, True
        least = max(self.low, self.middle if halves else 0)
        if self.behind is not None and self.high > least and self.behind.keep(self.high - 1):
            self.high, grew = self.high - 1, True
        return grew


def _cover(gaps: list[_Gap], *, halves: bool) -> None:
    """Cover the gaps in turn, layer by layer, so that one stage's neighbours don't use up the memory that other gaps
    need."""
    grew = True
    while grew:
        grew = sum(gap.grow(halves=halves) for gap in gaps) > 0


def _assign_spares(problem: PlanningProblem, used: set[int]) -> dict[int, tuple[LayerRange, ...]]:
    """Let spare devices take layers, each from where the one before it ran out of memory."""
    model, first = problem.model, 0
    kept: dict[int, tuple[LayerRange, ...]] = {}
    for index, device in enumerate(problem.devices):
        if index in used or device.max_layers == 0:
            continue
        stop = first
        while stop < model.num_layers and (
            model.needed_bytes(LayerRange(first, stop + 1), problem.kv_positions, device.kv_share)
            <= device.memory_bytes
        ):
            stop += 1
        if stop > first:
            kept[index] = (LayerRange(first, stop),)
        first = stop % model.num_layers
    return kept
