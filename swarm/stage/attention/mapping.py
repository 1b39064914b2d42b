"""Mapping of pages at given addresses, which Python's ``mmap`` can't do."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python got the name later
_MAP_FIXED = 0x10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def map_pages(address: int, num_bytes: int, file: int = -1, offset: int = 0) -> None:
    """Map private pages of a file, or new pages that read as zeros, over those at an address. Raises ``OSError``.

    Of what was mapped there, nothing stays. The caller owns these addresses: they belong to a mapping of its own.
    """
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if file < 0 else 0)
    if _mmap()(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def free_pages(file: int, offset: int, num_bytes: int) -> None:
    """Free the pages of a range of a file in memory, which reads as zeros from then on. Raises ``OSError``."""
    if _fallocate()(file, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Any:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


@cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function
