"""AWQ, FP8 and MXFP4 files: weights as other people's code reads them; what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.quantization.blocks import decode_exponents
from swarm.stage.quantization.decoding import read_stored
from swarm.stage.quantization.formats import Scales
from swarm.stage.quantization.search import find_quantized, read_quantization
from tests.files_of_models import TINY_CONFIG, as_file, safetensors
from tests.quantized_files import Tensors, awq_tensors, decode, find, header, mxfp4_tensors, random_codes

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def make_awq(outputs: int = 24, inputs: int = 256, group: int = 128) -> tuple[Tensors, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    codes, groups = random_codes(chance, 4, outputs, inputs), inputs // group if group > 0 else 1
    zeros, scales = random_codes(chance, 4, groups, outputs), torch.rand(groups, outputs, generator=chance).half()
    each_input = torch.arange(inputs) // (group if group > 0 else inputs)
    return awq_tensors("m", codes, scales, zeros), (scales[each_input] * (codes.T - zeros[each_input])).T


@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_awq_gives_the_weights_of_the_formula(tmp_path: Path, group: int) -> None:
    tensors, expected = make_awq(group=group)
    matrix = decode(tmp_path / "m", AWQ | {"group_size": group}, tensors)
    assert torch.equal(matrix.dequantize(torch.float16), expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"version": "gemv"}, "layout 'gemv'"),
        ({"version": "marlin"}, "layout 'marlin'"),
        ({"bits": 8}, "AWQ with 8 bits"),
        ({"group_size": 64}, "m.scales with shape"),
        ({"group_size": "128"}, "group_size = '128' instead of an integer"),
    ],
)
def test_awq_that_is_not_supported_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as error:
        find(tmp_path / "m", AWQ | settings, make_awq()[0])
    assert reason in str(error.value)


@pytest.mark.parametrize("shape", [(256, 384), (4, 128, 256)])
@pytest.mark.parametrize("fmt", ["float", "ue8m0"])
def test_fp8_blocks_as_transformers_writes_and_reads_them(tmp_path: Path, shape: tuple[int, ...], fmt: str) -> None:
    chance = torch.Generator().manual_seed(1)
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt=fmt))
    written = Fp8Quantize(quantizer).convert({"m.weight": torch.randn(*shape, generator=chance)})
    expected = Fp8Dequantize(quantizer)._dequantize_one(*written.values(), torch.float32)
    matrix = decode(tmp_path / "m", FP8, written)
    assert matrix.format.scales is (Scales.FLOAT32 if fmt == "float" else Scales.BFLOAT16)
    assert torch.equal(matrix.dequantize(torch.float32), expected)


@pytest.mark.parametrize(
    ("scales", "rows", "columns"),
    [((2, 3), 128, 128), ((), 200, 300), ((1,), 200, 300), ((1, 1), 200, 300), ((200,), 1, 300), ((200, 1), 1, 300)],
)
@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_of_every_shape(
    tmp_path: Path, *, scales: tuple[int, ...], rows: int, columns: int, ending: str, dtype: torch.dtype
) -> None:
    """Blocks at the end may be incomplete, in both directions."""
    chance = torch.Generator().manual_seed(1)
    numbers = torch.randn(200, 300, generator=chance).to(torch.float8_e4m3fn)
    factors = torch.rand(scales, generator=chance).to(dtype)
    matrix = decode(tmp_path / "m", FP8, {"m.weight": numbers, f"m.{ending}": factors, "m.input_scale": factors.sum()})
    whole = factors.reshape(-(-200 // rows), -(-300 // columns))
    whole = whole.repeat_interleave(rows, 0)[:200].repeat_interleave(columns, 1)[:, :300]
    assert torch.equal(matrix.dequantize(torch.float32), numbers.float() * whole.float())


def test_one_scale_for_each_expert(tmp_path: Path) -> None:
    numbers = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 3.0, 0.1])
    expected = numbers.float() * scales[:, None, None]
    tensors = {"experts.down_proj": numbers, "experts.down_proj_scale": scales}
    assert torch.equal(decode(tmp_path / "m", FP8, tensors).dequantize(torch.float32), expected)


def test_mxfp8(tmp_path: Path) -> None:
    numbers = torch.randn(24, 96, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    exponents = torch.arange(120, 192, dtype=torch.uint8).reshape(24, 3)
    tensors = {"m.weight": numbers, "m.weight_scale_inv": exponents}
    expected = numbers.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    matrix = decode(tmp_path / "m", {"quant_method": "mxfp8"}, tensors)
    assert torch.equal(matrix.dequantize(torch.float32), expected)


def test_all_powers_of_two_are_exact() -> None:
    powers = decode_exponents(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert powers[:255].tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]
    assert bool(powers[255].isnan())


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"m.weight": torch.zeros(4, 32, dtype=torch.float8_e5m2), "m.weight_scale": torch.ones(1)}, "as F8_E5M2"),
        ({"m.weight": torch.zeros(4, 32, dtype=torch.float8_e4m3fn)}, "no m.weight_scale_inv"),
        ({"m.weight": torch.zeros(4, dtype=torch.float8_e4m3fn)}, "not a matrix"),
        (
            {"m.weight": torch.zeros(4, 32, dtype=torch.float8_e4m3fn), "m.weight_scale": torch.ones(3)},
            "m.weight_scale with shape [3] instead of [4] or [4, 1] or [1] or [1, 1] or []",
        ),
        (
            {"m.weight": torch.zeros(4, 32, dtype=torch.float8_e4m3fn), "m.weight_scale": torch.ones(1).int()},
            "m.weight_scale as I32",
        ),
        ({"m.weight": torch.zeros(4, 32)}, "no tensor is quantized"),
    ],
)
def test_contradictory_fp8_is_one_error(tmp_path: Path, tensors: Tensors, reason: str) -> None:
    with pytest.raises(ModelError) as error:
        find(tmp_path / "m", FP8, tensors)
    assert reason in str(error.value)


def make_mxfp4(experts: int = 3, outputs: int = 20, groups: int = 4) -> Tensors:
    chance = torch.Generator().manual_seed(1)
    exponents = torch.randint(110, 140, (experts, outputs, groups), generator=chance)
    return mxfp4_tensors("experts.down_proj", random_codes(chance, 4, experts, outputs, 32 * groups), exponents)


def test_mxfp4_as_transformers_reads_it(tmp_path: Path) -> None:
    """Transformers transposes the matrices."""
    tensors = make_mxfp4() | {"experts.down_proj_bias": torch.zeros(3, 20)}
    expected = convert_moe_packed_tensors(tensors["experts.down_proj_blocks"], tensors["experts.down_proj_scales"])
    found, rest = find_quantized(MXFP4, header(tmp_path / "m", tensors))
    assert set(rest) == {"experts.down_proj_bias"}
    weights = read_stored(found["experts.down_proj"]).dequantize(torch.bfloat16)
    assert torch.equal(weights, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("experts.down_proj_scales", torch.zeros(3, 20, 3, dtype=torch.uint8)),
        ("experts.down_proj_scales", torch.zeros(3, 20, 4)),
        ("experts.down_proj_blocks", torch.zeros(3, 20, 8, 8, dtype=torch.uint8)),
        ("experts.down_proj_blocks", torch.zeros(3, 20, dtype=torch.uint8)),
        ("experts.up_proj_blocks", torch.zeros(3, 20, 4, 16, dtype=torch.uint8)),
        ("experts.down_proj_blocks", torch.zeros(3, 20, 56, dtype=torch.uint8)),
    ],
)
def test_contradictory_mxfp4_is_one_error(tmp_path: Path, name: str, changed: torch.Tensor) -> None:
    with pytest.raises(ModelError, match=name.removesuffix("_blocks")):
        find(tmp_path / "m", MXFP4, make_mxfp4() | {name: changed})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "nvfp4"}, "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "NVIDIA ModelOpt"),
        ({"quant_method": "exl3"}, "EXL3"),
        ({"quant_method": "something-new"}, "something-new"),
        ({"bits": 4, "group_size": 64}, "no quant_method"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ([], "no model.safetensors"),
        ("fp8", "not an object"),
    ],
)
def test_formats_that_are_not_supported_are_refused_by_name(tmp_path: Path, settings: Any, name: str) -> None:
    """They are refused before any weight file is opened."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | {"quantization_config": settings}))
    with pytest.raises(ModelError) as error:
        Checkpoint(tmp_path)
    assert name in str(error.value)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("F4", 8), ("F6_E2M3", 12), ("F8_E5M2", 16), ("F2_NEW", 4)])
