"""Vision tower of a multimodal model: patches of an image in, embeddings of its tokens out.

Served for Qwen3-VL. The stage with layer 0 has the tower, as a part of its embedding. It computes one image at a time,
from bytes that identify the image, and in an arena of its own. So an image's embeddings depend on nothing else, and any
worker with the same bits computes them again after a loss.

Besides an embedding, each token of an image gets *features* that are added to the outputs of the model's first layers.
Only the stage with the tower has them, so a stage must not begin between these layers (``Vision.num_layers``).

The work on an image is cut into parts: tiles of its patches, one layer at a time (``Vision``). Tiles depend on the
image's size alone, so its bits do not depend on when a part is computed, or beside what. A part of a layer computes a
tile's output, and its queries, keys and values of the next layer; two layers' keys and values are held, one to read and
one to write.

Attention here is not causal, while our kernel's is. Keys and values are written in a first call, whose queries see
themselves only. In the second call all queries of a tile's head are query heads of the last position, which sees
everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from swarm.errors import IllegalMove
from swarm.params import ImageSpan
from swarm.stage import native
from swarm.stage.attention import native_attention
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.attention.passes import ForwardPass
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.model.portable_math import portable_math
from swarm.stage.native.linears import NativeLinear
from swarm.wire.messages import PART_PATCHES, LayerRange, Row, Vision

_WARM_UP_PARTS = 3  # an embedding and two layers
NAME = "visual"  # of the tower among a stage's modules, and in names of tensors


def build_tower(config: Any) -> Any:
    """Return the vision tower of this configuration, on the current device, without weights that are computed."""
    tower = AutoModel.from_config(
        config.vision_config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    tower.rotary_pos_emb = nn.Identity()
    return tower.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Results of the tower for one image, ``[tokens, hidden]`` each: its embeddings, and by layer what is added to the
    layer's output."""

    embeddings: torch.Tensor
    added: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.embeddings, *self.added))


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tokens of a batch that belong to images, and their features, in the tokens' order."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    added: tuple[torch.Tensor, ...]

    @classmethod
    def join(cls, rows: Sequence[torch.Tensor], features: Sequence[tuple[ImageFeatures, slice]]) -> ImageRows:
        """Join runs of tokens. Of each run's image, a part of the features is its own."""
        embeddings = torch.cat([each.embeddings[part] for each, part in features])
        layers = zip(*([added[part] for added in each.added] for each, part in features), strict=True)
        return cls(torch.cat(tuple(rows)).to(embeddings.device), embeddings, tuple(map(torch.cat, layers)))

    def embed(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the batch's embeddings ``[1, tokens, hidden]`` with those of images in their places."""
        return embedded.index_copy(1, self.rows, self.embeddings.to(embedded.dtype).unsqueeze(0))

    def add_to(self, hidden: torch.Tensor, layer: int) -> None:
        """Add the features for this layer's output ``[1, tokens, hidden]`` in place."""
        if layer < len(self.added):
            hidden[0, self.rows] = hidden[0, self.rows] + self.added[layer].to(hidden.dtype)


@dataclass(slots=True)
class _Projected:
    """Queries, keys and values of a layer. By our own kernels, ``arena`` has the keys and values, and ``last`` those of
    the last patch; by torch, ``keys`` and ``values`` do. ``[patches, heads, size]`` each."""

    queries: torch.Tensor
    arena: KvArena | None = None
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class ImageWork:
    """The tower's work on one image, part by part. A part that raises an error leaves it unusable."""

    def __init__(self, tower: VisionTower, image: ImageSpan, pixels: bytes) -> None:
        vision = tower.vision
        if len(pixels) != image.num_tokens * vision.token_bytes:
            raise IllegalMove(f"{len(pixels)} bytes came for an image of {image.rows} × {image.columns} tokens")
        self.digest = image.digest
        self.num_parts = vision.num_parts(image.num_tokens)
        self.num_done = 0
        self._tower, self._pixels = tower, pixels
        self._tile, self._num_tiles = vision.part_patches(image.num_tokens), vision.num_tiles(image.num_tokens)
        self._num_patches = image.num_tokens * vision.merge**2
        grid = torch.tensor([[1, image.rows * vision.merge, image.columns * vision.merge]])
        self._places = tower.interpolate_places(grid)
        self._tables = tower.rotary_tables(grid)
        self._hidden: list[torch.Tensor] = []  # by tile
        self._projected = [tower.new_projected(self._num_patches) for _ in range(2)]  # of even and odd layers
        self._features = tower.new_features(image.num_tokens)

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_parts

    def compute_part(self) -> None:
        """Compute the next part."""
        layer, tile = divmod(self.num_done, self._num_tiles)
        rows = slice(tile * self._tile, min((tile + 1) * self._tile, self._num_patches))
        tokens = slice(rows.start // self._tower.vision.merge**2, rows.stop // self._tower.vision.merge**2)
        if layer == 0:
            self._hidden.append(self._tower.embed(self._pixels, self._places, rows))
        else:
            self._compute_layer(layer - 1, tile, rows, tokens)
        if layer < self._tower.depth:
            self._tower.project(self._projected[layer % 2], layer, self._hidden[tile], rows, self._tables)
        else:
            self._features.embeddings[tokens] = self._tower.merge(self._hidden[tile])
        self.num_done += 1

    def _compute_layer(self, layer: int, tile: int, rows: slice, tokens: slice) -> None:
        self._hidden[tile] = self._tower.compute_layer(self._projected[layer % 2], layer, self._hidden[tile], rows)
        if layer in self._tower.feature_layers:
            number = self._tower.feature_layers.index(layer)
            self._features.added[number][tokens] = self._tower.merge_features(number, self._hidden[tile])

    def warm_up(self) -> None:
        """Compute the first parts, and the products that only some layers have."""
        for _ in range(min(_WARM_UP_PARTS, self.num_parts)):
            self.compute_part()
        hidden = self._hidden[0]
        self._tower.merge(hidden)
        for number in range(len(self._features.added)):
            self._tower.merge_features(number, hidden)

    def features(self) -> ImageFeatures:
        """Return the results once all parts are computed."""
        return self._features


class VisionTower:
    """Loaded vision tower. ``visual`` is transformers' module, with kernels of ours in place of its products."""

    def __init__(self, visual: Any, vision: Vision) -> None:
        self.vision = vision
        self._visual, self._config = visual, visual.config
        self.depth = len(visual.blocks)
        self.feature_layers: list[int] = list(self._config.deepstack_visual_indexes)
        self._heads = self._config.num_heads
        self._size = self._config.hidden_size // self._heads
        self._dtype = visual.patch_embed.proj.weight.dtype
        self._device = visual.patch_embed.proj.weight.device
        self._is_native = isinstance(visual.blocks[0].attn.qkv, NativeLinear)

    def encode(self, image: ImageSpan, pixels: bytes) -> ImageFeatures:
        """Compute the features of an image at once. ``pixels``: its patches, one byte per number, as ``Submit`` has
        them."""
        work = ImageWork(self, image, pixels)
        while not work.is_done:
            work.compute_part()
        return work.features()

    def warm_up(self) -> None:
        """Compute the first layers for an image of one tile, and merge its patches."""
        side = math.isqrt(PART_PATCHES) // self.vision.merge
        work = ImageWork(self, ImageSpan(0, side, side, ""), bytes(side * side * self.vision.token_bytes))
        with torch.inference_mode():
            work.warm_up()

    # --- parts of an image's work ------------------------------------------------------------------------------------

    def embed(self, pixels: bytes, places: tuple[torch.Tensor, torch.Tensor], rows: slice) -> torch.Tensor:
        """Return the embeddings of these patches. ``places``: see ``interpolate_places``."""
        visual, (numbers, weights) = self._visual, places
        numbers, weights = numbers[rows].to(self._device), weights[rows].to(self._device)[:, :, None]
        parts = [visual.pos_embed(numbers[:, tap]) * weights[:, tap] for tap in range(numbers.shape[1])]
        place = parts[0]
        for part in parts[1:]:  # one by one: torch's sums are not the same on every processor
            place = place + part
        hidden: torch.Tensor = visual.patch_embed.proj(self._unpack(pixels, rows)) + place.to(self._dtype)
        return hidden

    def interpolate_places(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which learned places each patch is between, and their weights."""
        visual = self._visual
        places, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.vision.merge,
        )
        return places, weights

    def new_features(self, num_tokens: int) -> ImageFeatures:
        """Return memory for an image's features, so that no two copies of them are there at the end."""
        parts = [
            torch.empty(num_tokens, self._config.out_hidden_size, dtype=self._dtype, device=self._device)
            for _ in range(1 + len(self.feature_layers))
        ]
        return ImageFeatures(parts[0], tuple(parts[1:]))

    def new_projected(self, num_patches: int) -> _Projected:
        queries = torch.empty(num_patches, self._heads, self._size, dtype=self._dtype, device=self._device)
        if not self._is_native:
            return _Projected(queries, keys=torch.empty_like(queries), values=torch.empty_like(queries))
        arena = KvArena(self._device)
        arena.open(0, num_patches)
        return _Projected(queries, arena)

    def project(
        self,
        into: _Projected,
        layer: int,
        hidden: torch.Tensor,
        rows: slice,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compute a layer's queries, keys and values of these patches. ``tables``: see ``rotary_tables``."""
        block = self._visual.blocks[layer]
        joint, tables = block.attn.qkv(block.norm1(hidden)), (tables[0][rows], tables[1][rows])
        if into.arena is None:
            query, key, value = joint.view(len(joint), 3, self._heads, self._size).unbind(1)
            assert into.keys is not None, "torch has all keys and values in tensors"
            assert into.values is not None, "torch has all keys and values in tensors"
            into.queries[rows], into.keys[rows] = (_rotate(part, *tables) for part in (query, key))
            into.values[rows] = value
            return
        library = native.library()
        assert library is not None, "a product by our own kernel has been loaded"
        cosines, sines = (table.contiguous() for table in tables)
        kind, width = native.KINDS[joint.dtype], joint.shape[1]
        turned = 2 * self._heads, self._size, self._size
        table = cosines.data_ptr(), sines.data_ptr(), self._size, native.KINDS[cosines.dtype]
        library.swarm_turn(kind, joint.data_ptr(), width, len(joint), *turned, *table)
        query, key, value = joint.view(len(joint), 3, self._heads, self._size).unbind(1)
        into.queries[rows] = query
        into.last = key[-1:].clone(), value[-1:].clone()  # a view would hold the tile
        only_itself = AttentionOptions(block.attn.scaling, 1, None, None)
        self._attend(into.arena, (query, key, value), Row(0, rows.start, len(query), False), only_itself)

    def compute_layer(self, projected: _Projected, layer: int, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a layer's output of these patches. ``projected``: the layer's queries, keys and values of all patches;
        ``hidden``: its input."""
        block = self._visual.blocks[layer]
        hidden = hidden + block.attn.proj(self._mix(projected, rows, block.attn.scaling))
        return hidden + block.mlp(block.norm2(hidden))  # type: ignore[no-any-return]

    def merge(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens from the last layer's output of their patches."""
        return self._visual.merger(hidden)  # type: ignore[no-any-return]

    def merge_features(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features of tokens from the output of the layer ``feature_layers[number]``."""
        return self._visual.deepstack_merger_list[number](hidden)  # type: ignore[no-any-return]

    def _unpack(self, pixels: bytes, rows: slice) -> torch.Tensor:
        """Return patches as the model takes them: scaled, and repeated as if they were frames of a film."""
        vision, frames = self.vision, int(self._config.temporal_patch_size)
        area = vision.patch * vision.patch
        numbers = np.frombuffer(pixels, np.uint8).reshape(-1, 3, area)[rows]
        patches = numbers.astype(np.float32) * np.float32(1 / 255)
        mean, std = (np.array(values, np.float32)[:, None] for values in (vision.mean, vision.std))
        patches = np.repeat(((patches - mean) / std)[:, :, None], frames, axis=2)
        return torch.from_numpy(patches.reshape(len(patches), -1)).to(self._device, self._dtype)

    def rotary_tables(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the patches' rows and columns, ``[patches, head size]`` in float32."""
        positions, half = get_vision_position_ids(grid, self.vision.merge), self._size // 2
        with portable_math():
            base = self._config.rope_parameters["rope_theta"]
            frequencies = 1.0 / (base ** (torch.arange(0, half, 2, dtype=torch.float) / half))
            angles = (positions[:, :, None].float() * frequencies).flatten(1)
            angles = torch.cat((angles, angles), dim=1)
            return angles.cos().to(self._device), angles.sin().to(self._device)

    def _mix(self, projected: _Projected, rows: slice, scale: float) -> torch.Tensor:
        """Return the mixtures of all values for these patches' queries."""
        queries = projected.queries[rows]
        if projected.arena is None:
            parts = queries, projected.keys, projected.values
            query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts if part is not None)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
            return mixed[0].transpose(0, 1).reshape(len(queries), -1)
        assert projected.last is not None, "all tiles are projected before the first one is mixed"
        heads = queries.transpose(0, 1).reshape(1, -1, self._size)
        everything = AttentionOptions(scale, None, None, None)
        row = Row(0, len(projected.queries) - 1, 1, False)
        mixed = self._attend(projected.arena, (heads, *projected.last), row, everything)
        return mixed.view(self._heads, len(queries), self._size).transpose(0, 1).reshape(len(queries), -1)

    @staticmethod
    def _attend(
        arena: KvArena,
        parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        row: Row,
        options: AttentionOptions,
    ) -> torch.Tensor:
        _, key, value = parts
        forward_pass = ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans([row])))

        def find_buffer(rack: Rack) -> LayerBuffer:
            return arena.ensure_buffer(rack, 0, key[:1].transpose(0, 1), value[:1].transpose(0, 1))

        return native_attention.attend_native(forward_pass, 0, parts, options, find_buffer)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cosines[:, None] + turned * sines[:, None]).to(heads.dtype)
