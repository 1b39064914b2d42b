"""Products of quantized weights with rows rounded to int8.

They must have the bits that numpy gets operation by operation, on every variant that runs here, alone and in crowds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from swarm.stage import native
from swarm.stage.native import cores
from swarm.stage.native.quantized import QuantizedGated, QuantizedLinear, QuantizedMatrices, quantized_experts
from swarm.stage.quantization.formats import Codes, Minima, Scales, WeightFormat, supports_int8
from swarm.stage.quantization.tensors import QuantizedTensor
from tests.model.int8_reference import Floats, product, round_rows
from tests.model.quantized import E2M1, all_formats, random_tensor, weight_format, weight_of

LIBRARY = native.library()
VARIANTS = (
    native.variants(LIBRARY)
    if LIBRARY is not None
    else [pytest.param("", marks=pytest.mark.skip(reason=f"no native kernels: {native.unavailable_reason()}"))]
)
FORMATS = [form for form in all_formats() if supports_int8(form)]
# one for each way in which a variant adds products: codes up to 15, 31, 63 and 255, and a table
WAYS = [
    weight_format(Codes.INT4, Scales.FLOAT16, Minima.NONE, 32),
    weight_format(Codes.INT5, Scales.NESTED, Minima.NESTED, 32),
    weight_format(Codes.INT6, Scales.NESTED, Minima.NONE, 16),
    weight_format(Codes.INT8, Scales.FLOAT32, Minima.ZERO_POINTS, 128),
    weight_format(Codes.INT4, Scales.FLOAT32, Minima.NONE, 32, E2M1),
]
SHAPES = [(96, 64), (70, 300), (65, 20)]
MANY = (1, 2, 3, 4, 5, 8, 16, 23, 31, 32, 33, 127, 128, 512)
QUARTERS = WeightFormat("quarters", Codes.INT4, 32, table=(0.25,) * 16)
WIDE = WeightFormat("wide", Codes.INT4, 32, table=(64.0, *(0.0,) * 15))


def by_name(form: object) -> str:
    return f"{form.name}{' table' * bool(form.table)}" if isinstance(form, WeightFormat) else str(form)


def normal_rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(7))


def structured_rows(inputs: int) -> torch.Tensor:
    """Rows that a random generator hardly makes: zeros, one number, ramps, ties of rounding, tiny and huge numbers."""
    rows = torch.zeros(12, inputs)
    rows[1, inputs // 2] = 3.0
    rows[2] = torch.arange(inputs)
    rows[3] = 127 - torch.arange(inputs) % 255  # every whole number is its own
    rows[4] = (torch.arange(inputs) % 254 - 126.5).clamp(-126.5, 127)  # ties, of groups whose scale is 1
    rows[4, ::16] = 127
    rows[5] = 1.0
    rows[6] = -1.0
    rows[7] = 1e34 * (1 - 2 * (torch.arange(inputs) % 2))
    rows[8] = 1e-45
    rows[9] = torch.arange(inputs) % 190 * 1e-45  # a denormal scale is so coarse that quotients exceed 127
    rows[10] = -0.0
    rows[11, -1] = 1.0
    return rows


def same_bits(found: torch.Tensor, expected: Floats) -> bool:
    return found.numpy().view(np.int32).tolist() == expected.view(np.int32).tolist()


def linear(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    return QuantizedLinear(weight_of(tensor), None, dtype, int8_rows=True)


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_has_the_reference_s_bits(variant: str, form: WeightFormat) -> None:
    for shape in SHAPES:
        tensor = random_tensor(form, *shape, ordered=shape[1] == 300)
        rows = torch.cat((normal_rows(21, shape[1]), structured_rows(shape[1])))
        with native.using_variant(variant), cores.computing(2, len(rows)):
            assert same_bits(linear(tensor)(rows), product(tensor, rows.numpy())), shape


@pytest.mark.parametrize("form", WAYS, ids=by_name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_codes_do_not_saturate(variant: str, form: WeightFormat) -> None:
    """All codes the largest, or the smallest, and all rows at their bounds: the greatest sums that there can be."""
    rows = torch.cat((torch.ones(3, 512), -torch.ones(3, 512), structured_rows(512)))
    for code in (0, {Codes.INT4: 15, Codes.INT5: 31, Codes.INT6: 63, Codes.INT8: 255}[form.codes]):
        tensor = random_tensor(form, 64, 512)
        tensor = replace(tensor, codes=torch.full_like(tensor.codes, code))
        with native.using_variant(variant), cores.computing(1, len(rows)):
            assert same_bits(linear(tensor)(rows), product(tensor, rows.numpy())), code


@pytest.mark.parametrize("form", WAYS, ids=by_name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_crowds_equal_each_row_alone(variant: str, form: WeightFormat) -> None:
    """At every number of rows, by one thread and by two, in bfloat16, with a bias."""
    tensor, bias = random_tensor(form, 96, 640), torch.randn(96)
    rows = torch.cat((structured_rows(640), normal_rows(max(MANY), 640))).bfloat16()
    with torch.inference_mode(), native.using_variant(variant):
        module = QuantizedLinear(weight_of(tensor), bias, torch.bfloat16, int8_rows=True)
        with cores.computing(1, len(rows)):
            whole = module(rows)
            assert torch.equal(whole, (torch.from_numpy(product(tensor, rows.float().numpy())) + bias).bfloat16())
            for count in MANY:
                for first in {0, count * 7 % (len(rows) - count + 1)}:
                    assert torch.equal(module(rows[first : first + count].clone()), whole[first : first + count])
        with cores.computing(2, len(rows)):
            assert torch.equal(module(rows), whole)


@pytest.mark.parametrize("form", WAYS, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_reaches_all_outputs(variant: str, dtype: torch.dtype, form: WeightFormat) -> None:
    """And no other row."""
    rows = normal_rows(40, 96).to(dtype)
    bad = {3: float("nan"), 17: float("inf"), 38: -float("inf")}
    broken = rows.clone()
    for row, value in bad.items():
        broken[row, row] = value
    with native.using_variant(variant), cores.computing(2, len(rows)):
        module = linear(random_tensor(form, 70, 96), dtype)
        right, out = module(rows), module(broken)
        for row in range(len(rows)):
            alone = module(broken[row : row + 1])
            if row in bad:
                assert out[row].isnan().all()
                assert alone.isnan().all()
            else:
                assert torch.equal(out[row], right[row])
                assert torch.equal(alone[0], right[row])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gated_product_is_its_two_products(variant: str) -> None:
    gate, up = (random_tensor(WAYS[1], 70, 256, seed=seed) for seed in (1, 2))
    rows = normal_rows(33, 256) / 16
    with native.using_variant(variant), cores.computing(2, len(rows)):
        module = QuantizedGated(weight_of(gate), weight_of(up, "up"), ("swish", ""), torch.float32, int8_rows=True)
        first, second = (torch.from_numpy(product(each, rows.numpy())) for each in (gate, up))
        torch.testing.assert_close(module(rows), functional.silu(first) * second, rtol=2e-5, atol=1e-6)


def test_rounded_rows_are_close_to_the_rows() -> None:
    """Within half a step of each group's scale."""
    rows = normal_rows(50, 256).numpy()
    scales, wholes = round_rows(rows, 32)
    differences = np.abs(wholes * scales[..., None].astype(np.float64) - rows.reshape(50, -1, 32))
    assert np.all(differences <= scales[..., None] * 0.500001)
    assert np.abs(wholes).max() == 127


