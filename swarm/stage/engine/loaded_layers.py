"""Layers in memory: those of the active stage, of the next one, and standby layers.

One thread loads layers while another one computes with the active stage. So a dict of modules is never changed, only
replaced. Adapters are added to all of them: not while layers are loading (``loading``), which get them as they load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch.nn import Module

from swarm.errors import IllegalMove, ModelError
from swarm.stage.engine.memory_plan import MemoryPlan
from swarm.stage.executor import Progress, StopCheck
from swarm.stage.model.adapter_folder import AdapterFolder
from swarm.stage.model.build import Stage, add_adapter, drop_adapters
from swarm.stage.model.loading import Modules, StageLoader
from swarm.stage.native.memory import release_free_memory
from swarm.wire.messages import LayerRange, Manifest, layers_of, to_ranges


@dataclass(frozen=True, slots=True)
class ActiveStage:
    """A stage that is ready to compute."""

    stage: Stage
    standby: frozenset[int]  # layers for which memory is reserved
    kv_positions: int  # that fit; adapters that are loaded later take nothing of them
    parts: dict[LayerRange, Stage] = field(default_factory=dict)  # stages of some of its layers, for replays


class LoadedLayers:
    """Loads layers, and holds them."""

    def __init__(self, loader: StageLoader, memory: MemoryPlan) -> None:
        self._loader = loader
        self._memory = memory
        self.active: ActiveStage | None = None
        self._prepared: ActiveStage | None = None  # not active yet
        self._standby: dict[int, Modules] = {}  # by layer
        self.loading = threading.Lock()  # held from the first look at what is loaded until the new layers are listed

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

    def set_prepared(self, stage: Stage, standby: frozenset[int]) -> int:
        """Make this the next stage, and return the positions that fit into it."""
        self._prepared = ActiveStage(stage, standby, self._memory.kv_positions(stage.layers, standby))
        return self._prepared.kv_positions

    def activate(self, layers: LayerRange, kept: frozenset[int]) -> None:
        """Make the next stage the active one, and keep these standby layers; or check that it is active already."""
        if self._prepared is not None and self._prepared.stage.layers == layers:
            prepared, loaded = self._prepared, self.modules | self._prepared.stage.modules
            self._standby = {layer: self._loader.modules_of(layer, loaded) for layer in kept}
            self.active = prepared  # before it stops being the next one, so that ``_all_modules`` misses none
            self._prepared = None
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
            with self.loading:
                stage, _ = self._loader.load(LayerRange(layer, layer + 1), {}, progress)
                warm_up(stage)
                self._standby = self._standby | {layer: stage.modules}
        return to_ranges(self._standby)

    def add_adapters(self, adapters: Sequence[AdapterFolder], manifest: Manifest) -> None:
        """Add adapters to all layers, now and as they are loaded. ``manifest`` counts them. Raises ``ModelError``; then
        none of them is there."""
        with self.loading:
            former, self._memory.manifest = self._memory.manifest, manifest
            try:
                for each in (self.active, self._prepared):
                    if each is not None:
                        self._memory.check_kept(each.stage.layers, each.standby, each.kv_positions)
                for name, module in self._all_modules():
                    for adapter in adapters:
                        add_adapter(module, name, adapter)
            except BaseException:
                self.drop_adapters([adapter.key for adapter in adapters], former)
                raise
            keys = {adapter.key for adapter in adapters}
            self._loader.adapters = (*(each for each in self._loader.adapters if each.key not in keys), *adapters)

    def drop_adapters(self, keys: Collection[str], manifest: Manifest) -> None:
        """Drop adapters from all layers. ``manifest`` does not count them any more."""
        self._loader.adapters = tuple(each for each in self._loader.adapters if each.key not in keys)
        for _, module in self._all_modules():
            drop_adapters(module, keys)
        self._memory.manifest = manifest

    def _all_modules(self) -> list[tuple[str, Module]]:
        """Return what is loaded, in an order in which nothing is missed that ``activate`` moves meanwhile."""
        stages = [each.stage.modules for each in (self._prepared, self.active) if each is not None]
        return [item for modules in (*stages, *self._standby.values()) for item in modules.items()]

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
