"""GPTQ files: every variant of the layout gives the weights of its documentation, and contradictions one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from swarm.errors import ModelError
from swarm.stage.quantization.contents import check_contents
from swarm.stage.quantization.decoding import open_stored, read_stored
from swarm.stage.quantization.formats import Minima, Scales
from swarm.stage.quantization.search import find_quantized
from tests.quantized_files import Tensors, decode, find, gptq_tensors, group_index, header, random_codes


def settings_of(group: int = 128, *, bits: int = 4, sym: bool = True, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, **more}


def make(
    outputs: int = 24,
    inputs: int = 256,
    group: int = 128,
    *,
    bits: int = 4,
    sym: bool = True,
    version: int = 1,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensors, torch.Tensor]:
    """Return a module's tensors, and its weights by the formula of the format, in the scales' dtype."""
    chance = torch.Generator().manual_seed(1)
    codes = random_codes(chance, bits, outputs, inputs)
    g_idx = group_index(inputs, group, chance if ordered else None)
    groups = int(g_idx.max()) + 1
    scales = (torch.rand(groups, outputs, generator=chance) + 0.1).to(dtype)
    zeros = torch.full((groups, outputs), 1 << (bits - 1)) if sym else random_codes(chance, bits, groups, outputs)
    weights = (scales[g_idx.long()] * (codes.T - zeros[g_idx.long()])).T
    return gptq_tensors("m", codes, scales, zeros, g_idx, bits=bits, version=version), weights


@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 192, 256, 512, -1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_every_size_of_groups_gives_the_weights_of_the_formula(
    tmp_path: Path, group: int, sym: bool, ordered: bool
) -> None:
    tensors, weights = make(inputs=1536, group=group, sym=sym, ordered=ordered)
    matrix = decode(tmp_path / "m", settings_of(group, sym=sym, desc_act=ordered), tensors)
    assert torch.equal(matrix.dequantize(torch.float16), weights)
    assert (matrix.order is not None) == (ordered and group != -1)
    assert (matrix.minima is None) == sym


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
def test_both_versions_store_other_zero_points(tmp_path: Path, bits: int, version: int, sym: bool) -> None:
    """Zero points of 0 are among them: stored less one, they borrow from the next code."""
    tensors, weights = make(bits=bits, version=version, sym=sym)
    layout = "gptq" if version == 1 else "gptq_v2"
    matrix = decode(tmp_path / "m", settings_of(bits=bits, sym=sym, checkpoint_format=layout), tensors)
    assert torch.equal(matrix.dequantize(torch.float16), weights)
    if sym:
        other = "gptq_v2" if version == 1 else "gptq"
        with pytest.raises(ModelError, match="declares sym = true"):
            decode(tmp_path / "m", settings_of(bits=bits, checkpoint_format=other), tensors)
        with pytest.raises(ModelError, match="declares sym = true"):
            check_contents(find(tmp_path / "m", settings_of(bits=bits, checkpoint_format=other), tensors).values())
        check_contents(find(tmp_path / "m", settings_of(bits=bits, checkpoint_format=layout), tensors).values())


@examples(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 400),
    group=st.sampled_from([16, 32, 48, 64, 96, 128, 160, 192, 256, 1 << 20, (1 << 31) - 1, -1]),
    bits=st.sampled_from([4, 8]),
    ordered=st.booleans(),
)
def test_odd_sizes(tmp_path: Path, *, outputs: int, inputs: int, group: int, bits: int, ordered: bool) -> None:
    """Words and groups at the end may be incomplete."""
    tensors, weights = make(outputs, inputs, group, bits=bits, sym=False, ordered=ordered)
    matrix = decode(tmp_path / "m", settings_of(group, bits=bits, sym=False), tensors)
    assert matrix.codes.shape == (outputs, inputs)
    assert matrix.scales.shape == (outputs, -(-inputs // matrix.format.group))
    assert torch.equal(matrix.dequantize(torch.float16), weights)


@pytest.mark.parametrize(("inputs", "group"), [(160, 160), (160, 192), (160, (1 << 31) - 1), (300, 400), (129, 144)])
def test_one_group_of_all_inputs_is_every_group_of_the_kernels(tmp_path: Path, inputs: int, group: int) -> None:
    """A group that is at least as large as the inputs, and no multiple of 128."""
    tensors, weights = make(8, inputs, group, sym=False)
    matrix = decode(tmp_path / "m", settings_of(group, sym=False), tensors)
    assert matrix.minima is not None
    assert matrix.scales.shape == matrix.minima.shape == (8, -(-inputs // 128))
    assert torch.equal(matrix.dequantize(torch.float16), weights)


@pytest.mark.parametrize(("dtype", "scales"), [(torch.bfloat16, Scales.BFLOAT16), (torch.float32, Scales.FLOAT32)])
def test_scales_stay_as_they_are(tmp_path: Path, dtype: torch.dtype, scales: Scales) -> None:
    tensors, weights = make(dtype=dtype)
    matrix = decode(tmp_path / "m", settings_of(), tensors)
    assert matrix.format.scales is scales
    assert torch.equal(matrix.dequantize(dtype), weights)


def test_matrices_with_the_same_order_of_inputs_have_the_same_key(tmp_path: Path) -> None:
    first, _ = make(ordered=True)
    second, _ = make(outputs=8, ordered=True)
    third, _ = make(ordered=False)
    tensors = first | {name.replace("m.", "n.", 1): each for name, each in third.items()}
    tensors |= {"o.qweight": second["m.qweight"], "o.qzeros": second["m.qzeros"], "o.scales": second["m.scales"]}
    tensors["o.g_idx"] = first["m.g_idx"].clone()
    keys = {
        name: open_stored(each, "").order_key for name, each in find(tmp_path / "m", settings_of(), tensors).items()
    }
    assert keys["m.weight"] == keys["o.weight"] != ""
    assert not keys["n.weight"]


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    tensors, _ = make(ordered=True)
    tensors["m.g_idx"][tensors["m.g_idx"].argmax()] = 0
    with pytest.raises(ModelError, match="use files without desc_act"):
        decode(tmp_path / "m", settings_of(), tensors)


def test_a_file_without_g_idx_has_the_inputs_in_their_own_order(tmp_path: Path) -> None:
    tensors, weights = make()
    del tensors["m.g_idx"]
    assert torch.equal(decode(tmp_path / "m", settings_of(), tensors).dequantize(torch.float16), weights)


def test_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    tensors, weights = make(bits=8, group=32)
    dynamic = {"-:.*lm_head.*": {}, r"+:.*\bm\b": {"bits": 8, "group_size": 32}, "m": {"bits": 2}}
    matrix = decode(tmp_path / "m", settings_of(dynamic=dynamic), tensors)
    assert torch.equal(matrix.dequantize(torch.float16), weights)


def test_a_module_that_was_not_converted_stays_plain(tmp_path: Path) -> None:
    tensors, _ = make()
    stored = header(tmp_path / "m", tensors | {"gate.weight": torch.zeros(4, 4), "m.bias": torch.zeros(24)})
    weights, rest = find_quantized(settings_of(modules_in_block_to_quantize=[["m"]]), stored)
    assert list(weights) == ["m.weight"]
    assert set(rest) == {"gate.weight", "m.bias"}
    assert weights["m.weight"].format.minima is Minima.NONE


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bits": 3}, "GPTQ with 3 bits"),
        ({"bits": None}, "bits = None instead of an integer"),
        ({"bits": True}, "bits = True instead of an integer"),
        ({"sym": "yes"}, "sym = 'yes' instead of true or false"),
        ({"group_size": 0}, "group_size = 0"),
        ({"group_size": 1 << 31}, "group_size = 2147483648"),
        ({"group_size": 24}, "groups of 24 inputs"),
        ({"checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"checkpoint_format": 4}, "checkpoint_format = 4 instead of a text"),
        ({"rotation": "hadamard"}, "rotated inputs"),
        ({"dynamic": {"(": {}}}, "invalid pattern"),
        ({"dynamic": {"m": 4}}, "m that is not an object"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    group = 24 if settings.get("group_size") == 24 else 128
    tensors, _ = make(group=group)
    with pytest.raises(ModelError, match=reason.replace("(", r"\(")):
        find(tmp_path / "m", settings_of() | settings, tensors)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("m.qweight", torch.zeros(32, 24, dtype=torch.int64)),
        ("m.qweight", torch.zeros(31, 24, dtype=torch.int32)),
        ("m.qweight", torch.zeros(32, 0, dtype=torch.int32)),
        ("m.qzeros", torch.zeros(2, 4, dtype=torch.int32)),
        ("m.qzeros", torch.zeros(2, 3)),
        ("m.scales", torch.zeros(24, 2)),
        ("m.scales", torch.zeros(2, 24, dtype=torch.int32)),
        ("m.g_idx", torch.zeros(100, dtype=torch.int32)),
        ("m.g_idx", torch.zeros(256)),
        ("m.weight", torch.zeros(24, 256)),
        ("x.qzeros", torch.zeros(2, 3, dtype=torch.int32)),
    ],
)
def test_a_contradictory_file_is_one_error_that_names_the_tensor(
    tmp_path: Path, name: str, changed: torch.Tensor
) -> None:
    tensors, _ = make()
    with pytest.raises(ModelError) as error:
        find(tmp_path / "m", settings_of(), tensors | {name: changed})
    assert name in str(error.value)
    assert str(tmp_path / "m") in str(error.value)


@pytest.mark.parametrize("name", ["m.scales", "m.qzeros", "m.qweight"])
def test_a_missing_tensor_is_one_error_that_names_it(tmp_path: Path, name: str) -> None:
    tensors, _ = make()
    del tensors[name]
    with pytest.raises(ModelError, match=name if name != "m.qweight" else r"m\.\w+ of a quantized matrix"):
        find(tmp_path / "m", settings_of(), tensors)


def test_a_file_that_ends_early_is_one_error(tmp_path: Path) -> None:
    tensors, _ = make()
    path = tmp_path / "m"
    (weight,) = find(path, settings_of(), tensors).values()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"ends inside tensor m\."):
        read_stored(weight)


def test_a_quantized_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {name.replace("m.", "model.embed_tokens.", 1): each for name, each in make()[0].items()}
    with pytest.raises(ModelError, match="GPTQ embedding"):
        find(tmp_path / "m", settings_of(), tensors)
