"""Quantization at load: how close it comes, beside llama.cpp's formats, and that it has the same bits everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.demo import model_path
from swarm.hub.headers import read_header
from swarm.stage import native
from swarm.stage.native.quantizing import quantize as quantize_natively
from swarm.stage.quantization import quantize as quantizer
from swarm.stage.quantization.at_load import INT4, INT6, INT8, PLAIN, TRANSPOSED, own_format
from swarm.stage.quantization.quantize import Quantize, quantize, read_and_quantize
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor, code_values

WIDTHS = (INT4, INT6, INT8)


def error(weights: torch.Tensor, result: torch.Tensor) -> float:
    return float((weights - result).double().pow(2).sum() / weights.double().pow(2).sum()) ** 0.5


def q4_0(weights: torch.Tensor) -> torch.Tensor:
    """llama.cpp's: the weight with the largest magnitude becomes -8."""
    groups = weights.reshape(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = largest / -8
    codes = (groups / scale + 8.5).trunc().clamp(0, 15)
    return ((codes - 8) * scale.half().float()).view_as(weights)


def q8_0(weights: torch.Tensor) -> torch.Tensor:
    groups = weights.reshape(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 127
    return ((groups / scale).round() * scale.half().float()).view_as(weights)


def samples() -> dict[str, torch.Tensor]:
    """Random weights with thin and thick tails, and a trained matrix."""
    chance = torch.Generator().manual_seed(7)
    normal = torch.randn(128, 512, generator=chance) * 0.02
    trained = load_file(model_path() / "model.safetensors")["model.layers.3.mlp.gate_proj.weight"].float()
    return {"normal": normal, "cubed": (normal * 50) ** 3 * 0.02, "trained": trained}


@pytest.mark.parametrize("name", samples())
def test_errors_are_smaller_than_those_of_llama_cpp(name: str) -> None:
    weights = samples()[name]
    ours = {
        width: error(weights, quantize(weights, own_format(width, 32)).dequantize(torch.float32)) for width in WIDTHS
    }
    assert ours[INT4] < 0.9 * error(weights, q4_0(weights))
    assert ours[INT8] < 0.98 * error(weights, q8_0(weights))
    assert ours[INT8] < 0.3 * ours[INT6] < 0.3 * 0.35 * ours[INT4]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", [32, 128])
def test_no_weight_is_further_off_than_two_steps(width: str, group: int) -> None:
    weights = samples()["normal"]
    result = quantize(weights, own_format(width, group)).dequantize(torch.float32)
    largest = weights.view(128, -1, group).abs().amax(-1).repeat_interleave(group, 1)
    steps = {INT4: 23 / 127, INT6: 2 / 31, INT8: 2 / 127}[
        width
    ]  # relative to the largest; at one end values are cut off
    assert bool(((weights - result).abs() <= steps * largest).all())


@pytest.mark.parametrize("width", WIDTHS)
def test_values_of_the_format_stay_as_they_are(width: str) -> None:
    """Quantizing what was quantized changes no weight, if a group has the value that a trial maps the largest to."""
    form = own_format(width, 32)
    values = code_values(form)[torch.linspace(0, {INT4: 15, INT6: 63, INT8: 255}[width], 32).long()]
    weights = (values * 0.25).expand(4, 32)
    assert error(weights, quantize(weights, form).dequantize(torch.float32)) < 2**-11  # what float16 scales leave


@dataclass(frozen=True)
class Digest:
    codes: int
    scales: int


def digest(width: str, quantize: Quantize = quantize) -> Digest:
    """Of weights that are computed by integers only, so that they are the same everywhere."""
    numbers = torch.arange(64 * 256, dtype=torch.int64)
    mixed = (numbers * 2654435761 + 12345) % 65521 * ((numbers * 40503) % 251 + 1)
    weights = ((mixed % 20011) - 10005).float() / 4096
    result = quantize(weights.view(64, 256), own_format(width, 32))
    powers = torch.arange(1, result.codes.numel() + 1, dtype=torch.int64)
    bits = result.scales.view(torch.int16).to(torch.int64).flatten()
    return Digest(
        int((result.codes.flatten().to(torch.int64) * powers).sum() % 1000003),
        int((bits * powers[: len(bits)]).sum() % 1000003),
    )


EXPECTED = {
    INT4: Digest(codes=652844, scales=269049),
    INT6: Digest(codes=457203, scales=321787),
    INT8: Digest(codes=181020, scales=592040),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_are_those_of_every_processor(width: str, threads: int) -> None:
    """Computed once; a processor, a version of torch or a number of threads with other bits would differ from it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert digest(width) == EXPECTED[width]
    finally:
        torch.set_num_threads(before)


needs_kernels = pytest.mark.skipif(native.library() is None, reason="needs our kernels")


def is_same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Whether two matrices have the same bits, those of scales that are no numbers included."""
    scales = torch.equal(one.scales.view(torch.int16), other.scales.view(torch.int16))
    return scales and torch.equal(one.codes, other.codes) and one.format == other.format


@needs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_every_variant_of_our_kernels_has_those_bits(width: str) -> None:
    opened = native.library()
    assert opened is not None
    for name in native.variants(opened):
        with native.using_variant(name):
            assert digest(width, quantize_natively) == EXPECTED[width], name


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", [16, 32, 128])
def test_our_kernels_quantize_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, width: str, group: int, dtype: torch.dtype
) -> None:
    """Weights of all sizes, short last groups, numbers that are too large or too small for float16, and no numbers."""
    chance = torch.Generator().manual_seed(5)
    weights = torch.randn(96, 2, 200, generator=chance) * torch.logspace(-44, 37, 96).view(-1, 1, 1)
    weights[40], weights[41, 0, 3], weights[42, 1, 7], weights[43, 0, 199] = 0, torch.nan, torch.inf, -torch.inf
    weights, form = weights.to(dtype), own_format(width, group)
    expected = quantize(weights, form)
    assert is_same(quantize_natively(weights, form), expected)
    monkeypatch.setattr("swarm.stage.native.quantizing._PIECE", 1000)
    assert is_same(quantize_natively(weights, form), expected)
    with native.disabled("to compare"):
        assert is_same(quantize_natively(weights, form), expected)


@needs_kernels
def test_our_kernels_quantize_a_transposed_matrix() -> None:
    weights, form = samples()["normal"], own_format(INT4, 32)
    assert is_same(quantize_natively(weights.t().contiguous().t(), form), quantize(weights, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A row has the same codes alone and among others."""
    weights, form = samples()["normal"].to(dtype), own_format(INT4, 32)
    whole = quantize(weights, form)
    monkeypatch.setattr(quantizer, "_PIECE", 1024)
    pieces, row = quantize(weights, form), quantize(weights[5:6], form)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scales, pieces.scales)
    assert torch.equal(whole.codes[5:6], row.codes)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_last_group_may_be_short(width: str) -> None:
    weights, form = samples()["normal"][:, :80], own_format(width, 32)
    result = quantize(weights, form)
    assert result.codes.shape == (128, 80)
    assert result.scales.shape == (128, 3)
    whole = quantize(weights[:, :64], form)
    assert torch.equal(result.codes[:, :64], whole.codes)
    assert error(weights[:, 64:], result.dequantize(torch.float32)[:, 64:]) < 0.08


@pytest.mark.parametrize("width", WIDTHS)
def test_zeros_stay_near_zero_and_what_is_not_finite_shows(width: str) -> None:
    weights = samples()["normal"][:4].clone()
    weights[0] = 0
    weights[1, 3], weights[1, 70], weights[2, 5] = torch.nan, torch.inf, -torch.inf
    result = quantize(weights, own_format(width, 32)).dequantize(torch.float32)
    assert bool((result[0] == 0).all())
    bad = torch.isnan(result).view(4, -1, 32).all(-1)
    assert bad[1].nonzero().flatten().tolist() == [0, 2]
    assert bad[2].nonzero().flatten().tolist() == [0]
    assert bool(torch.isfinite(result[3]).all())


def test_a_transposed_tensor_is_quantized_along_its_inputs(tmp_path: Path) -> None:
    experts = samples()["normal"].view(2, 64, 512)
    save_file({"plain": experts, "turned": experts.transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    stored = {tensor.name: tensor for tensor in read_header(tmp_path / "model.safetensors")}
    plain, turned = (
        read_and_quantize(StoredWeight(name, own_format(INT4, 32), (2, 64, 512), encoding, {"weight": stored[name]}))
        for name, encoding in (("plain", PLAIN), ("turned", TRANSPOSED))
    )
    assert torch.equal(plain.codes, turned.codes)
    assert torch.equal(plain.scales, turned.scales)
