"""compressed-tensors: files that its own compressors write give the weights that its own decompressors give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from swarm.errors import ModelError
from swarm.stage.quantization.contents import check_contents
from swarm.stage.quantization.decoding import read_stored
from swarm.stage.quantization.search import find_quantized
from tests.quantized_files import Tensors, decode, find, group_index, header, pack_words, random_codes

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def settings_of(weights: dict[str, Any], layout: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        **more,
    }


def compress(
    layout: str, weights: dict[str, Any], outputs: int = 48, inputs: int = 512
) -> tuple[Tensors, torch.Tensor]:
    """Return a module's tensors as the library writes them, and the weights that it reads from them."""
    chance = torch.Generator().manual_seed(1)
    rows, columns = {
        "tensor": (1, 1),
        "channel": (outputs, 1),
        "group": (outputs, -(-inputs // (weights.get("group_size") or 1))),
        "block": (-(-outputs // 128), -(-inputs // 128)),
    }[weights["strategy"]]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {
        "weight": torch.randn(outputs, inputs, generator=chance),
        "weight_scale": (torch.rand(rows, columns, generator=chance) + 0.1) / 4,
    }
    if weights["strategy"] == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if weights["type"] == "float" and weights["num_bits"] == 4:
        state["weight_scale"] = torch.exp2(torch.randint(-3, 3, (rows, columns), generator=chance).float())
    if not weights["symmetric"]:
        half = 1 << (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, (rows, columns), generator=chance).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    assert stored["weight_scale"].dtype in (torch.float32, torch.uint8)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    return {f"m.{name}": tensor for name, tensor in stored.items()}, expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
def test_packed_integers(tmp_path: Path, bits: int, symmetric: bool, group: int | None) -> None:
    weights = INT4 | {"num_bits": bits, "symmetric": symmetric, "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    tensors, expected = compress("pack-quantized", weights)
    matrix = decode(tmp_path / "m", settings_of(weights), tensors)
    check_near(matrix.dequantize(torch.float32), expected, exact=symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_plain_integers(tmp_path: Path, strategy: str, symmetric: bool) -> None:
    weights = INT8 | {"strategy": strategy, "symmetric": symmetric, "group_size": None}
    weights |= {"group": {"group_size": 64}, "block": {"block_structure": [128, 128]}}.get(strategy, {})
    tensors, expected = compress("int-quantized", weights, outputs=256)
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    settings = settings_of(weights, "int-quantized")
    settings["config_groups"]["group_0"]["input_activations"] = activations
    check_near(decode(tmp_path / "m", settings, tensors).dequantize(torch.float32), expected, exact=symmetric)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("tensor", {}),
        ("channel", {}),
        ("block", {"block_structure": [128, 128]}),
        ("group", {"group_size": 128}),
    ],
)
def test_floats_of_eight_bits(tmp_path: Path, strategy: str, more: dict[str, Any]) -> None:
    weights = FP8 | {"strategy": strategy} | more
    tensors, expected = compress("float-quantized", weights, outputs=384)
    tensors["m.input_scale"] = torch.ones(1)
    stored = header(tmp_path / "m", tensors)
    found, rest = find_quantized(settings_of(weights, "float-quantized"), stored)
    assert not rest
    assert torch.equal(read_stored(found["m.weight"]).dequantize(torch.float32), expected)


def test_floats_of_four_bits(tmp_path: Path) -> None:
    tensors, expected = compress("mxfp4-pack-quantized", MXFP4)
    matrix = decode(tmp_path / "m", settings_of(MXFP4, "mxfp4-pack-quantized"), tensors)
    assert torch.equal(matrix.dequantize(torch.bfloat16), expected.to(torch.bfloat16))


def check_near(weights: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Compare with the library's weights, which are rounded in another place if there are zero points."""
    if exact:
        assert torch.equal(weights, expected)
    else:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)


def ordered_module(chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, g_idx = random_codes(chance, 4, 24, 256), group_index(256, 128, chance)
    scales = torch.rand(24, 2, generator=chance).to(torch.bfloat16)
    tensors = {
        "m.weight_packed": pack_words(codes, 4),
        "m.weight_scale": scales,
        "m.weight_g_idx": g_idx,
        "m.weight_shape": torch.tensor([24, 256]),
    }
    return tensors, (codes - 8) * scales[:, g_idx.long()]


def test_inputs_in_the_order_of_their_activations(tmp_path: Path) -> None:
    tensors, expected = ordered_module(torch.Generator().manual_seed(1))
    settings = settings_of(INT4 | {"actorder": "group"})
    assert torch.equal(decode(tmp_path / "m", settings, tensors).dequantize(torch.bfloat16), expected)
    tensors["m.weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)  # a version's initial value
    assert decode(tmp_path / "n", settings, tensors).order is None


def test_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    weights = INT4 | {"symmetric": False}
    tensors, expected = compress("pack-quantized", weights)
    packed = decode(tmp_path / "m", settings_of(weights), tensors)
    assert packed.minima is not None
    tensors["m.weight_zero_point"] = (packed.minima.to(torch.int16) - 8).to(torch.int8)
    check_near(decode(tmp_path / "n", settings_of(weights), tensors).dequantize(torch.float32), expected, exact=False)


def test_the_closest_target_decides(tmp_path: Path) -> None:
    """A module's name precedes a pattern, and that a class."""
    first, expected = compress("pack-quantized", INT4)
    second, others = compress("pack-quantized", INT4 | {"num_bits": 8})
    tensors = first | {name.replace("m.", "model.n.", 1): tensor for name, tensor in second.items()}
    settings = settings_of(INT4 | {"num_bits": 2})
    settings["config_groups"] |= {
        "group_1": {"targets": ["re:.*m"], "weights": INT4 | {"num_bits": 8}},
        "group_2": {"targets": ["m"], "weights": INT4},
        "group_3": {"targets": ["other", "model.n"], "weights": INT4 | {"num_bits": 8}},
    }
    found = find(tmp_path / "m", settings, tensors)
    assert torch.equal(read_stored(found["m.weight"]).dequantize(torch.float32), expected)
    assert torch.equal(read_stored(found["model.n.weight"]).dequantize(torch.float32), others)


def test_ignored_modules_stay_plain(tmp_path: Path) -> None:
    tensors, _ = compress("pack-quantized", INT4)
    stored = header(tmp_path / "m", tensors | {"lm_head.weight": torch.zeros(4, 4)})
    found, rest = find_quantized(settings_of(INT4, ignore=["lm_head"]), stored)
    assert (set(found), set(rest)) == ({"m.weight"}, {"lm_head.weight"})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (settings_of(INT4, "nvfp4-pack-quantized"), "nvfp4-pack-quantized is not supported"),
        (settings_of(INT4, "marlin-24"), "marlin-24 is not supported"),
        (settings_of(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask is not supported"),
        (settings_of(INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported"),
        (settings_of(INT4, transform_config={"config_groups": {"u": {}}}), "transform_config is not supported"),
        (settings_of(INT4 | {"num_bits": 3}), "packed with 3 bits"),
        (settings_of(INT4 | {"type": "float"}), "that are not MXFP4"),
        (settings_of(INT4 | {"strategy": "attn_head"}), "one scale per attn_head"),
        (settings_of(INT4 | {"group_size": 64}), "m.weight_scale with shape"),
        (settings_of(INT4, config_groups={}), "no config_groups"),
        (settings_of(INT4, config_groups={"W4A16": ["Linear"]}), "W4A16 that is not an object"),
        (settings_of(INT4, config_groups={"a": {"targets": ["n"], "weights": INT4}}), "no config_groups of"),
        (settings_of(INT4, config_groups={"a": {"targets": [4], "weights": INT4}}), "not a list of texts"),
        (settings_of(INT4, config_groups={"a": {"targets": ["re:("], "weights": INT4}}), "invalid pattern"),
        (settings_of(INT4, config_groups={"a": {"targets": ["m"], "weights": None}}), "have no weights"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    tensors, _ = compress("pack-quantized", INT4)
    with pytest.raises(ModelError) as error:
        find(tmp_path / "m", settings, tensors)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("m.weight_packed", torch.zeros(47, 64, dtype=torch.int32)),
        ("m.weight_packed", torch.zeros(48, 64)),
        ("m.weight_packed", torch.zeros(48, dtype=torch.int32)),
        ("m.weight_scale", torch.zeros(48, 5)),
        ("m.weight_scale", torch.zeros(48, 4, dtype=torch.int32)),
        ("m.weight_g_idx", torch.zeros(7, dtype=torch.int32)),
        ("m.weight_shape", torch.zeros(3, dtype=torch.int64)),
        ("m.weight", torch.zeros(48, 512)),
        ("n.weight_scale", torch.zeros(48, 4)),
        ("m.weight_global_scale", torch.zeros(1)),
    ],
)
def test_a_contradictory_file_is_one_error(tmp_path: Path, name: str, changed: torch.Tensor) -> None:
    tensors, _ = compress("pack-quantized", INT4)
    with pytest.raises(ModelError, match=str(tmp_path / "m")):
        find(tmp_path / "m", settings_of(INT4), tensors | {name: changed})


def test_a_shape_that_contradicts_the_codes_is_one_error(tmp_path: Path) -> None:
    tensors, _ = compress("pack-quantized", INT4)
    tensors["m.weight_shape"] = torch.tensor([48, 511])
    with pytest.raises(ModelError, match=r"m\.weight_shape = \(48, 511\)"):
        decode(tmp_path / "m", settings_of(INT4), tensors)


def test_packed_floats_fill_whole_blocks(tmp_path: Path) -> None:
    tensors = {
        "m.weight_packed": torch.zeros(8, 24, dtype=torch.uint8),
        "m.weight_scale": torch.zeros(8, 2, dtype=torch.uint8),
    }
    with pytest.raises(ModelError, match="48 inputs, but MXFP4 has blocks of 32"):
        find(tmp_path / "m", settings_of(MXFP4, "mxfp4-pack-quantized"), tensors)


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("zero", [0, 1])
def test_zero_points_of_a_symmetric_matrix_are_compared(tmp_path: Path, layout: str, zero: int) -> None:
    """Some versions store them, all in the middle. Others contradict the configuration."""
    weights = (INT4 if layout == "packed" else INT8) | {"group_size": 128, "strategy": "group"}
    tensors, expected = compress("pack-quantized" if layout == "packed" else "int-quantized", weights)
    zeros = torch.zeros(48, 4, dtype=torch.int8)
    zeros[40, 1] = zero
    packed = pack_words(zeros.T + 8, 4).T if layout == "packed" else zeros
    for path, stored in (("unpacked", zeros), ("packed", packed)):
        changed = tensors | {"m.weight_zero_point": stored}
        found = find(tmp_path / path, settings_of(weights), changed)
        if zero:
            with pytest.raises(ModelError, match=r"zero points in m\.weight_zero_point, .* symmetric = true"):
                check_contents(found.values())
            with pytest.raises(ModelError, match=r"symmetric = true"):
                read_stored(found["m.weight"])
        else:
            check_contents(found.values())
            assert torch.equal(read_stored(found["m.weight"]).dequantize(torch.float32), expected)


def test_contradictions_are_found_before_codes_are_read(tmp_path: Path) -> None:
    """Only the small parts are read. A part that is not on this machine is checked when it is."""
    tensors, _ = ordered_module(torch.Generator().manual_seed(1))
    settings = settings_of(INT4 | {"actorder": "group"})
    check_contents(find(tmp_path / "right", settings, tensors).values())
    for name, changed, why in (
        ("m.weight_shape", torch.tensor([24, 255]), r"= \(24, 255\).* whole words"),
        ("m.weight_g_idx", torch.zeros(256, dtype=torch.int32), "use files without desc_act"),
    ):
        found = find(tmp_path / name, settings, tensors | {name: changed})
        with pytest.raises(ModelError, match=why):
            check_contents(found.values())
        (tmp_path / name).unlink()
        check_contents(found.values())
