"""Triton's kernels in tests: on a CUDA device where there is one, else in Triton's interpreter.

A process has either the one or the other (``tests/conftest``). The interpreter multiplies in NumPy's float32, whose
order of summation depends on the shapes, can't multiply bfloat16, and cuts numbers off where they become bfloat16. Here
it multiplies in float64 and rounds once, and rounds to the nearest bfloat16, as a GPU does.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
MARKS = [pytest.mark.gpu] if HAS_CUDA else []  # of modules whose tests run on either
pytest.importorskip("triton", reason="Triton is not installed: docs/how-to/gpus.md")
if not HAS_CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, and torch can't use it", allow_module_level=True)


def _wide(part: Any) -> Any:
    data = part.data
    if data.dtype == np.uint16:  # bfloat16, as the interpreter keeps it
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def _multiply_exactly(_: Any, first: Any, second: Any, before: Any, precision: Any, imprecise: Any) -> Any:
    from triton.runtime import interpreter

    result = np.matmul(_wide(first), _wide(second)) + before.data
    return interpreter.TensorHandle(result.astype(np.float32), before.dtype.scalar)


if not HAS_CUDA:
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _truncate = InterpreterBuilder.create_fp_trunc

    def _round(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return _truncate(builder, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot = _multiply_exactly
    InterpreterBuilder.create_fp_trunc = _round

# Tests import these from here, so that they are skipped where Triton is not installed.
from swarm.stage.cuda import experts, matmul, quantized  # noqa: E402

__all__ = ["DEVICE", "HAS_CUDA", "MARKS", "experts", "matmul", "quantized"]
