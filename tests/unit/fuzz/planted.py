"""A parser with a fault, which chance alone would not find in seconds: it shows that coverage guides."""

from __future__ import annotations


def planted(data: bytes) -> int:
    """Read a length, and what it announces; behind three bytes that must be right, one after the other."""
    if len(data) < 6 or data[0] != 0x5A:
        return 0
    if data[1] != 0x17:
        return 1
    if data[2] != 0xC3:
        return 2
    return data[6 + data[3]]  # which may not be there
