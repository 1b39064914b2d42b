"""Keys and values on their way to or from another machine: how an executor reads, checks and stores them."""

from __future__ import annotations

from typing import Any, cast

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.layouts import choose_layouts
from swarm.stage.attention.racks import KvShape
from swarm.stage.attention.sharing import chunk_positions, max_ranges
from swarm.stage.attention.transfer import from_patterns, to_patterns
from swarm.stage.executor import KvData, KvDtype
from swarm.stage.model.build import ModelSkeleton
from swarm.wire.messages import LayerRange, Manifest


class KvTransfers:
    """Reads and writes positions of an executor's arena in the form of ``KvData``. Belongs to the compute thread, but
    for ``add_shapes`` and ``fits``."""

    def __init__(self, arena: KvArena, manifest: Manifest, skeleton: ModelSkeleton) -> None:
        self._arena = arena
        self._per_token = manifest.kv_bytes_per_token
        self._has_states = manifest.state_stride > 0  # sequences begin with states only where all layers have them
        self._dtype, self._device = skeleton.dtype, skeleton.device
        self._dtype_name = cast("KvDtype", manifest.dtype)
        self._config = skeleton.config
        self._shapes: dict[int, KvShape] = {}  # of all layers that were loaded so far

    def add_shapes(self, shapes: dict[int, KvShape]) -> None:
        """Record the shapes of layers that are loaded now."""
        self._shapes |= shapes

    def sharing(self, layers: LayerRange) -> tuple[int, int]:
        """Return the positions of a chunk that sequences can share in these layers, which are loaded, and the number of
        mappings that may take; zeros if they can't."""
        shapes = [self._shapes.get(layer) for layer in range(layers.first, layers.stop)]
        known = [shape for shape in shapes if shape is not None]
        if not self._arena.can_share or self._has_states or len(known) < len(shapes):
            return 0, 0
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        unit = chunk_positions(known, choose_layouts(like, known[0].value_size), like.itemsize)
        return unit, max_ranges() // (2 * sum(shape.heads for shape in known))

    def read(self, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        flat = self._arena.read_positions(sequence, layers, start, stop)
        return KvData(layers, start, stop, self._dtype_name, to_patterns(flat))

    def fits(self, data: KvData) -> bool:
        """Return whether these can be keys and values of the model's layers."""
        layers = data.layers
        if not 0 <= layers.first < layers.stop <= len(self._per_token) or not 0 <= data.start < data.stop:
            return False
        num_bytes = sum(self._per_token[layers.first : layers.stop]) * (data.stop - data.start)
        return data.dtype == self._dtype_name and data.numbers.nbytes == num_bytes

    def write(self, sequence: int, limit: int, data: KvData, active: LayerRange | None) -> None:
        """Store positions, as copies where a layer is not ``active``. Opens the sequence if it is not open."""
        if not self.fits(data):
            raise IllegalMove(
                f"{data.numbers.nbytes} bytes of {data.dtype} are no keys and values of {data.layers.label}"
            )
        if sequence not in self._arena:
            self._arena.open(sequence, limit)
        flat = from_patterns(data.numbers, self._dtype, self._device)
        shapes = [self._shape(layer) for layer in range(data.layers.first, data.layers.stop)]
        span = data.start, data.stop
        self._arena.write_positions(sequence, data.layers, span, flat, shapes=shapes, active=active)

    def _shape(self, layer: int) -> KvShape:
        """Return the shape of a layer's keys and values; before it was loaded, as the configuration gives it."""
        return self._shapes.get(layer) or shape_in_config(self._config, layer)

    @property
    def copy_bytes(self) -> int:
        """Bytes that copies take, in whole blocks."""
        return sum(self._per_token[layer] * positions for layer, positions in self._arena.copied.items())


def shape_in_config(config: Any, layer: int = 0) -> KvShape:
    """Return the shape that the model's configuration gives a layer."""
    text = config.get_text_config().per_layer_config[layer]
    if getattr(text, "kv_lora_rank", None) is not None:
        return KvShape(1, int(text.kv_lora_rank + text.qk_rope_head_dim), 0)
    heads = int(getattr(text, "num_attention_heads", 1))
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return KvShape(int(getattr(text, "num_key_value_heads", None) or heads), size, size)
