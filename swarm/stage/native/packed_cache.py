"""Cache of packed matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swarm.stage import native


def load_or_pack(key: str, num_bytes: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the packed matrix with this key: from the cache, or filled by ``pack``."""
    packed = native.allocate_weights(num_bytes, torch.uint8)
    pack(packed)
    return packed
