"""Kernels of our own for processors that multiply bfloat16 (AVX-512 BF16): products, norms, attention.

They are C, built by ``pip install`` where there is a compiler; without one, or on another processor, torch's kernels do
the work and :func:`absence` says why. What they compute has the same bits for a row whatever is computed beside it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

VERSION = 3
_STEM = "_native"
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_HUGE = 2 << 20

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """``SwarmMatrix`` of products.h."""

    _fields_ = [
        ("packed", _pointer),
        ("bias", _pointer),
        ("outputs", _count),
        ("inputs", _count),
        ("function", _count),
    ]


_refusals: list[str] = []  # at most one: why this process shall do without


def library() -> ctypes.CDLL | None:
    """The built kernels, if they are there, wanted, and this processor can run them."""
    return None if _refusals else _open()[0]


def absence() -> str:
    """Why there is no library; empty if there is one."""
    return _refusals[0] if _refusals else _open()[1]


@contextmanager
def without(reason: str) -> Iterator[None]:
    """torch's kernels for a while, in the whole process."""
    before = _refusals[:]
    do_without(reason)
    try:
        yield
    finally:
        _refusals[:] = before


def checked(status: int) -> None:
    """What a kernel returned; raises MemoryError if it had no room to work in."""
    if status:
        raise MemoryError("a kernel got no memory for its sums; give the worker more, or shorter steps")


def do_without(reason: str) -> None:
    """From now on this process uses torch's kernels. Call it before anything is loaded."""
    _refusals[:] = [reason]


@cache
def built() -> tuple[ctypes.CDLL | None, str]:
    """What was built of our C, whether or not this processor can run the kernels in it; or why there is nothing."""
    found = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name(_STEM + suffix)).exists()]
    if not found:
        return None, "they were not built: install Swarm where there is a C compiler that knows AVX-512 BF16"
    if any(source.stat().st_mtime > found[0].stat().st_mtime for source in Path(__file__).parent.glob("*.[ch]")):
        return None, f"{found[0].name} is older than its sources; install Swarm again"
    try:
        opened = ctypes.CDLL(str(found[0]))
        version = opened.swarm_native_version()
    except (OSError, AttributeError) as error:
        return None, f"{found[0].name} can't be used ({error}); install Swarm again"
    if version != VERSION:
        return None, f"{found[0].name} is from another version; install Swarm again"
    return opened, ""


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    opened, why_not = built()
    if opened is None:
        return None, why_not
    if not opened.swarm_native_supported():
        return None, "this processor doesn't multiply bfloat16"
    _declare(opened)
    return opened, ""


def pieces(count: int, group: int, heads: int) -> int:
    """Into how many pieces of work attention cuts a row of ``count`` tokens."""
    return -(-count * group // 16) * heads


def _declare(opened: ctypes.CDLL) -> None:
    opened.swarm_attend.argtypes = [_pointer, _count, _pointer, _pointer, _pointer, ctypes.c_int]
    opened.swarm_attend.restype = ctypes.c_int
    opened.swarm_linear.argtypes = [
        ctypes.POINTER(Matrix),
        _pointer,
        _count,
        _count,
        _pointer,
        _count,
        ctypes.c_int,
    ]
    opened.swarm_linear.restype = ctypes.c_int
    opened.swarm_rms_norm.argtypes = [_pointer, _pointer, ctypes.c_float, _count, _count, _pointer]
    opened.swarm_rms_norm.restype = None
    opened.swarm_turn.argtypes = [_pointer, _count, _count, _count, _count, _pointer, _pointer]
    opened.swarm_turn.restype = None


def huge(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for weights, in large pages where the system has them: they are read from end to end at every step."""
    spare = _HUGE // dtype.itemsize
    whole = torch.empty(num_elements + spare, dtype=dtype)
    start = -whole.data_ptr() % _HUGE // dtype.itemsize
    if num_elements * dtype.itemsize >= _HUGE:
        _advise(whole.data_ptr() + start * dtype.itemsize, num_elements * dtype.itemsize)
    return whole[start : start + num_elements]


def _advise(address: int, num_bytes: int) -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:  # a hint: what comes of it doesn't matter
        advise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes // _HUGE * _HUGE), _MADV_HUGEPAGE)
