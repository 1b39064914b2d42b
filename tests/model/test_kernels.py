"""Every kernel that a stage can choose: a row's bits don't depend on how many other rows there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from swarm.stage.linears import PackedLinear, PlainLinear, choose, good_at
from swarm.stage.steady import Steady, steadily

# Sizes that are no multiple of a vector, small ones, and those of a 1.1 B Llama.
SHAPES = [(96, 64), (500, 64), (176, 72), (5632, 2048), (256, 2048)]
MOST_ROWS = 320

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def unsteady(function: Function, rows: torch.Tensor, counts: range) -> list[int]:
    """Numbers of rows for which some row has other bits than among all rows; each also at another place."""
    whole = function(rows)
    return [
        count
        for count in counts
        for first in {0, (count * 7) % (len(rows) - count + 1)}
        if not torch.equal(function(rows[first : first + count].clone()), whole[first : first + count])
    ]


@pytest.fixture(autouse=True)
def _set_threads(threads: int) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [PackedLinear, PlainLinear])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linears(
    kernel: type[PackedLinear | PlainLinear], shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    """From the fewest rows that a kernel names up to 320, and for one and two threads."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if shape[1] % 64 else None
    rows = torch.randn(MOST_ROWS, shape[1], generator=generator).to(dtype)
    stride = 3 if weight.numel() < 10**5 else 53
    with torch.inference_mode():
        module = kernel(weight, bias)
        few = range(kernel.min_rows, kernel.min_rows + (16 if stride == 3 else 6))
        assert unsteady(module, rows, few) == []
        assert unsteady(module, rows, range(kernel.min_rows, MOST_ROWS + 1, stride)) == []
        near = functional.linear(rows, weight, bias)
        assert torch.allclose(module(rows).float(), near.float(), rtol=1e-2, atol=1e-2 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [176, 72, 5632])
@pytest.mark.parametrize(
    "function", [torch.nn.SiLU(), torch.nn.GELU("tanh"), torch.nn.GELU(), torch.nn.Sigmoid()], ids=str
)
def test_activations(function: torch.nn.Module, width: int, dtype: torch.dtype, threads: int) -> None:
    """Activations too, whatever the width."""
    rows = torch.randn(MOST_ROWS, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    stride = 3 if width < 1000 else 41
    assert unsteady(Steady(function), rows, range(1, MOST_ROWS + 1, stride)) == []
    assert torch.equal(Steady(function)(rows[:, 1:]), steadily(function, rows[:, 1:].contiguous()))


def test_plain_activations_are_unsteady(threads: int) -> None:
    """Control: without the aligned pieces the same comparison fails."""
    rows = torch.randn(MOST_ROWS, 72, generator=torch.Generator().manual_seed(2))
    assert unsteady(functional.silu, rows, range(1, MOST_ROWS + 1))


def test_one_wrong_bit_is_noticed(threads: int) -> None:
    """Control: a result that is one bit off in one row fails the comparison of bits."""
    weight, rows = torch.randn(96, 64), torch.randn(MOST_ROWS, 64)
    module = PackedLinear(weight, None)

    def off(some: torch.Tensor) -> torch.Tensor:
        result = module(some)
        if len(some) == 40:
            result[7, 3] = torch.nextafter(result[7, 3], torch.tensor(float("inf")))
        return result

    assert unsteady(off, rows, range(36, 44)) == [40, 40]


def test_choice(threads: int) -> None:
    """The packed layout on a CPU for float32 always and for bfloat16 where it is native; plain elsewhere."""
    cpu = torch.device("cpu")
    assert choose(cpu, torch.float32) is PackedLinear
    assert (choose(cpu, torch.bfloat16) is PackedLinear) == good_at(cpu, torch.bfloat16)
    assert choose(cpu, torch.float16) is PlainLinear
    assert choose(torch.device("cuda"), torch.bfloat16) is PlainLinear
    assert not good_at(cpu, torch.float16)