def test_numbers_of_other_widths_are_refused_by_name(tmp_path: Path, dtype: str, num_bytes: int) -> None:
    entries = {
        f"model.layers.{layer}.q.weight": {
            "dtype": dtype,
            "shape": [4, 4],
            "data_offsets": [layer * num_bytes, (layer + 1) * num_bytes],
        }
        for layer in range(2)
    }
    (tmp_path / "model.safetensors").write_bytes(as_file(entries, 2 * num_bytes))
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    with pytest.raises(ModelError, match=rf"as {dtype}, which is not supported; use the original files"):
        Checkpoint(tmp_path)


def test_settings_may_have_other_places(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}

    def read(config: dict[str, Any]) -> Any:
        return read_quantization(tmp_path, config, lambda path: json.loads(path.read_text()))

    assert read({}) == ({}, None)
    assert read({"compression_config": settings}) == (settings, None)
    assert read({"text_config": {"quantization_config": settings}}) == (settings, None)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        (tmp_path / name).write_text('{"bits": 4, "group_size": 128}')
        assert read({}) == (settings | {"quant_method": method}, tmp_path / name)
        assert read({"quantization_config": settings}) == (settings, None)
        (tmp_path / name).unlink()
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="NVIDIA ModelOpt"):
        read({})
    with pytest.raises(ModelError, match="MLX"):
        read({"quantization": {"bits": 4}, "quantization_config": {"bits": 4, "group_size": 64}})


