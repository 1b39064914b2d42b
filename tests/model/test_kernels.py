"""Every kernel that a stage can choose, and that says of itself to be exact on this machine: a row's bits don't depend
on how many other rows there are.

Which of the libraries' kernels may say so, a probe decides; ``test_probe`` shows with made-up kernels that it finds out
those that may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from swarm.stage import native
from swarm.stage.matmul import experts
from swarm.stage.matmul.elementwise import ALIGN, AlignedActivation, align_calls, apply_aligned
from swarm.stage.matmul.linears import KERNELS, PackedLinear, PlainLinear, build_linear, choose_kernel, is_efficient
from swarm.stage.matmul.raw_matmul import wrap_matrices
from swarm.stage.modules.fused import RmsNorm
from swarm.stage.native import cores
from swarm.stage.native.linears import NativeGated

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOST_ROWS = 320
# (outputs, inputs). Small: every number of rows. Outputs that fill no block and no vector, the least inputs.
SMALL = [(96, 64), (500, 64), (251, 96), (176, 72), (257, 136), (1000, 80), (33, 320)]
ONE_OUTPUT = (1, 64)
# Those of real models, some odd, up to a vocabulary: some numbers of rows.
LARGE = [(256, 2048), (5632, 2048), (2048, 5632), (256, 5632), (1023, 768), (4097, 1026)]
LARGEST = [(32000, 2048), (32000, 64)]
# Torch takes seconds to multiply bfloat16 where the processor has no instruction for it. Each of these shapes has
# neighbours with as odd a number of outputs or inputs, which are tried in every check.
SLOW_IN_BFLOAT16 = [(500, 64), (257, 136), (1000, 80), (5632, 2048), (2048, 5632)]

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(autouse=True)
def _set_threads(request: pytest.FixtureRequest) -> Iterable[None]:
    before = torch.get_num_threads()
    if "threads" in request.fixturenames:
        torch.set_num_threads(request.getfixturevalue("threads"))
    yield
    torch.set_num_threads(before)


def unsteady(function: Function, rows: torch.Tensor, counts: Iterable[int]) -> list[int]:
    """Numbers of rows for which some row has other bits than among all rows; each also at another place."""
    whole = function(rows)
    return [
        count
        for count in counts
        for first in {0, (count * 7) % (len(rows) - count + 1)}
        if not torch.equal(function(rows[first : first + count].clone()), whole[first : first + count])
    ]


def counts_for(shape: tuple[int, int]) -> list[int]:
    """Every number of rows up to 320 for small matrices; for larger ones the first few, and some around the usual
    blocks."""
    if shape in (*SMALL, ONE_OUTPUT):
        return list(range(1, MOST_ROWS + 1))
    if shape in LARGE:
        return [1, 2, 3, 4, 5, 7, 12, 16, 17, 31, 33, 49, 64, 127, 319]
    return [1, 2, 5, 15, 33]


def tensors(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, a bias, and rows for it."""
    chance = torch.Generator().manual_seed(1)
    most = MOST_ROWS if shape not in LARGEST else 64
    sizes = (shape, shape[:1], (most, shape[1]))
    weight, bias, rows = (torch.randn(size, generator=chance).to(dtype) for size in sizes)
    return weight, bias, rows


