"""Number of threads that compute: all threads for large work, one for small work.

Waking OpenMP's sleeping threads costs 40 to 60 µs here, which is more than most operations between two matrices take
for a few rows. In a step of few rows, a thread therefore computes alone and wakes others only for operations that are
worth it. Changing the number costs 0.1 µs. Our own kernels have the same bits for any number of threads; for a
library's kernels, a probe shows for which numbers that holds.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

import torch

# A step of up to this many rows is small: only matrices and long attention are worth waking other threads.
FEW_ROWS = 48
# Number of multiplications above which several threads are faster, including the time to wake them.
MIN_PARALLEL_WORK = 8 << 20

# Minimum number of elements that torch gives a thread.
_MIN_SHARE = 1 << 16

_step = threading.local()  # per thread: ``threads`` and ``helped`` of its current step
_expected: set[int] = set()  # numbers of threads that steps of this process use


def num_available() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class computing:
    """Context manager for a step of ``rows`` rows: this thread computes it, with the help of ``threads`` in total."""

    def __init__(self, threads: int, rows: int) -> None:
        self._threads, self._small = threads, rows <= FEW_ROWS

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        _step.threads = self._threads
        _step.helped = self._threads if self._small and self._threads > 1 else 0
        torch.set_num_threads(1 if self._small else self._threads)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _step.helped = _step.threads = 0
        torch.set_num_threads(self._before)


def num_threads() -> int:
    """Return the number of threads for this thread's step. Kernels that wake no threads for little work call this."""
    return getattr(_step, "threads", 0) or torch.get_num_threads()


def expect_threads(*numbers: int) -> None:
    """Declare the numbers of threads that steps of this process will use, so that probes try them."""
    _expected.update(numbers)


def thread_numbers(work: int) -> tuple[int, ...]:
    """Return the numbers of threads that may compute products of ``work`` multiplications per row."""
    return tuple(sorted({*(_expected or {torch.get_num_threads()}), *((1,) if work < MIN_PARALLEL_WORK else ())}))


def use_threads(work: int, allowed: tuple[int, ...] = ()) -> int:
    """Use all threads for the next operation of ``work`` multiplications, if that is faster.

    If ``allowed`` is not empty, only its numbers of threads are used. Returns the previous number for
    ``restore_threads``, or 0 if nothing changed.
    """
    before = torch.get_num_threads()
    helped = getattr(_step, "helped", 0)
    wanted = helped if helped and work >= MIN_PARALLEL_WORK else before
    if allowed and wanted not in allowed:
        wanted = allowed[-1]
    if wanted == before:
        return 0
    torch.set_num_threads(wanted)
    return before


def restore_threads(before: int) -> None:
    """Restore the number of threads from before ``use_threads``."""
    if before:
        torch.set_num_threads(before)


def start_helpers(number: int) -> None:
    """Make torch start its helper threads for this thread now, once.

    torch keeps them, and would otherwise start them with the first long prompt, where they would look like a leak.
    Every activation asks for them; on busy cores, starting them takes as long as the rest of an activation.
    """
    if getattr(_step, "started", 0) >= number:
        return
    _step.started = number
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    torch.zeros(number * _MIN_SHARE).add_(1)
    torch.set_num_threads(before)
