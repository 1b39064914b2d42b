"""Every variant of our kernels that this processor can run: a row's products have the same bits whatever is beside it.

``test_amx`` runs the AMX variant's tests once more under an emulator.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional

from swarm.stage import native
from swarm.stage.native import cores
from swarm.stage.native.linears import NativeGated, NativeLinear

LIBRARY = native.library()
VARIANTS = (
    native.variants(LIBRARY)
    if LIBRARY is not None
    else [pytest.param("", marks=pytest.mark.skip(reason=f"no native kernels: {native.unavailable_reason()}"))]
)
DTYPES = [torch.float32, torch.bfloat16]
# (outputs, inputs). Blocks that aren't full, inputs that end within a pair, within a tile of 32, behind a segment.
FIRST = (96, 64)  # every number of rows up to 64, and some around what is taken at a time
SHAPES = [FIRST, (251, 97), (64, 30), (33, 2), (130, 1026), (256, 2048)]
MANY = (*range(1, 65), 100, 241, 255, 256, 257, 511)
FEW = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100)


def most_rows(shape: tuple[int, int]) -> int:
    return 520 if shape == FIRST else 113


def tensors(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, a bias, and rows for it."""
    chance = torch.Generator().manual_seed(sum(shape))
    sizes = (shape, shape[:1], (most_rows(shape), shape[1]))
    weight, bias, rows = (torch.randn(size, generator=chance).to(dtype) for size in sizes)
    return weight, bias, rows


def unsteady(
    module: NativeLinear, rows: torch.Tensor, whole: torch.Tensor, counts: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Where some rows have other bits than among all: (first, count)."""
    return [
        (first, count)
        for count in counts
        for first in {0, count * 7 % (len(rows) - count + 1)}
        if not torch.equal(module(rows[first : first + count].clone()), whole[first : first + count])
    ]


def off(out: torch.Tensor, right: torch.Tensor) -> float:
    """The greatest difference, as a part of the greatest number."""
    return float((out.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products(variant: str, dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    """Near what float64 gives, and the same bits alone and among others, at any place, by one thread and by two."""
    weight, bias, rows = tensors(shape, dtype)
    right = rows.double() @ weight.double().T + bias.double()
    with torch.inference_mode(), native.using_variant(variant), cores.computing(threads, most_rows(shape)):
        module = NativeLinear(weight, bias)
        whole = module(rows)
        with cores.computing(3 - threads, most_rows(shape)):
            assert torch.equal(module(rows), whole)
        assert off(whole, right) < {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
        assert unsteady(module, rows, whole, MANY if shape == FIRST else FEW) == []


@pytest.mark.parametrize("shape", [(96, 64), (251, 97), (130, 1026)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gated_products(variant: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Two matrices in one reading, the function of one times the other."""
    gate, _, rows = tensors(shape, dtype)
    gate /= shape[1] ** 0.5
    up = gate.flip(0).clone()
    right = functional.silu(rows.double() @ gate.double().T) * (rows.double() @ up.double().T)
    with torch.inference_mode(), native.using_variant(variant), cores.computing(2, most_rows(shape)):
        module = NativeGated(gate, up, ("swish", ""))
        whole = module(rows)
        assert off(whole, right) < {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
        assert unsteady(module, rows, whole, FEW) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_by_groups(variant: str, dtype: torch.dtype) -> None:
    """Rows for several matrices in one call, as experts get them: each as its own matrix alone would give it."""
    assert LIBRARY is not None
    chance = torch.Generator().manual_seed(6)
    weights = [torch.randn(70, 98, generator=chance).to(dtype) for _ in range(4)]
    offsets = [0, 37, 37, 40, 62]
    rows = torch.randn(offsets[-1], 98, generator=chance).to(dtype)
    out = torch.full((offsets[-1], 70), float("nan"), dtype=dtype)
    with torch.inference_mode(), native.using_variant(variant), cores.computing(2, len(rows)):
        modules = [NativeLinear(weight, None) for weight in weights]
        where = native.NativeRows(rows.data_ptr(), 98, out.data_ptr(), 70)
        matrices = (native.NativeMatrix * 4)(*(module.matrix for module in modules))
        native.check_status(
            LIBRARY.swarm_multiply(
                matrices, (ctypes.c_int64 * 5)(*offsets), 4, ctypes.byref(where), cores.num_threads()
            )
        )
        for module, first, last in zip(modules, offsets[:-1], offsets[1:], strict=True):
            assert torch.equal(out[first:last], module(rows[first:last]))
