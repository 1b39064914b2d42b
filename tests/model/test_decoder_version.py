"""What an encoding's bytes decode to is pinned together with the version that workers compare.

If a digest here changes, a file's weights have changed: increase ``DECODERS`` and pin the new digests.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from swarm.hub.gguf import TYPES
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization import decoding, version
from swarm.stage.quantization.decoding import DECODERS as FUNCTIONS
from swarm.stage.quantization.decoding import open_stored, read_stored
from swarm.stage.quantization.gguf_formats import FORMATS as GGUF_FORMATS
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor
from tests.quantized_files import Tensors, find

OUTPUTS, INPUTS = 16, 256
INT_GROUPS = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
INT8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False}}

PINNED = {  # by encoding
    "gptq": "dbda168e753dc40b",
    "gptq_v2": "20bd6a41535a0d19",
    "awq": "b173ebb70512dd4c",
    "compressed_packed": "2ef697aa628f0eaf",
    "compressed_int8": "b8396f34dc47ee32",
    "fp8": "e97561262c537b62",
    "mxfp4": "0667c6e7fa2c900f",
    "Q8_0": "0db72b97ec508cdc",
    "Q4_0": "80570cb3d3ea4d63",
    "Q4_1": "9e2941fef4b78b47",
    "Q5_0": "f734e4dfa75560da",
    "Q5_1": "59de42a387d5e1c7",
    "Q4_K": "589cecd45010f821",
    "Q5_K": "c315fb1100f87b48",
    "Q6_K": "7685ae5cf3f81d63",
    "MXFP4": "55d66580c211162e",
}


def numbers(*shape: int, dtype: torch.dtype = torch.int32, most: int = 1 << 32, seed: int = 1) -> torch.Tensor:
    """Numbers below ``most`` that look random and are the same everywhere."""
    at = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 977 * seed
    mixed = (at * 2654435761 % (1 << 32) ^ at * 40503 >> 3) % most
    if dtype == torch.int32 and most == 1 << 32:
        mixed = mixed - (1 << 31)
    return mixed.to(dtype).view(shape)


def scales(*shape: int) -> torch.Tensor:
    return (numbers(*shape, dtype=torch.float32, most=1000, seed=2) / 512 + 1 / 64).half()


def gptq(bits: int) -> Tensors:
    per_word, groups = 32 // bits, INPUTS // 64
    order = torch.arange(INPUTS, dtype=torch.int32) % groups  # as ``desc_act`` scatters groups
    return {
        "m.qweight": numbers(INPUTS // per_word, OUTPUTS),
        "m.qzeros": numbers(groups, OUTPUTS // per_word, seed=3),
        "m.scales": scales(groups, OUTPUTS),
        "m.g_idx": order,
    }


def floats8(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.uint8, most=0x7F).view(torch.float8_e4m3fn)


def settings(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, **more}


FILES: dict[str, tuple[dict[str, Any], Tensors]] = {
    "gptq": (settings("gptq", bits=4, group_size=64), gptq(4)),
    "gptq_v2": (settings("gptq", bits=8, group_size=64, checkpoint_format="gptq_v2"), gptq(8)),
    "awq": (
        settings("awq", bits=4, group_size=64),
        {
            "m.qweight": numbers(INPUTS, OUTPUTS // 8),
            "m.qzeros": numbers(INPUTS // 64, OUTPUTS // 8, seed=3),
            "m.scales": scales(INPUTS // 64, OUTPUTS),
        },
    ),
    "compressed_packed": (
        settings("compressed-tensors", format="pack-quantized", config_groups={"group_0": INT_GROUPS}),
        {
            "m.weight_packed": numbers(OUTPUTS, INPUTS // 8),
            "m.weight_scale": scales(OUTPUTS, INPUTS // 64),
            "m.weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        },
    ),
    "compressed_int8": (
        settings("compressed-tensors", format="int-quantized", config_groups={"group_0": INT8}),
        {
            "m.weight": numbers(OUTPUTS, INPUTS, dtype=torch.uint8, most=256).view(torch.int8),
            "m.weight_scale": scales(OUTPUTS, 1),
            "m.weight_zero_point": numbers(OUTPUTS, 1, dtype=torch.uint8, most=256, seed=3).view(torch.int8),
        },
    ),
    "fp8": (
        settings("fp8", weight_block_size=[8, 96]),
        {"m.weight": floats8(OUTPUTS, INPUTS), "m.weight_scale_inv": scales(OUTPUTS // 8, -(-INPUTS // 96)).float()},
    ),
    "mxfp4": (
        settings("mxfp4"),
        {
            "m_blocks": numbers(2, OUTPUTS, INPUTS // 32, 16, dtype=torch.uint8, most=256),
            "m_scales": numbers(2, OUTPUTS, INPUTS // 32, dtype=torch.uint8, most=20, seed=3) + 118,
        },
    ),
}


def stored_of(encoding: str, path: Path) -> StoredWeight:
    """Write a file with one matrix in this encoding."""
    if encoding not in GGUF_FORMATS:
        (weight,) = find(path, *FILES[encoding]).values()
        assert weight.encoding == encoding
        return weight
    block, num_bytes = next((block, size) for name, block, size in TYPES.values() if name == encoding)
    assert (block, num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    data = numbers(OUTPUTS * INPUTS // block * num_bytes, dtype=torch.uint8, most=256)
    path.write_bytes(data.numpy().tobytes())
    part = StoredTensor("m.weight", path, encoding, (OUTPUTS, INPUTS), 0, len(data))
    return StoredWeight("m.weight", GGUF_FORMATS[encoding], part.shape, encoding, {"codes": part})


def digest(tensor: QuantizedTensor) -> str:
    """Digest everything that the packer reads."""
    total = hashlib.sha256(repr(tensor.format).encode())
    for array in (tensor.codes, tensor.scales, tensor.minima, tensor.group_scales, tensor.group_minima, tensor.order):
        if array is not None:
            total.update(f"{array.dtype} {tuple(array.shape)}".encode())
            total.update(array.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


@pytest.mark.parametrize("encoding", FUNCTIONS)
def test_other_bits_need_another_version(encoding: str, tmp_path: Path) -> None:
    assert version.DECODERS == 1
    assert digest(read_stored(stored_of(encoding, tmp_path / "m"))) == PINNED[encoding]


def test_a_packed_matrix_has_all_that_decides_its_bits_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file with another configuration or read by another decoder is another matrix."""
    weight = stored_of("fp8", tmp_path / "m")

    def key(changed: StoredWeight) -> str:
        return open_stored(changed, "digest").key

    offset, table = replace(weight.format, offset=1), replace(weight.format, table=(1.0,) * 16)
    others = [
        replace(weight, block=(8, 128)),
        replace(weight, format=offset),
        replace(weight, format=table),
        replace(weight, encoding="mxfp4"),
        replace(weight, name="n.weight"),
    ]
    keys = [key(weight), *map(key, others), open_stored(weight, "another").key]
    monkeypatch.setattr(decoding, "digest_decoders", lambda: "other sources")
    keys.append(key(weight))
    assert len(set(keys)) == len(keys)


def test_the_digest_covers_every_module_that_derives_matrices() -> None:
    """Their contents depend on the order of rows that such a module asks for."""
    stage = Path(version.__file__).parent.parent
    derives = re.compile(
        r"\.reordered\(|\.changed\(|join_rows\(|stack_experts\(|open_stored\(|swarm_pack|swarm_quantize"
    )
    deriving = {path for path in stage.rglob("*.py") if derives.search(path.read_text("utf-8"))}
    deriving -= {stage / "native" / "__init__.py"}  # declares the functions of the library
    sources = set(version.decoder_sources())
    assert deriving <= sources
    assert set((stage / "quantization").glob("*.py")) <= sources
    assert all(path.is_file() for path in sources)
