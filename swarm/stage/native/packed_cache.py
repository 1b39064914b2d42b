"""Cache of packed matrices."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from swarm.stage import native

# Matrices in use in this process. A table that is both embedding and head exists once.
_in_use: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()


def load_or_pack(key: str, num_bytes: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the packed matrix with this key: from the cache, or filled by ``pack``.

    A matrix with an empty key is not cached.
    """
    packed = _in_use.get(key)
    if packed is None:
        packed = native.allocate_weights(num_bytes, torch.uint8)
        pack(packed)
        if key:
            _in_use[key] = packed
    return packed