def is_near_another(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the libraries' kernels meet this number of outputs and of inputs in other shapes."""
    return shape == LARGEST[0] or (dtype == torch.bfloat16 and shape in SLOW_IN_BFLOAT16)


def served_here() -> list[Any]:
    """Every kernel with every dtype that this machine can run it in, and shapes. In float16 two small ones:
    that is slow on a CPU, and chosen only where somebody asks for it by name."""
    return [
        pytest.param(
            kernel,
            dtype,
            shape,
            id=f"{kernel.__name__}-{str(dtype)[6:]}-{shape[0]}x{shape[1]}",
            marks=pytest.mark.long if kernel in (PlainLinear, PackedLinear) and is_near_another(shape, dtype) else (),
        )
        for kernel in KERNELS
        for dtype in DTYPES
        for shape in ([SMALL[0], SMALL[3]] if dtype == torch.float16 else [*SMALL, *LARGE, *LARGEST])
        if kernel.supports(CPU, dtype, shape[1:])
    ] + [
        pytest.param(kernel, dtype, ONE_OUTPUT, id=f"{kernel.__name__}-{str(dtype)[6:]}-1x64")
        for kernel in KERNELS
        for dtype in DTYPES[:2]
        if kernel.supports(CPU, dtype, ONE_OUTPUT[1:])
    ]


@pytest.mark.parametrize(("kernel", "dtype", "shape"), served_here())
def test_linears(kernel: Any, shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """From one row up to 320, for one thread and two, with a bias and without: what says that it is exact is. And they
    compute the product."""
    weight, bias, rows = tensors(shape, dtype)
    with torch.inference_mode(), cores.computing(threads, MOST_ROWS):
        for some in (bias, None) if shape in (*SMALL, ONE_OUTPUT) else (None,):
            module = kernel(weight, some)
            counts = counts_for(shape)
            if module.exact:
                assert unsteady(module, rows, counts if some is not None or shape not in SMALL else counts[::9]) == []
            near = functional.linear(rows[:8].float(), weight.float(), None if some is None else some.float())
            off = (module(rows)[:8].float() - near).abs().max() / near.abs().max()
            assert float(off) < {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


def test_every_choice_is_under_the_test(threads: int) -> None:
    """Whatever the dtype and the numbers of inputs, a stage takes one of ``KERNELS``: our own where there are such."""
    for dtype in DTYPES:
        for inputs in ((), (64,), (63, 64), (2048, 5632)):
            kernel = choose_kernel(CPU, dtype, inputs)
            assert kernel in KERNELS
            assert kernel.supports(CPU, dtype, inputs)
    for device in ("mps",) if torch.cuda.is_available() else ("cuda", "mps"):
        assert choose_kernel(torch.device(device), torch.bfloat16) is PlainLinear
    with native.disabled("to see what is chosen then"):
        assert choose_kernel(CPU, torch.float16) is PlainLinear
        assert (choose_kernel(CPU, torch.float32) is PackedLinear) == torch._C._has_mkldnn


def test_another_kernel_takes_the_place_of_one_that_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN's kernel can't be shown to be exact on this machine and torch's can, torch's multiplies; where
    neither can, the quicker one does, and says so."""
    if not PackedLinear.supports(CPU, torch.float32):
        pytest.skip("torch has no oneDNN on this machine")
    weight = tensors(SMALL[0], torch.float32)[0]
    assert isinstance(build_linear(PlainLinear, weight, None), PlainLinear)
    for packed, plain, taken in ((True, True, PackedLinear), (False, True, PlainLinear), (False, False, PackedLinear)):
        monkeypatch.setattr(PackedLinear, "exact", packed)
        monkeypatch.setattr(PlainLinear, "exact", plain)
        assert type(build_linear(PackedLinear, weight, None)) is taken


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(176, 72), (1408, 512)], ids=str)
def test_products_with_a_function_behind_them(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """oneDNN's, where its probe says that they are exact, and what they compute."""
    if not PackedLinear.supports(CPU, dtype):
        pytest.skip("torch has no such kernel on this machine")
    weight, _, rows = tensors(shape, dtype)
    gate, up = PackedLinear(weight, None), PackedLinear(weight.flip(0).clone(), None)

    def gated(some: torch.Tensor) -> torch.Tensor:
        return up.apply_times(some, gate.apply_activated(some, "swish", ""))

    with torch.inference_mode(), cores.computing(threads, MOST_ROWS):
        near = functional.silu(rows.float() @ weight.float().T) * (rows.float() @ weight.float().flip(0).T)
        off = (gated(rows).float() - near).abs().max() / near.abs().max()
        assert float(off) < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        if gate.exact and up.exact:
            assert unsteady(gated, rows, range(1, MOST_ROWS + 1, 3)) == []


def test_what_a_cpu_is_good_at(threads: int) -> None:
    """In float32 always, in float16 never: a checkpoint in float16 is computed in float32."""
    assert is_efficient(CPU, torch.float32)
    assert not is_efficient(CPU, torch.float16)


# --- the parts that are not matrices of layers ------------------------------------------------------------------------


@pytest.mark.parametrize("function", [("swish", ""), ("gelu", "tanh")], ids=str)
@pytest.mark.parametrize("shape", [(176, 72), (136, 96), (5632, 2048)], ids=str)
def test_gated(shape: tuple[int, int], function: tuple[str, str], threads: int) -> None:
    """Gate and up with the function between them, where the machine has our own kernels: the model's own formula."""
    if not NativeGated.supports(CPU, torch.bfloat16, shape[1:]):
        pytest.skip("no native kernels on this machine")
    gate, _, rows = tensors(shape, torch.bfloat16)
    up = gate.flip(0).clone()
    apply = {"swish": functional.silu, "gelu": lambda t: functional.gelu(t, approximate="tanh")}
    with torch.inference_mode(), cores.computing(threads, MOST_ROWS):
        module = NativeGated(gate, up, function)
        few = sorted({*range(1, 9), 15, 16, 17, 33, 64, 200, 319})
        assert unsteady(module, rows, few if shape[0] > 1000 else range(1, MOST_ROWS + 1)) == []
        near = apply[function[0]](rows.float() @ gate.float().T) * (rows.float() @ up.float().T)
        assert float((module(rows).float() - near).abs().max() / near.abs().max()) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("width", [72, 96, 251, 2048, 5632])
def test_norms(width: int, dtype: torch.dtype, threads: int) -> None:
    """torch's norm of a row, whatever its length."""
    weight, _, rows = tensors((width, width), dtype)
    module = RmsNorm(weight[0], 1e-6)
    with torch.inference_mode():
        assert unsteady(module, rows, range(1, MOST_ROWS + 1, 7 if width < 1000 else 41)) == []


def experts_of(kind: str, dtype: torch.dtype, hidden: int, inner: int) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner}
    config = AutoConfig.for_model(kind, **sizes, num_local_experts=5, num_experts=5, num_experts_per_tok=2)
    module = {"gpt_oss": GptOssExperts, "qwen3_moe": Qwen3MoeExperts}[kind](config).eval().requires_grad_(False)
    chance = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=chance) * 0.1).to(dtype)
    if hasattr(module, "act_fn"):
        module.act_fn = AlignedActivation(module.act_fn)  # as a stage does
    config._experts_implementation = experts.NAME
    return module


