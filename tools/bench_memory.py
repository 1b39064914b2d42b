"""Measure how fast memory is read: a small C program that reads and does nothing else, as a floor for decoding."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from bench_lib import BenchError

AT_LEAST_S = 0.4  # of reading in one turn, about as long as a turn of decoding
SOURCE = r"""
#include <pthread.h>
#include <stdint.h>

typedef struct { const uint64_t *from; int64_t lines; uint64_t sum; } Part;

static void *read_part(void *argument) {
  Part *part = argument;
  uint64_t sums[8] = {0};
  for (int64_t line = 0; line < part->lines; line++) {
    const uint64_t *at = part->from + 8 * line;
    __builtin_prefetch((const char *)at + 4096);
    for (int i = 0; i < 8; i++) sums[i] += at[i];
  }
  for (int i = 0; i < 8; i++) part->sum += sums[i];
  return 0;
}

uint64_t read_memory(const void *from, int64_t bytes, int threads) {
  Part parts[64];
  pthread_t ids[64];
  int64_t lines = bytes / 64, share = lines / threads;
  uint64_t sum = 0;
  for (int i = 0; i < threads; i++) {
    parts[i] = (Part){(const uint64_t *)from + 8 * share * i, share, 0};
    if (i) pthread_create(&ids[i], 0, read_part, &parts[i]);
  }
  read_part(&parts[0]);
  for (int i = 0; i < threads; i++) {
    if (i) pthread_join(ids[i], 0);
    sum += parts[i].sum;
  }
  return sum;
}
"""


class MemoryProbe:
    """Memory of the size of a model's weights, and a function that reads it with all threads. Use it with ``with``."""

    def __init__(self, size: int, threads: int = 0) -> None:
        self.size = size
        self.threads = min(64, threads or len(os.sched_getaffinity(0)))

    def __enter__(self) -> MemoryProbe:
        self._read = _compile()
        self._memory = mmap.mmap(-1, self.size)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._bytes.fill(1)  # pages of its own: untouched ones are all the same
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes
        self._memory.close()

    async def turn(self) -> float:
        """Return the bytes per second of the quickest pass within a turn."""
        return await asyncio.to_thread(self.measure)

    def measure(self) -> float:
        best, total = float("inf"), 0.0
        while total < AT_LEAST_S:
            began = perf_counter()
            self._read(self._bytes.ctypes.data, self.size, self.threads)
            took = perf_counter() - began
            best, total = min(best, took), total + took
        return self.size / best


def _compile() -> ctypes._CFuncPtr:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("the memory probe needs a C compiler")
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        source, library = Path(folder) / "probe.c", Path(folder) / "probe.so"
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).read_memory
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return function
