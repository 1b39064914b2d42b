"""Tables of rotary positions: computed once by the model's own module, then looked up.

Its functions are computed portably (``portable_math``), so that different processors have the same tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swarm.stage.attention.passes import current_pass
from swarm.stage.model.portable_math import portable_math

_FIRST_SIZE = 1024  # positions of a first table; its size doubles as sequences grow


class RopeTable(nn.Module):
    """Replacement of a module that computes (cos, sin), or complex numbers, from positions alone.

    All stages of a worker share it, and one thread may warm up a stage while another computes: a table is replaced as a
    whole. If two threads extend it at once, the shorter one may stay, and is extended again.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # what models read from theirs
        self.config, self.layer_types = getattr(inner, "config", None), getattr(inner, "layer_types", None)
        self.mrope_section = getattr(inner, "mrope_section", None)
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor, *which: object, layer_type: object = None) -> Any:
        which = which if layer_type is None else (*which, layer_type)
        this, key = current_pass(), (like.dtype, *which)
        table = self._tables.get(key)
        if table is None or this.length > table[0].shape[0]:
            table = self._tables[key] = self._extend(table, like, this.length, which)
            this.cache_stats.rope_misses += 1
        else:
            this.cache_stats.rope_hits += 1
        if position_ids.ndim == 3 and this.positions.ndim == 3:  # sequences with images
            return tuple(self._of_images(part, position_ids) for part in table)
        positions = position_ids.flatten(0, -2)[0]  # those of images, if the model has such, equal those of text
        parts = tuple(part.index_select(0, positions).unsqueeze(0) for part in table)
        return parts[0] if len(parts) == 1 else parts

    def _of_images(self, part: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up three positions of each token, and let the model's module choose among their numbers."""
        half = part[:, : part.shape[1] // 2]
        chosen: torch.Tensor = self.inner.recomposition_frequencies(half[positions])  # type: ignore[operator]
        return chosen

    def _extend(
        self, table: tuple[torch.Tensor, ...] | None, like: torch.Tensor, length: int, which: tuple[object, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Extend the table to at least ``length`` positions."""
        size, begin = _FIRST_SIZE, 0 if table is None else table[0].shape[0]
        while size < length:
            size *= 2
        positions = torch.arange(begin, size, device=like.device).unsqueeze(0)
        with portable_math():
            result = self.inner(like, positions, *which)
        more = tuple(part[0] for part in ((result,) if isinstance(result, torch.Tensor) else result))
        if table is None:
            return tuple(part.clone() for part in more)
        return tuple(torch.cat(parts) for parts in zip(table, more, strict=True))


def is_rotary(module: nn.Module) -> bool:
    """Whether this resembles one of transformers' rotary modules, which take (anything, positions[, layer type])."""
    return type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "rope_type")
