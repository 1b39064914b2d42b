"""The unit of KV accounting."""

from __future__ import annotations

BLOCK = 32  # positions


def num_blocks(positions: int) -> int:
    return -(-positions // BLOCK)
