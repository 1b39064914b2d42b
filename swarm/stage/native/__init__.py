"""Our own kernels: products, norms, attention and sampling, for float32 and bfloat16.

Input: addresses of tensors, as ``kernels.h`` declares. Output: numbers, written to the given addresses. Rules: a row's
bits are the same whatever else is computed and with any number of threads; a variant is used only after it has passed
its proof on this processor. Without the library, torch's kernels do the work, and :func:`unavailable_reason` returns
why.

The kernels are written in C (``sources``), built by ``pip install`` where there is a compiler (``build``), in variants
for several kinds of processor. The fastest variant that runs here is used, unless another is chosen
(``variant_choice``). ``linears`` packs matrices, and ``cores`` decides how many threads compute. ``shared_cache``
shares one worker's findings about kernels and machine with workers that were forked from the same process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from swarm.stage.native.sources import digest

_STEM = "_native"  # first part of the library's file name
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_HUGE = 2 << 20  # bytes of a large page

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


FLOAT32, BFLOAT16 = 0, 1  # number formats, as in kernels.h
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class NativeFormat(ctypes.Structure):
    """Format of quantized weights: ``SwarmFormat`` of kernels.h."""

    _fields_ = [
        *((name, _count) for name in ("codes", "scales", "minima", "group", "offset", "int8_rows")),
        ("order", _pointer),
        ("table", ctypes.c_uint16 * 16),
    ]


class NativeMatrix(ctypes.Structure):
    """A packed matrix: ``SwarmMatrix`` of kernels.h."""

    _fields_ = [
        ("packed", _pointer),
        ("bias", _pointer),
        ("outputs", _count),
        ("inputs", _count),
        ("function", _count),
        ("kind", _count),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("format", _pointer),
    ]


class NativeRows(ctypes.Structure):
    """Rows to read and rows to write: ``SwarmRows`` of kernels.h."""

    _fields_ = [
        ("x", _pointer),
        ("stride", _count),
        ("out", _pointer),
        ("out_stride", _count),
        ("adapted", _pointer),
    ]


class NativeAdapter(ctypes.Structure):
    """What an adapter adds to a product: ``SwarmAdapter`` of kernels.h."""

    _fields_ = [*((name, _pointer) for name in ("down", "scales", "up", "groups")), ("rank", _count)]


class NativeAdapted(ctypes.Structure):
    """The adapters of a step's rows: ``SwarmAdapted`` of kernels.h."""

    _fields_ = [
        ("which", _pointer),
        ("order", _pointer),
        ("adapters", _pointer),
        ("num_adapters", _count),
        ("slot", _count),
        ("lowered", _pointer),
        ("stride", _count),
    ]


class NativeSegment(ctypes.Structure):
    """Consecutive rows of one sequence, and a layer's state before and after them: ``SwarmSegment`` of kernels.h."""

    _fields_ = [("offset", _count), ("count", _count), ("before", _pointer), ("after", _pointer)]


class NativeConvolution(ctypes.Structure):
    """Convolution with a state: ``SwarmConvolution`` of kernels.h."""

    _fields_ = [
        ("segments", _pointer),
        *((name, _count) for name in ("num_segments", "state", "kind")),
        ("x", _pointer),
        ("stride", _count),
        ("out", _pointer),
        *((name, _count) for name in ("out_stride", "channels", "taps", "function")),
        ("weight", _pointer),
        ("bias", _pointer),
    ]


class NativeRecurrence(ctypes.Structure):
    """Recurrence of a matrix for each head: ``SwarmRecurrence`` of kernels.h."""

    _fields_ = [
        ("segments", _pointer),
        *((name, _count) for name in ("num_segments", "state")),
        *((name, _pointer) for name in ("query", "key", "value")),
        *((name, _count) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, _pointer) for name in ("decay", "beta", "out")),
        *((name, _count) for name in ("heads", "key_heads", "keys", "values", "decays")),
    ]


class NativeScan(ctypes.Structure):
    """Recurrence of some numbers for each channel: ``SwarmScan`` of kernels.h."""

    _fields_ = [
        ("segments", _pointer),
        *((name, _count) for name in ("num_segments", "state")),
        *((name, _pointer) for name in ("x", "step", "rate", "in", "out_mix")),
        ("mix_stride", _count),
        ("out", _pointer),
        *((name, _count) for name in ("channels", "states")),
    ]


