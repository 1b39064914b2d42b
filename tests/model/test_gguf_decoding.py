"""Quantized tensors of GGUF files have the values that the gguf package gives them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from swarm.stage.quantization import gguf_decode
from swarm.stage.quantization.gguf_decode import decode_gguf
from swarm.stage.quantization.gguf_formats import FORMATS


def random_bytes(kind: str, *shape: int) -> np.ndarray:
    """Every byte is a valid one, also of scales that are infinite or no numbers."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    size = (*shape[:-1], shape[-1] // block * num_bytes)
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(30, 512), (3, 5, 256)])
def test_values_are_those_of_the_gguf_package(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_decode, "_PIECE_BYTES", 4096)  # several pieces
    data = random_bytes(kind, *shape)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, Type[kind])
    tensor = decode_gguf(kind, torch.from_numpy(data), torch.Size(shape))
    values = tensor.dequantize(torch.float32).numpy()
    assert tensor.shape == torch.Size(shape)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_the_package_has_quantized_is_close_to_the_original(kind: str) -> None:
    weights = np.random.default_rng(1).normal(size=(16, 96)).astype(np.float32)
    data = gguf.quants.quantize(weights, Type[kind])
    values = decode_gguf(kind, torch.from_numpy(data), torch.Size(weights.shape)).dequantize(torch.float32).numpy()
    assert np.abs(values - weights).max() < {"Q8_0": 0.02, "Q4_0": 0.4, "Q4_1": 0.25, "Q5_0": 0.2, "Q5_1": 0.15}[kind]