def test_quantized_matrices_without_settings_are_refused(tmp_path: Path) -> None:
    for tensors in (make_awq()[0], make_mxfp4(), {"m.weight": torch.zeros(4, 4, dtype=torch.uint8)}):
        with pytest.raises(ModelError, match=r"of a quantized matrix, which config\.json does not describe"):
            find(tmp_path / "m", {}, tensors)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["bits", "group_size", "sym", "dynamic", "version", "format", "checkpoint_format", "config_groups", "targets"]
KEYS += ["weights", "num_bits", "type", "strategy", "block_structure", "symmetric", "weight_block_size", "ignore"]
SETTINGS = st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))


@examples(max_examples=200, deadline=None)
@given(settings=SETTINGS, method=st.sampled_from(["gptq", "awq", "compressed-tensors", "fp8", "mxfp4"]))
def test_settings_that_are_nonsense_are_one_error(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], method: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "nonsense"
    tensors = make_awq()[0] | make_mxfp4() | {"n.weight": torch.zeros(8, 32, dtype=torch.float8_e4m3fn)}
    tensors |= {"n.weight_scale": torch.ones(1), "o.weight_packed": torch.zeros(8, 4, dtype=torch.int32)}
    stored = header(path, tensors | {"o.weight_scale": torch.ones(8, 1)})
    with pytest.raises(ModelError):
        find_quantized(settings | {"quant_method": method}, stored)


def test_a_plain_checkpoint_has_no_quantized_matrices(tmp_path: Path) -> None:
    names = ("embed.weight", "model.layers.0.q", "model.layers.1.q", "head.weight")
    (tmp_path / "model.safetensors").write_bytes(safetensors(*names))
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.quantized, tuple(checkpoint.tensors)) == ({}, names)


def test_a_file_of_settings_is_part_of_the_models_identity(tmp_path: Path) -> None:
    """Workers with other settings for the same codes have other weights."""
    layers = {f"model.layers.{layer}.q.{part}": tensor for layer in range(2) for part, tensor in make_layer().items()}
    header(tmp_path / "model.safetensors", layers | {"embed.weight": torch.zeros(4, 4)})
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    digests = set()
    for group in (128, 256):
        (tmp_path / "quant_config.json").write_text(json.dumps({"q_group_size": group, "w_bit": 4, "version": "GEMM"}))
        checkpoint = Checkpoint(tmp_path)
        assert {weight.block for weight in checkpoint.quantized.values()} == {(1, group)}
        digests.add(checkpoint.manifest("float32").files)
    assert len(digests) == 2


def make_layer() -> Tensors:
    """Return the parts of an AWQ matrix with one group."""
    return {name.removeprefix("m."): tensor for name, tensor in make_awq(inputs=128)[0].items()}
