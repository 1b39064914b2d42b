"""Memory that is free in this process but not yet for others."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries don't


def give_back() -> None:
    """glibc keeps what it got for the copies that packing leaves behind; hand it to the system."""
    trim = _trim()
    if trim is not None:
        trim(0)
