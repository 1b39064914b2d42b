"""Products with quantized weights, in every variant of our kernels that this processor can run.

A row's bits depend on the row alone, the variants of the portable family have the same bits, and all are near what
float64 gives. ``test_amx`` runs the AMX variant's tests of many rows, gates and orders once more under an emulator.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from swarm.stage import native
from swarm.stage.native import cores, packed_cache
from swarm.stage.native.quantized import (
    QuantizedEmbedding,
    QuantizedGated,
    QuantizedLinear,
    _pack_matrix,
    native_format,
    quantized_experts,
)
from swarm.stage.native.variant_choice import PORTABLE
from swarm.stage.quantization.formats import Codes, Minima, Scales, WeightFormat, packed_bytes
from swarm.stage.quantization.tensors import QuantizedTensor
from tests.model.quantized import E2M1, all_formats, exact_terms, exact_weights, random_tensor, weight_format, weight_of

LIBRARY = native.library()
VARIANTS = (
    native.variants(LIBRARY)
    if LIBRARY is not None
    else [pytest.param("", marks=pytest.mark.skip(reason=f"no native kernels: {native.unavailable_reason()}"))]
)
needs_library = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {native.unavailable_reason()}")
DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of the greatest number
ROUNDED = {torch.float32: 2**-24, torch.bfloat16: 2**-8}  # a result, of itself
SUMMED = 4e-6  # sums of a few hundred products in float32, of the magnitudes' sum
COUNTS = (1, 2, 3, 4, 5, 8, 16, 23, 31, 32, 33, 127, 128, 512)
SHAPE = (70, 300)  # a block and a group that aren't full
Q4_1 = weight_format(Codes.INT4, Scales.FLOAT16, Minima.FLOAT16, 32)
# one of each kind of codes, every group
SOME = [
    Q4_1,
    weight_format(Codes.INT4, Scales.FLOAT32, Minima.NONE, 32, E2M1),
    weight_format(Codes.INT4, Scales.BFLOAT16, Minima.ZERO_POINTS, 128),
    weight_format(Codes.INT5, Scales.NESTED, Minima.NESTED, 32),
    weight_format(Codes.INT6, Scales.NESTED, Minima.NONE, 16),
    weight_format(Codes.INT8, Scales.FLOAT16, Minima.NONE, 64),
    weight_format(Codes.FP8, Scales.FLOAT32, Minima.NONE, 128),
]


def label(form: WeightFormat) -> str:
    return form.name.replace(" ", "-") + ("-table" if form.table else "")


def random_rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(5)).to(dtype)


def structured_rows(inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Constant rows, ramps, alternating signs, and a number that is far greater than the rest; then single ones."""
    at = torch.arange(inputs, dtype=torch.float32)
    outlier = torch.linspace(-1, 1, inputs)
    outlier[inputs // 3] = 3e4
    rows = [torch.zeros(inputs), torch.ones(inputs), -at, at / inputs, 1 - 2 * (at % 2), outlier]
    return torch.cat([torch.stack(rows), functional.one_hot(singles(inputs), inputs).float()]).to(dtype)


def singles(inputs: int) -> torch.Tensor:
    """The inputs of which a structured row has a one, and no others."""
    return torch.tensor([0, 1, 31, 32, inputs - 1])


def structured_results(
    rows: torch.Tensor, tensor: QuantizedTensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what structured rows give, and how far each number may be from it by what its own row and output can
    give. A single one gives exactly the weight."""
    scaled, minima = exact_terms(tensor)
    right = rows.double() @ (scaled - minima).T + bias.double()
    terms = rows.double().abs() @ (scaled.abs() + minima.abs()).T + bias.double().abs()
    bound = ROUNDED[rows.dtype] * right.abs() + SUMMED * terms
    at = singles(tensor.shape[-1])
    weights = (scaled.float() - minima.float())[:, at]
    right[-len(at) :] = (weights.T + bias).to(rows.dtype).double()
    bound[-len(at) :] = 0
    return right, bound


def off(out: torch.Tensor, right: torch.Tensor) -> float:
    """The greatest difference in a row, as a part of the greatest number that the row could have given."""
    return float(((out.double() - right).abs().amax(-1) / right.abs().amax(-1).clamp_min(1e-30)).max())


def unsteady(module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Numbers of rows for which some have other bits than among all."""
    return [
        count
        for count in COUNTS
        if count <= len(rows)
        for first in {0, count * 7 % (len(rows) - count + 1)}
        if not torch.equal(module(rows[first : first + count].clone()), whole[first : first + count])
    ]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", all_formats(), ids=label)
def test_every_format(form: WeightFormat, dtype: torch.dtype) -> None:
    """Each variant gives what float64 gives, and rows alone have their bits among others."""
    tensor = random_tensor(form, *SHAPE)
    rows = torch.cat([random_rows(34, SHAPE[1], dtype), structured_rows(SHAPE[1], dtype)])
    right = rows.double() @ exact_weights(tensor).T
    exact, bound = structured_results(rows[34:], tensor, torch.zeros(SHAPE[0]))
    family = set()
    for variant in VARIANTS:
        with torch.inference_mode(), native.using_variant(variant), cores.computing(2, len(rows)):
            module = QuantizedLinear(weight_of(tensor), None, dtype)
            out = module(rows)
            assert off(out[:34], right[:34]) < NEAR[dtype], variant
            assert bool(((out[34:].double() - exact).abs() <= bound).all()), variant
            assert unsteady(module, rows, out) == [], variant
        if dtype == torch.float32 or variant in PORTABLE:
            family.add(out.view(torch.uint8).numpy().tobytes())
    assert len(family) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", SOME, ids=label)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_number_of_rows(variant: str, form: WeightFormat, dtype: torch.dtype) -> None:
    """One thread or two, a few rows or a prompt's: the same bits, and near what float64 gives."""
    shape = (130, 64) if variant == "portable" else (130, 576)
    tensor, bias = random_tensor(form, *shape), torch.linspace(-3, 3, shape[0])
    rows, structured = random_rows(520, shape[1], dtype), structured_rows(shape[1], dtype)
    right = rows.double() @ exact_weights(tensor).T + bias.double()
    with torch.inference_mode(), native.using_variant(variant), cores.computing(1, len(rows)):
        module = QuantizedLinear(weight_of(tensor), bias, dtype)
        whole = module(rows)
        assert off(whole, right) < NEAR[dtype]
        with cores.computing(2, len(rows)):
            assert unsteady(module, rows, whole) == []
        exact, bound = structured_results(structured, tensor, bias)
        for count in COUNTS:
            for first in range(0, len(structured), count):  # each of them in some product of this number of rows
                which = (torch.arange(count) + first) % len(structured)
                wrong = (module(structured[which]).double() - exact[which]).abs() > bound[which]
                assert not bool(wrong.any()), (count, which[wrong.any(-1)].tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gated_products(variant: str, ordered: bool, dtype: torch.dtype) -> None:
    """The function of one product times the other, with inputs in their own order or in another one."""
    gate = random_tensor(Q4_1, 70, 288, seed=2, ordered=ordered)
    up = random_tensor(Q4_1, 70, 288, seed=2).map_rows(lambda each: each.flip(0))
    weights = [weight_of(gate), weight_of(gate.map_rows(lambda each: each.flip(0)) if ordered else up)]
    rows = random_rows(40, 288, dtype) / 8
    products = [rows.double() @ exact_weights(each.read()).T for each in weights]
    with torch.inference_mode(), native.using_variant(variant), cores.computing(2, 40):
        module = QuantizedGated(*weights, ("swish", ""), dtype)
        whole = module(rows)
        assert off(whole, functional.silu(products[0]) * products[1]) < NEAR[dtype]
        assert unsteady(module, rows, whole) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_in_another_order(variant: str) -> None:
    """The columns' order is undone by the rows: the product is that of the same weights in the inputs' own order."""
    for dtype in DTYPES:
        tensor = random_tensor(Q4_1, *SHAPE, ordered=True)
        rows = random_rows(9, SHAPE[1], dtype)
        assert tensor.order is not None
        with torch.inference_mode(), native.using_variant(variant):
            plain = QuantizedLinear(weight_of(random_tensor(Q4_1, *SHAPE)), None, dtype)
            out = QuantizedLinear(weight_of(tensor), None, dtype)(rows)
            assert torch.equal(out, plain(rows[:, tensor.order.long()]))
            assert off(out, rows.double() @ exact_weights(tensor).T) < NEAR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_by_groups(variant: str, dtype: torch.dtype) -> None:
    """Experts' matrices in one call: each gives what it alone would give, with its own bias."""
    assert LIBRARY is not None
    inner = [random_tensor(Q4_1, 4, 40, 96, seed=seed) for seed in (3, 4)]
    down = random_tensor(weight_format(Codes.INT8, Scales.FLOAT16, Minima.NONE, 32), 4, 70, 40)
    bias = torch.randn(4, 70, generator=torch.Generator().manual_seed(9))
    offsets = [0, 37, 37, 40, 62]
    rows = random_rows(62, 96, dtype)
    with torch.inference_mode(), native.using_variant(variant), cores.computing(2, 62):
        gates, downs = quantized_experts([weight_of(each) for each in inner], weight_of(down), dtype, None, bias)
        between, out = torch.empty(62, 40, dtype=dtype), torch.full((62, 70), float("nan"), dtype=dtype)
        for table, x, to in ((gates.table(1), rows, between), (downs.table(), between, out)):
            where = native.NativeRows(x.data_ptr(), x.shape[1], to.data_ptr(), to.shape[1])
            where_from = (ctypes.c_int64 * 5)(*offsets)
            native.check_status(LIBRARY.swarm_multiply(table, where_from, 4, ctypes.byref(where), 2))
        for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
            gate, up = (weight_of(each).expert(expert) for each in inner)
            middle = QuantizedGated(gate, up, ("swish", ""), dtype)(rows[first:last])
            assert torch.equal(between[first:last], middle)
            last_product = QuantizedLinear(weight_of(down).expert(expert), bias[expert], dtype)
            assert torch.equal(out[first:last], last_product(middle))


@needs_library
@pytest.mark.parametrize("form", all_formats(), ids=label)
def test_rows_of_an_embedding(form: WeightFormat) -> None:
    """A packed matrix gives back each weight, rounded once, in the inputs' own order."""
    for ordered in (False, True):
        tensor = random_tensor(form, *SHAPE, ordered=ordered)
        ids = torch.tensor([[0, 69, 63], [64, 1, 1]])
        for dtype in DTYPES:
            with torch.inference_mode():
                out = QuantizedEmbedding(weight_of(tensor), dtype)(ids)
                right = exact_weights(tensor).float().to(dtype)[ids]
                if (
                    form.scales is Scales.FLOAT32 and form.minima is Minima.ZERO_POINTS
                ):  # a product of more than 24 bits
                    assert torch.allclose(out, right, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
                else:
                    assert torch.equal(out, right)


@needs_library
def test_a_head_shares_its_matrix_with_the_embedding() -> None:
    head = QuantizedLinear(weight_of(random_tensor(Q4_1, *SHAPE)), None, torch.bfloat16)
    embedding = QuantizedEmbedding(head, torch.bfloat16)
    assert embedding.matrices.packed.data_ptr() == head.matrix.packed
    for wrong in (-1, SHAPE[0]):
        with pytest.raises(IndexError, match="between 0 and 69"):
            embedding(torch.tensor([wrong]))
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, SHAPE[1])


@needs_library
def test_a_weight_in_the_cache_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of its inputs comes from the cache, too."""
    stored: dict[str, torch.Tensor] = {}

    def load_or_pack(key: str, num_bytes: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
        if key not in stored:
            stored[key] = native.allocate_weights(num_bytes, torch.uint8)
            pack(stored[key])
        return stored[key]

    monkeypatch.setattr(packed_cache, "load_or_pack", load_or_pack)
    weight = weight_of(random_tensor(Q4_1, *SHAPE, ordered=True))
    rows = random_rows(3, SHAPE[1], torch.bfloat16)
    first = QuantizedLinear(weight, None, torch.bfloat16)(rows)
    unread = replace(weight, read=lambda: pytest.fail("the weight was read"))
    assert torch.equal(QuantizedLinear(unread, None, torch.bfloat16)(rows), first)


@needs_library
def test_a_code_that_is_no_number_makes_its_products_none() -> None:
    """As a plain matrix with a NaN does; its neighbours' products stay what they are."""
    tensor = random_tensor(weight_format(Codes.FP8, Scales.FLOAT16, Minima.NONE, 32), *SHAPE)
    tensor.codes[3, 40] = 0xFF
    out = QuantizedLinear(weight_of(tensor), None, torch.float32)(random_rows(2, SHAPE[1], torch.float32))
    assert out.isnan().nonzero().tolist() == [[0, 3], [1, 3]]


@needs_library
def test_gate_and_up_must_be_alike() -> None:
    gate, narrow = (weight_of(random_tensor(Q4_1, 70, inputs)) for inputs in (96, 64))
    with pytest.raises(ValueError, match="same shape"):
        QuantizedGated(gate, narrow, ("swish", ""), torch.bfloat16)


@needs_library
@pytest.mark.parametrize("wrong", ["narrow", "low", "missing", "unexpected"])
@pytest.mark.parametrize("array", ["codes", "scales", "minima", "group_scales", "group_minima", "order"])
def test_arrays_of_other_sizes_do_not_reach_the_kernels(array: str, wrong: str) -> None:
    """C reads as many numbers as the format and the shape require."""
    nested = weight_format(Codes.INT5, Scales.NESTED, Minima.NESTED, 32)
    plain = weight_format(Codes.INT4, Scales.FLOAT16, Minima.NONE, 32)
    tensor = random_tensor(plain if wrong == "unexpected" else nested, *SHAPE, ordered=wrong != "unexpected")
    right = getattr(tensor, array)
    if (right is None) != (wrong == "unexpected") or (array, wrong) in (("order", "low"), ("codes", "missing")):
        return  # such a matrix has no such array, or the array can't be like this
    kinds = {"narrow": lambda array: array[..., :-1].clone(), "low": lambda array: array[:-1].clone()}
    changed = kinds[wrong](right) if wrong in kinds else None if wrong == "missing" else torch.zeros(1)
    weight = replace(weight_of(tensor), read=lambda: replace(tensor, **{array: changed}))
    with pytest.raises(ValueError, match=array):
        QuantizedLinear(weight, None, torch.bfloat16)


@needs_library
@pytest.mark.parametrize("form", all_formats(), ids=label)
def test_a_packed_matrix_fills_its_memory_and_no_more(form: WeightFormat) -> None:
    """The sizes of the plan are those of layout.h: every byte is written, and none behind them."""
    tensor = random_tensor(form, *SHAPE)
    size = packed_bytes(form, *SHAPE)
    packed = [torch.full((size + 64,), filler, dtype=torch.uint8) for filler in (0, 255)]
    for memory in packed:
        _pack_matrix(native_format(form, None), [tensor], memory)
    assert torch.equal(packed[0][:size], packed[1][:size])
    assert (packed[0][size:].unique().tolist(), packed[1][size:].unique().tolist()) == ([0], [255])
