"""How many threads compute: all for large work, one for small.

Waking OpenMP's sleeping threads costs 40 to 60 µs here, more than most of what lies between two matrices takes for a
few rows. So in a step of few rows a thread computes alone, and asks for help only for what is worth it. Changing the
number costs 0.1 µs. Our own kernels have the same bits for any number; for a library's a probe says for which ones.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

import torch

# A step of up to this many rows is small: only matrices and long attention are worth waking others for.
FEW_ROWS = 48
# Multiplications from which on several threads are quicker, waking included.
WORTH_WAKING = 8 << 20

# Elements that torch gives a thread at least.
_SHARE = 1 << 16

_mine = threading.local()
_expected: set[int] = set()


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class computing:
    """``with computing(threads, rows):`` a step of so many rows runs in this thread, with the help of others."""

    def __init__(self, threads: int, rows: int) -> None:
        self._threads, self._small = threads, rows <= FEW_ROWS

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        _mine.threads = self._threads
        _mine.helped = self._threads if self._small and self._threads > 1 else 0
        torch.set_num_threads(1 if self._small else self._threads)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _mine.helped = _mine.threads = 0
        torch.set_num_threads(self._before)


def threads() -> int:
    """How many threads may compute in this thread's step; kernels that don't wake them for little ask here."""
    return getattr(_mine, "threads", 0) or torch.get_num_threads()


def expect(*numbers: int) -> None:
    """Steps of this process will be computed by so many threads: what a probe must try."""
    _expected.update(numbers)


def numbers(work: int) -> tuple[int, ...]:
    """The numbers of threads that will compute products of ``work`` multiplications for a row."""
    return tuple(sorted({*(_expected or {torch.get_num_threads()}), *((1,) if work < WORTH_WAKING else ())}))


def gather(work: int, allowed: tuple[int, ...] = ()) -> int:
    """Let all threads help with the next operation of ``work`` multiplications, if that pays; no other number of
    threads than these, if there are any. Returns the number before, for ``dismiss``; 0 if it is the same."""
    before = torch.get_num_threads()
    helped = getattr(_mine, "helped", 0)
    wanted = helped if helped and work >= WORTH_WAKING else before
    if allowed and wanted not in allowed:
        wanted = allowed[-1]
    if wanted == before:
        return 0
    torch.set_num_threads(wanted)
    return before


def dismiss(before: int) -> None:
    """Go on as before ``gather``."""
    if before:
        torch.set_num_threads(before)


def start_helpers(number: int) -> None:
    """Let torch start the threads that help this one now. It keeps them, and would start them with the first long
    prompt: then nobody could tell them from a leak."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    torch.zeros(number * _SHARE).add_(1)
    torch.set_num_threads(before)