_refusals: list[str] = []  # at most one entry: why this process must not use the library


def library() -> ctypes.CDLL | None:
    """Return the kernels, if they were built, are not disabled, and this processor can run them."""
    return None if _refusals else _open_checked()[0]


def unavailable_reason() -> str:
    """Return why there is no library; empty if there is one."""
    return _refusals[0] if _refusals else _open_checked()[1]


@contextmanager
def disabled(reason: str) -> Iterator[None]:
    """Use torch's kernels in this context, in the whole process."""
    before = _refusals[:]
    disable(reason)
    try:
        yield
    finally:
        _refusals[:] = before


def check_status(status: int) -> None:
    """Check a kernel's status; raise ``MemoryError`` if it could not allocate working memory."""
    if status:
        raise MemoryError("a kernel got no memory for its sums; give the worker more, or shorter steps")


def disable(reason: str) -> None:
    """Use torch's kernels in this process from now on. Call it before anything is loaded."""
    _refusals[:] = [reason]


@cache
def open_library() -> tuple[ctypes.CDLL | None, str]:
    """Open the library that was built from our C sources, even if this processor can't run its kernels. If there is
    none, return the reason."""
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name(_STEM + suffix)).exists()]
    if not paths:
        return None, "they were not built: install Swarm where there is a C compiler"
    try:
        opened = ctypes.CDLL(str(paths[0]))
        opened.swarm_native_sources.restype = ctypes.c_char_p
        made_from = opened.swarm_native_sources().decode()
    except (OSError, AttributeError) as error:
        return None, f"{paths[0].name} can't be used ({error}); install Swarm again"
    # a library without sources next to it is the package's own
    if digest(Path(__file__).parent) not in (made_from, ""):
        return None, f"{paths[0].name} was built from other sources; install Swarm again, where there is a C compiler"
    return opened, ""


@cache
def _open_checked() -> tuple[ctypes.CDLL | None, str]:
    opened, why_not = open_library()
    if opened is None:
        return None, why_not
    _declare(opened)
    passes = use_first_valid(opened, variants(opened))
    assert passes, "the others are held against the portable variant, so that one passes"
    return opened, ""


def use_first_valid(opened: ctypes.CDLL, names: Iterable[str]) -> bool:
    """Use the first of these variants that passes its proof, and record what is wrong with the ones before it.

    Returns False, without any change, if none of them passes.
    """
    opened.swarm_tiles_refused.restype = ctypes.c_char_p
    refused = opened.swarm_tiles_refused()
    _rejected[:] = [f"amx: {refused.decode()}"] if refused else []
    for name in names:
        if error := _prove_variant(opened, name):
            _rejected.append(f"{name}: {error}")
        else:
            use_variant(opened, name)
            return True
    return False


def variants(opened: ctypes.CDLL) -> list[str]:
    """Return the variants that this processor can run, the fastest first."""
    opened.swarm_variant.restype = ctypes.c_char_p
    names: list[str] = []
    runs_here = ctypes.c_int()
    for index in itertools.count():
        name = opened.swarm_variant(index, ctypes.byref(runs_here))
        if name is None:
            return names
        if runs_here.value:
            names.append(name.decode())
    raise AssertionError("counting ends with the variants")


_chosen: list[str] = []  # the variant in use, at most one
_rejected: list[str] = []  # faster variants that failed, with the reason


def rejected_variants() -> str:
    """Return which faster variants this processor should run but does not, and why; empty if there are none."""
    return "; ".join(_rejected) if not _refusals else ""


def use_variant(opened: ctypes.CDLL, name: str) -> None:
    """Use this variant from now on, in the whole process. Raises ``ValueError`` if it can't run or computes wrongly."""
    runs = variants(opened)
    if name not in runs:
        raise ValueError(f"there is no variant {name!r} that this processor can run; use {', '.join(runs)}")
    if wrong := _prove_variant(opened, name):
        raise ValueError(f"the variant {name!r} fails on this processor ({wrong}); use another of {', '.join(runs)}")
    opened.swarm_choose(name.encode())
    _chosen[:] = [name]


