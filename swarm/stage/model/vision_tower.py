"""Vision tower of a multimodal model: patches of an image in, embeddings of its tokens out.

Served for Qwen3-VL. The stage with layer 0 has the tower, as a part of its embedding. It computes one image at a time,
from bytes that identify the image, and in an arena of its own. So an image's embeddings depend on nothing else, and any
worker with the same bits computes them again after a loss.

Besides an embedding, each token of an image gets *features* that are added to the outputs of the model's first layers.
Only the stage with the tower has them, so a stage must not begin between these layers (``Vision.num_layers``).

Attention here is not causal, while our kernel's is. Keys and values are written in a first call, whose queries see
themselves only. In the second call all queries of a head are query heads of the last position, which sees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from swarm.stage.executor import FenceRaised
from swarm.stage.model.portable_math import portable_math
from swarm.stage.native.linears import NativeLinear
from swarm.wire.messages import LayerRange, Row, Vision

NAME = "visual"  # of the tower among a stage's modules, and in names of tensors


def build_tower(config: Any) -> Any:
    """Return the vision tower of this configuration, on the current device, without weights that are computed."""
    tower = AutoModel.from_config(config.vision_config, dtype=torch.float32, attn_implementation="eager")
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


class VisionTower:
    """Loaded vision tower. ``visual`` is transformers' module, with kernels of ours in place of its products."""

    def __init__(self, visual: Any, vision: Vision) -> None:
        self._visual, self._vision, self._config = visual, vision, visual.config
        self._heads = self._config.num_heads
        self._size = self._config.hidden_size // self._heads
        self._dtype = visual.patch_embed.proj.weight.dtype
        self._device = visual.patch_embed.proj.weight.device

    def encode(
        self,
        image: ImageSpan,
        pixels: bytes,
        is_fenced: Callable[[], bool] = lambda: False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> ImageFeatures:
        """Compute the features of an image. ``pixels``: its patches, one byte per number, as ``Submit`` has them.

        Calls ``is_fenced`` before each of the tower's layers, and ``on_progress`` after it.
        """
        merge = self._vision.merge
        grid = torch.tensor([[1, image.rows * merge, image.columns * merge]])
        hidden = self._embed(self._unpack(image, pixels), grid)
        tables = self._rotary_tables(grid)
        added: list[torch.Tensor] = []
        places = list(self._config.deepstack_visual_indexes)
        for number, block in enumerate(self._visual.blocks):
            if is_fenced():
                raise FenceRaised
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), tables)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if number in places:
                added.append(self._visual.deepstack_merger_list[places.index(number)](hidden))
            on_progress()
        return ImageFeatures(self._visual.merger(hidden), tuple(added))

    def _unpack(self, image: ImageSpan, pixels: bytes) -> torch.Tensor:
        """Return the patches as the model takes them: scaled, and repeated as if they were frames of a film."""
        vision, frames = self._vision, int(self._config.temporal_patch_size)
        numbers = np.frombuffer(pixels, np.uint8)
        if len(numbers) != image.num_tokens * vision.token_bytes:
            raise IllegalMove(f"{len(numbers)} bytes came for an image of {image.rows} × {image.columns} tokens")
        area = vision.patch * vision.patch
        patches = numbers.reshape(-1, 3, area).astype(np.float32) * np.float32(1 / 255)
        mean, std = (np.array(values, np.float32)[:, None] for values in (vision.mean, vision.std))
        patches = np.repeat(((patches - mean) / std)[:, :, None], frames, axis=2)
        return torch.from_numpy(patches.reshape(len(patches), -1)).to(self._device, self._dtype)

    def _embed(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        visual = self._visual
        places, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self._vision.merge,
        )
        weights = weights.to(self._device)[:, :, None]
        parts = [visual.pos_embed(places[:, tap].to(self._device)) * weights[:, tap] for tap in range(places.shape[1])]
        place = parts[0]
        for part in parts[1:]:  # one by one: torch's sums are not the same on every processor
            place = place + part
        hidden: torch.Tensor = visual.patch_embed.proj(patches) + place.to(self._dtype)
        return hidden

    def _rotary_tables(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the patches' rows and columns, ``[patches, head size]`` in float32."""
        positions, half = get_vision_position_ids(grid, self._vision.merge), self._size // 2
        with portable_math():
            base = self._config.rope_parameters["rope_theta"]
            frequencies = 1.0 / (base ** (torch.arange(0, half, 2, dtype=torch.float) / half))
            angles = (positions[:, :, None].float() * frequencies).flatten(1)
            angles = torch.cat((angles, angles), dim=1)
            return angles.cos().to(self._device), angles.sin().to(self._device)

    def _attend(self, part: Any, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        joint = part.qkv(rows)
        if not isinstance(part.qkv, NativeLinear):
            return part.proj(self._attend_by_torch(joint, tables, part.scaling))  # type: ignore[no-any-return]
        library = native.library()
        assert library is not None, "a product by our own kernel has been loaded"
        cosines, sines = (table.contiguous() for table in tables)
        kind, width = native.KINDS[joint.dtype], joint.shape[1]
        turned = 2 * self._heads, self._size, self._size
        table = cosines.data_ptr(), sines.data_ptr(), self._size, native.KINDS[cosines.dtype]
        library.swarm_turn(kind, joint.data_ptr(), width, len(joint), *turned, *table)
        query, key, value = joint.view(len(joint), 3, self._heads, self._size).unbind(1)
        return part.proj(self._attend_to_all(query, key, value, part.scaling))  # type: ignore[no-any-return]

    def _attend_to_all(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Return each query's mixture of all values, by our own kernel."""
        num, arena = len(query), KvArena(self._device)
        arena.open(0, num)
        layers = LayerRange(0, 1)
        options = AttentionOptions(scale, 1, None, None)
        write = ForwardPass(arena, layers, tuple(layout_spans([Row(0, 0, num, False)])))

        def find_buffer(rack: Rack) -> LayerBuffer:
            return arena.ensure_buffer(rack, 0, key[:1].transpose(0, 1), value[:1].transpose(0, 1))

        native_attention.attend_native(write, 0, (query, key, value), options, find_buffer)
        read = ForwardPass(arena, layers, tuple(layout_spans([Row(0, num - 1, 1, False)])))
        queries = query.transpose(0, 1).reshape(1, -1, self._size)
        parts = queries, key[-1:].contiguous(), value[-1:].contiguous()
        everything = AttentionOptions(scale, None, None, None)
        mixed = native_attention.attend_native(read, 0, parts, everything, find_buffer)
        return mixed.view(self._heads, num, self._size).transpose(0, 1).reshape(num, -1)

    def _attend_by_torch(
        self, joint: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> torch.Tensor:
        parts = joint.view(len(joint), 3, self._heads, self._size).unbind(1)
        query, key = (_rotate(part, *tables) for part in parts[:2])
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, parts[2]))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return mixed[0].transpose(0, 1).reshape(len(joint), -1)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cosines[:, None] + turned * sines[:, None]).to(heads.dtype)
