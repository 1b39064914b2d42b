"""Return of memory that is free in this process to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not


def give_back() -> None:
    """Return free memory to the system. glibc would keep what it got for temporary copies while packing."""
    trim = _trim()
    if trim is not None:
        trim(0)