@cache
def _prove_variant(opened: ctypes.CDLL, name: str) -> str:
    """Test a variant with a small product (a millisecond, once); return what is wrong, or an empty string.

    The test is needed because not every variant can have been tested on every existing processor.
    """
    opened.swarm_proof.restype = ctypes.c_char_p
    error = opened.swarm_proof(name.encode())
    return error.decode() if error else ""


def variant() -> str:
    """Return the variant in use; empty if this process does not use our kernels."""
    return _chosen[0] if library() is not None else ""


@contextmanager
def using_variant(name: str) -> Iterator[None]:
    """Use another variant in this context, in the whole process."""
    opened, before = library(), variant()
    assert opened is not None, unavailable_reason()
    use_variant(opened, name)
    try:
        yield
    finally:
        use_variant(opened, before)


def _declare(opened: ctypes.CDLL) -> None:
    opened.swarm_attend.argtypes = [_pointer, _count, _pointer, _pointer, _pointer, ctypes.c_int]
    opened.swarm_attend.restype = ctypes.c_int
    opened.swarm_multiply.argtypes = [_pointer, _pointer, _count, _pointer, ctypes.c_int]
    opened.swarm_multiply.restype = ctypes.c_int
    opened.swarm_linear.argtypes = [_pointer, _pointer, _count, _count, _pointer, _count, _pointer, ctypes.c_int]
    opened.swarm_linear.restype = ctypes.c_int
    opened.swarm_rms_norm.argtypes = [_count, _pointer, _count, _count, _count, _pointer, ctypes.c_float, _count]
    opened.swarm_rms_norm.restype = None
    opened.swarm_layer_norm.argtypes = [_count, _pointer, _count, _count, _pointer, _pointer, ctypes.c_float]
    opened.swarm_layer_norm.restype = None
    counts: list[Any] = [_count] * 5
    opened.swarm_turn.argtypes = [_count, _pointer, *counts, _pointer, _pointer, _count, _count]
    opened.swarm_turn.restype = None
    opened.swarm_draw.argtypes = [_count, _count, _pointer, _count, ctypes.c_int]
    opened.swarm_draw.restype = ctypes.c_int
    opened.swarm_activate.argtypes = [_count, _count, _pointer, _pointer, _count]
    opened.swarm_activate.restype = None
    opened.swarm_mix.argtypes = [_pointer, ctypes.POINTER(NativeRows), _count, _pointer, _pointer, ctypes.c_int]
    opened.swarm_mix.restype = ctypes.c_int
    for job in (opened.swarm_quantize, opened.swarm_convolve, opened.swarm_recur, opened.swarm_scan):
        job.argtypes, job.restype = [_pointer, ctypes.c_int], None
    opened.swarm_pack.argtypes = [_pointer, _pointer, _count, _count, _pointer, ctypes.c_int]
    opened.swarm_pack.restype = None
    opened.swarm_lookup.argtypes = [_pointer, _pointer, _count, _count, _pointer, ctypes.c_int]
    opened.swarm_lookup.restype = None
    for move in (opened.swarm_read_kv, opened.swarm_write_kv):
        move.argtypes, move.restype = [_pointer, *[_count] * 4, _pointer], None
    opened.swarm_run.argtypes = [_pointer, _count, _pointer]
    opened.swarm_run.restype = ctypes.c_int


def allocate_weights(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory for weights, in large pages if the system has them, because weights are read completely in every
    step."""
    spare = _HUGE // dtype.itemsize
    whole = torch.empty(num_elements + spare, dtype=dtype)
    start = -whole.data_ptr() % _HUGE // dtype.itemsize
    if num_elements * dtype.itemsize >= _HUGE:
        _advise(whole.data_ptr() + start * dtype.itemsize, num_elements * dtype.itemsize)
    return whole[start : start + num_elements]


def _advise(address: int, num_bytes: int) -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:  # only a hint: its result does not matter
        advise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes // _HUGE * _HUGE), _MADV_HUGEPAGE)
