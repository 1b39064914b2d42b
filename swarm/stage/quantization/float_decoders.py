"""Decoders of floating-point codes: FP8 and MXFP4."""

from __future__ import annotations

import torch

from swarm.stage.quantization.blocks import read_scales, spread
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor


def decode_fp8(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of an FP8 matrix."""
    return QuantizedTensor(
        format=weight.format,
        codes=read_tensor(weight.parts["codes"]),
        scales=spread(read_scales(weight), weight),
    )


def decode_mxfp4(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of MXFP4 matrices."""
    halves = read_tensor(weight.parts["codes"]).reshape(*weight.shape[:-1], -1)
    return QuantizedTensor(
        format=weight.format,
        codes=torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2),
        scales=spread(read_scales(weight), weight),
    )
