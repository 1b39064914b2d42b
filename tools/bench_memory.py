"""Measure how fast memory is read by a program that does nothing else: a floor for decoding."""

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
from bench_lib import TOOLS, BenchError

AT_LEAST_S = 0.4  # of reading in one turn, about as long as a turn of decoding
SOURCE = TOOLS / "read_probe.c"


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
        library = Path(folder) / "read_probe.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).read_memory
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return function
