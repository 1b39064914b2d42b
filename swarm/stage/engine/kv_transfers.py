"""Keys and values on their way to or from another machine: how an executor reads, checks and stores them.

Layers with states have them at the last position, in layer order behind all keys and values: in float32, in the bit
patterns of the stored dtype. A layer may have no keys and values.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.layouts import choose_layouts
from swarm.stage.attention.racks import KvShape
from swarm.stage.attention.sharing import chunk_positions, max_ranges
from swarm.stage.attention.transfer import count_numbers, from_patterns, to_patterns
from swarm.stage.executor import KvData, KvDtype
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.sizes import count_latents, find_head_sizes, find_key_heads, index_key_size
from swarm.wire.messages import LayerRange, Manifest, to_ranges


class KvTransfers:
    """Reads and writes positions of an executor's arena in the form of ``KvData``. Belongs to the compute thread, but
    for ``add_shapes`` and ``fits``."""

    def __init__(self, arena: KvArena, manifest: Manifest, skeleton: ModelSkeleton) -> None:
        self._arena = arena
        self._kv_bytes = tuple(map(manifest.kv_bytes, range(manifest.num_layers)))  # of a position, by layer
        self._state_bytes = manifest.state_bytes or (0,) * manifest.num_layers
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
        pieces = [self._arena.read_positions(sequence, part, start, stop) for part in self._attending(layers)]
        for layer in self._stateful(layers):
            pieces.append(self._arena.states.read(sequence, layer, stop).view(self._dtype))
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, dtype=self._dtype)])
        return KvData(layers, start, stop, self._dtype_name, to_patterns(flat))

    def fits(self, data: KvData) -> bool:
        """Return whether these can be keys and values, and states, of the model's layers."""
        layers = data.layers
        if not 0 <= layers.first < layers.stop <= len(self._kv_bytes) or not 0 <= data.start < data.stop:
            return False
        num_bytes = sum(self._kv_bytes[layers.first : layers.stop]) * (data.stop - data.start)
        num_bytes += sum(self._state_bytes[layers.first : layers.stop])
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
        span, begin = (data.start, data.stop), 0
        for part in self._attending(data.layers):
            shapes = [self._shape(layer) for layer in range(part.first, part.stop)]
            end = begin + count_numbers(shapes, data.stop - data.start)
            self._arena.write_positions(sequence, part, span, flat[begin:end], shapes=shapes, active=active)
            begin = end
        in_use = range(0) if active is None else range(active.first, active.stop)
        for layer in self._stateful(data.layers):
            end = begin + self._state_bytes[layer] // self._dtype.itemsize
            state = flat[begin:end].clone().view(torch.float32)  # a copy: the message is longer than one state
            self._arena.states.write(sequence, layer, data.stop, state, is_copy=layer not in in_use)
            begin = end

    def _attending(self, layers: LayerRange) -> tuple[LayerRange, ...]:
        """Return the layers that have keys and values."""
        return to_ranges(layer for layer in range(layers.first, layers.stop) if self._kv_bytes[layer])

    def _stateful(self, layers: LayerRange) -> list[int]:
        """Return the layers that have states."""
        return [layer for layer in range(layers.first, layers.stop) if self._state_bytes[layer]]

    def _shape(self, layer: int) -> KvShape:
        """Return the shape of a layer's keys and values; before it was loaded, as the configuration gives it."""
        return self._shapes.get(layer) or shape_in_config(self._config, layer)

    @property
    def copy_bytes(self) -> int:
        """Bytes that copies take, in whole blocks."""
        positions = sum(self._kv_bytes[layer] * positions for layer, positions in self._arena.copied.items())
        return positions + self._arena.states.copied_bytes


def shape_in_config(config: Any, layer: int = 0) -> KvShape:
    """Return the shape that the model's configuration gives a layer."""
    text = config.get_text_config().per_layer_config[layer]

    def setting(name: str) -> Any:
        return getattr(text, name, None)

    if getattr(text, "kv_lora_rank", None) is not None:
        latent = int(text.kv_lora_rank + text.qk_rope_head_dim) + index_key_size(setting, layer)
        return KvShape(count_latents(setting), latent, 0)
    heads = int(getattr(text, "num_attention_heads", 1))
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return KvShape(int(find_key_heads(setting, layer) or heads), *find_head_sizes(setting, size))
