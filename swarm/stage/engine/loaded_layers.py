"""Layers in memory: those of the active stage, of the next one, and standby layers.

One thread loads layers while another one computes with the active stage. So a dict of modules is never changed, only
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.errors import IllegalMove, ModelError
from swarm.stage.engine.memory_plan import MemoryPlan
from swarm.stage.executor import Progress, StopCheck
from swarm.stage.model.build import Stage
from swarm.stage.model.loading import Modules, StageLoader
from swarm.stage.native.memory import release_free_memory
from swarm.wire.messages import LayerRange, layers_of, to_ranges


@dataclass(frozen=True, slots=True)
class ActiveStage:
    """A stage that is ready to compute."""

    stage: Stage
    standby: frozenset[int]  # layers for which memory is reserved
    parts: dict[LayerRange, Stage] = field(default_factory=dict)  # stages of some of its layers, for replays


class LoadedLayers:
    """Loads layers, and holds them."""

    def __init__(self, loader: StageLoader, memory: MemoryPlan) -> None:
        self._loader = loader
        self._memory = memory
        self.active: ActiveStage | None = None
        self._prepared: ActiveStage | None = None  # not active yet
        self._standby: dict[int, Modules] = {}  # by layer

    @property
    def standby(self) -> frozenset[int]:
        """Standby layers that are loaded."""
        return frozenset(self._standby)

    @property
    def modules(self) -> Modules:
        """Modules of the active stage and of standby layers."""
        held = {} if self.active is None else dict(self.active.stage.modules)
        for modules in self._standby.values():
            held |= modules
        return held

    def load_stage(
        self, layers: LayerRange, standby: frozenset[int], progress: Progress
    ) -> tuple[Stage, frozenset[int]]:
        """Return a stage, and its layers that were not loaded before."""
        self._check_range(layers)
        self._memory.check_weights((layers, *to_ranges(standby - layers_of((layers,)))))
        return self._loader.load(layers, self.modules, progress)

    def set_prepared(self, stage: Stage, standby: frozenset[int]) -> None:
        """Make this the next stage."""
        self._prepared = ActiveStage(stage, standby)

    def activate(self, layers: LayerRange, kept: frozenset[int]) -> None:
        """Make the next stage the active one, and keep these standby layers; or check that it is active already."""
        if self._prepared is not None and self._prepared.stage.layers == layers:
            loaded = self.modules
            self.active, self._prepared = self._prepared, None
            self._standby = {layer: self._loader.modules_of(layer, loaded) for layer in kept}
            release_free_memory()
        elif self.active is None or self.active.stage.layers != layers:
            raise IllegalMove(f"layers {layers} were not prepared")

    def keep(
        self, ranges: tuple[LayerRange, ...], progress: Progress, stopped: StopCheck, warm_up: Callable[[Stage], object]
    ) -> tuple[LayerRange, ...]:
        """Load standby layers and drop others. Return what is loaded, which is less if ``stopped`` holds."""
        for layers in ranges:
            self._check_range(layers)
        active = () if self.active is None else (self.active.stage.layers,)
        wanted = layers_of(ranges) - layers_of(active)
        self._memory.check_weights((*active, *to_ranges(wanted)))
        self._standby = {layer: modules for layer, modules in self._standby.items() if layer in wanted}
        release_free_memory()
        for layer in sorted(wanted - self._standby.keys()):
            if stopped(to_ranges(self._standby)):
                break
            stage, _ = self._loader.load(LayerRange(layer, layer + 1), {}, progress)
            warm_up(stage)
            self._standby = self._standby | {layer: stage.modules}
        return to_ranges(self._standby)

    def drop_standby(self) -> None:
        self._standby = {}

    def active_stage(self) -> Stage:
        if self.active is None:
            raise IllegalMove("no layers are active")
        return self.active.stage

    def part_stage(self, layers: LayerRange) -> Stage:
        """Return a stage of some of the active stage's layers, with the same modules."""
        whole = self.active_stage()
        if layers == whole.layers:
            return whole
        assert self.active is not None
        if layers not in self.active.parts:
            self.active.parts[layers] = self._loader.build_slice(whole, layers)
        return self.active.parts[layers]

    def _check_range(self, layers: LayerRange) -> None:
        num_layers = self._memory.manifest.num_layers
        if not 0 <= layers.first < layers.stop <= num_layers:
            raise ModelError(f"layers {layers} are not a range of the model's {num_layers} layers")