SIZES_OF_EXPERTS = [(96, 136), (768, 328)]


def experts_cases() -> list[Any]:
    """Large gpt-oss experts in bfloat16 take torch seconds: their code is tried in float32, their dtype when small."""
    cases = product(["qwen3_moe", "gpt_oss"], DTYPES[:2], SIZES_OF_EXPERTS)
    slow = ("gpt_oss", torch.bfloat16, SIZES_OF_EXPERTS[1])
    return [pytest.param(*case, marks=pytest.mark.long if case == slow else ()) for case in cases]


@pytest.mark.parametrize(("kind", "dtype", "sizes"), experts_cases(), ids=str)
def test_experts(kind: str, dtype: torch.dtype, sizes: tuple[int, int], threads: int) -> None:
    """A row's mixture, however many rows chose the same experts; products and activations of many rows take several
    threads."""
    experts.register()
    module = experts_of(kind, dtype, *sizes)
    chance = torch.Generator().manual_seed(3)
    rows = torch.randn(MOST_ROWS, sizes[0], generator=chance).to(dtype)
    scores = torch.rand(MOST_ROWS, 5, generator=chance) + torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])  # one is popular
    weights, chosen = torch.topk(torch.softmax(scores, -1), 2)
    weights = weights.to(dtype)
    if not experts.is_exact(module):
        return  # and a worker says so: test_probe
    with torch.inference_mode():
        whole = experts.mix_experts(module, rows, chosen, weights)
        for count in (1, 2, 3, 5, 12, 13, 31, 64, 100, 257, 303):
            for first in {0, count * 7 % (MOST_ROWS - count)}:
                where = slice(first, first + count)
                some = experts.mix_experts(module, rows[where].clone(), chosen[where], weights[where])
                assert torch.equal(some, whole[where]), (count, first)


