"""Loading of stages from a checkpoint: loaded layers are shared, missing ones are fetched and read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from swarm.errors import IllegalMove
from swarm.log import get_logger
from swarm.stage.executor import Progress
from swarm.stage.model.adapter_folder import AdapterFolder
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.conversion import ModelSource
from swarm.stage.native.memory import release_free_memory
from swarm.wire.messages import LayerRange, Manifest

log = get_logger(__name__)

Modules = dict[str, torch.nn.Module]


class StageLoader:
    """Builder of stages. ``loaded_bytes`` and ``fetched_bytes`` are the totals read from disk and downloaded from a
    hub."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        skeleton: ModelSkeleton,
        source: ModelSource,
        adapters: Sequence[AdapterFolder] = (),
    ) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._skeleton = skeleton
        self._source = source
        self.adapters = tuple(adapters)  # those that modules get as they are loaded; replaced as a whole
        self._shared: Modules = {}  # modules without weights, of the last stage; replaced as a whole
        self.loaded_bytes = 0
        self.fetched_bytes = 0

    def load(self, layers: LayerRange, held: Modules, progress: Progress) -> tuple[Stage, frozenset[int]]:
        """Return the stage, and which of its layers had to be read."""
        fetched = self._fetch((layers,), held, progress)
        total, done = fetched + self._manifest.weight_bytes(layers), fetched

        def on_loaded(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self.loaded_bytes += num_bytes
            progress(min(done, total), total)

        stage = self._build(layers, held, on_loaded)
        progress(total, total)
        new = frozenset(
            layer
            for layer in range(layers.first, layers.stop)
            if not module_names(self._skeleton, layer) <= held.keys()
        )
        if new:
            release_free_memory()
        return stage, new

    def _fetch(self, ranges: tuple[LayerRange, ...], held: Collection[str], progress: Progress) -> int:
        """Download the files with these layers' tensors from the hub, if missing; return their size in bytes.

        Progress counts downloading and reading as one load.
        """
        names = needed_tensors(self._skeleton, self._source, ranges, held)
        to_fetch = sum(self._checkpoint.missing(names).values())
        to_read = sum(map(self._manifest.weight_bytes, ranges))
        self._checkpoint.fetch(names, lambda num_came, _: progress(num_came, to_fetch + to_read), log_fetching)
        self.fetched_bytes += to_fetch
        return to_fetch

    def build_resident(self, layers: LayerRange, loaded: Modules) -> Stage:
        """Return a stage of layers that are all loaded, active or standby."""
        for layer in range(layers.first, layers.stop):
            if not module_names(self._skeleton, layer) <= loaded.keys():
                raise IllegalMove(f"layer {layer} is not loaded here")
        return self._build(layers, loaded)

    def build_slice(self, stage: Stage, layers: LayerRange) -> Stage:
        """Return a stage of some of another stage's layers, with the same modules."""
        if layers == stage.layers:
            return stage
        return self._build(layers, stage.modules)

    def _build(self, layers: LayerRange, held: Modules, on_loaded: Callable[[int], None] = lambda _: None) -> Stage:
        weights = WeightLoader(self._skeleton, self._source, on_loaded, self.adapters)
        stage = Stage(self._skeleton, layers, self._shared | held, weights)
        self._shared = stage.shared
        return stage

    def modules_of(self, layer: int, loaded: Modules) -> Modules:
        """Return the modules of one loaded layer."""
        names = module_names(self._skeleton, layer)
        if not names <= loaded.keys():
            raise IllegalMove(f"layer {layer} is to be kept, but it was not loaded")
        return {name: loaded[name] for name in names}


def log_fetching(line: str) -> None:
    """Log a line about a download from a hub."""
    log.info("fetching_weights", what=line)


def needed_tensors(
    skeleton: ModelSkeleton, source: ModelSource, ranges: Collection[LayerRange], held: Collection[str]
) -> set[str]:
    """Return the stored names of all tensors that stages of these ranges read; ``held`` are modules that are loaded
    already."""
    modules = {
        name
        for layers in ranges
        for layer in range(layers.first, layers.stop)
        for name in module_names(skeleton, layer)
    }
    modules.update(skeleton.parts.shared)
    tensor_names: set[str] = set()
    for module in modules - set(held):
        for leaf in skeleton.model.get_submodule(module).state_dict():
            tensor_names.update(_stored_names(skeleton, source, f"{module}.{leaf}"))
    return tensor_names


def module_names(skeleton: ModelSkeleton, layer: int) -> frozenset[str]:
    """Return the modules that only the holder of this layer loads.

    These are the layer itself, for the first layer also the embedding, and for the last one also the head.
    """
    parts = skeleton.parts
    names = {f"{parts.layers}.{layer}"}
    names.update(parts.embed if layer == 0 else ())
    names.update(parts.tail if layer == skeleton.num_layers - 1 else ())
    return frozenset(names)


def _stored_names(skeleton: ModelSkeleton, source: ModelSource, name: str) -> list[str]:
    """Return a tensor's stored names. A tied one that is not stored has those of the tensor that it equals."""
    return source.stored_names(name) or source.stored_names(skeleton.tied_name(name))
