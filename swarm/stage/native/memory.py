"""Return of memory that is free in this process to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not


def release_free_memory() -> None:
    """Return free memory to the system. glibc would keep what it got for temporary copies while packing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