@pytest.mark.parametrize("more", [3, 4, 7])
def test_experts_with_more_threads(more: int) -> None:
    """Activations of the gpt-oss kind, which torch computes in one piece per thread, with more threads than two."""
    experts.register()
    torch.set_num_threads(more)
    module = experts_of("gpt_oss", torch.float32, 96, 136)
    rows = torch.randn(600, 96, generator=torch.Generator().manual_seed(3))

    def mix(some: torch.Tensor) -> torch.Tensor:
        one = torch.ones(len(some), 1)
        return experts.mix_experts(module, some, one.long(), one)

    with torch.inference_mode():
        whole = mix(rows)
        assert [
            count for count in range(240, 600, 9) if not torch.equal(mix(rows[:count].clone()), whole[:count])
        ] == []


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("width", [176, 72, 5632])
@pytest.mark.parametrize(
    "function", [torch.nn.SiLU(), torch.nn.GELU("tanh"), torch.nn.GELU(), torch.nn.Sigmoid()], ids=str
)
def test_activations(function: torch.nn.Module, width: int, dtype: torch.dtype, threads: int) -> None:
    """Activations too, whatever the width."""
    rows = torch.randn(MOST_ROWS, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    stride = 3 if width < 1000 else 41
    assert unsteady(AlignedActivation(function), rows, range(1, MOST_ROWS + 1, stride)) == []
    assert torch.equal(AlignedActivation(function)(rows[:, 1:]), apply_aligned(function, rows[:, 1:].contiguous()))


class Curve(torch.nn.Module):
    """Calls torch's functions in its own code, as a model does."""

    __module__ = "transformers.models.curve"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        curves = functional.silu(rows) + functional.softplus(rows, 2.0) + rows.sigmoid()
        return curves + functional.gelu(rows, approximate="tanh")


def test_functions_that_a_models_own_code_calls(threads: int) -> None:
    """A gate's curves, of any number of rows."""
    rows, curve = torch.randn(MOST_ROWS, 5, generator=torch.Generator().manual_seed(2)), Curve()
    expected = AlignedActivation(curve)(rows)
    assert unsteady(curve, rows, range(1, MOST_ROWS + 1)), "control: these are other instructions for the last rows"
    align_calls(curve)
    assert unsteady(curve, rows, range(1, MOST_ROWS + 1)) == []
    assert torch.equal(curve(rows), expected)


def test_weights_of_a_router() -> None:
    sizes = {"hidden_size": 64, "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1}
    router = DeepseekV3TopkRouter(AutoConfig.for_model("deepseek_v3", **sizes))
    router.weight.data = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(2))
    align_calls(router)
    wrap_matrices(router)  # its product, too, as a stage does
    rows = torch.randn(MOST_ROWS, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert unsteady(lambda some: router(some)[1], rows, range(1, MOST_ROWS + 1)) == []


# --- controls ---------------------------------------------------------------------------------------------------------


class Torn(torch.nn.Module):
    """Computes what is left over at the end of a piece by other instructions, as torch does where it has vectors."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        result, flat = tensor.clone(), tensor.reshape(-1)
        rest = len(flat) % ALIGN
        if rest:
            result.view(-1)[-rest:] = torch.nextafter(flat[-rest:], torch.tensor(float("inf")))
        return result


def test_plain_activations_are_unsteady(threads: int) -> None:
    """Control: without the aligned pieces, a function that treats the end of a piece otherwise fails the comparison."""
    rows = torch.randn(MOST_ROWS, 72, generator=torch.Generator().manual_seed(2))
    assert unsteady(Torn(), rows, range(1, MOST_ROWS + 1))
    assert unsteady(AlignedActivation(Torn()), rows, range(1, MOST_ROWS + 1)) == []


def test_one_wrong_bit_is_noticed() -> None:
    """Control: a result that is one bit off in one row fails the comparison of bits."""
    rows = torch.randn(MOST_ROWS, 64)

    def off(some: torch.Tensor) -> torch.Tensor:
        result = some * 3
        if len(some) == 40:
            result[7, 3] = torch.nextafter(result[7, 3], torch.tensor(float("inf")))
        return result

    assert unsteady(off, rows, range(36, 44)) == [40, 40]