@pytest.mark.skipif(LIBRARY is None, reason="no native kernels")
def test_int8_rows_are_a_wish_that_a_format_must_support() -> None:
    """Linear layers and experts; a format that has no such products keeps its own."""
    tensor = random_tensor(WAYS[0], 64, 64)
    fp8 = random_tensor(weight_format(Codes.FP8, Scales.FLOAT32, Minima.NONE, 128), 64, 64)
    experts = random_tensor(WAYS[0], 3, 64, 64)
    assert QuantizedMatrices([weight_of(tensor)], int8_rows=True).format.int8_rows
    assert not QuantizedMatrices([weight_of(tensor)], int8_rows=False).format.int8_rows
    assert not QuantizedMatrices([weight_of(fp8)]).format.int8_rows
    assert not QuantizedMatrices([weight_of(fp8)], int8_rows=True).format.int8_rows
    inner, down = quantized_experts([weight_of(experts)], weight_of(experts), torch.float32, int8_rows=True)
    assert inner.matrices.format.int8_rows
    assert down.matrices.format.int8_rows
    assert not QuantizedMatrices([weight_of(tensor)]).format.int8_rows


def test_only_whole_numbers_and_halves_are_supported() -> None:
    assert all(supports_int8(form) for form in WAYS)
    assert not supports_int8(QUARTERS)
    assert not supports_int8(WIDE)
    assert not supports_int8(weight_format(Codes.FP8, Scales.FLOAT32, Minima.NONE, 128))
