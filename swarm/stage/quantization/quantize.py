"""Quantization of plain weights at load."""

from __future__ import annotations

import torch

from swarm.stage.quantization.at_load import TRANSPOSED
from swarm.stage.quantization.formats import WeightFormat
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor


def quantize(weights: torch.Tensor, form: WeightFormat) -> QuantizedTensor:
    """Return plain weights ``[..., outputs, inputs]`` as codes and scales."""
    inputs = weights.shape[-1]
    num_groups = -(-inputs // form.group)
    padded = torch.zeros((*weights.shape[:-1], num_groups * form.group), dtype=torch.float32)
    padded[..., :inputs] = weights
    groups = padded.view(*weights.shape[:-1], num_groups, form.group)
    limit = form.offset - 1
    scales = (groups.abs().amax(dim=-1) / limit).half()
    factors = torch.where(scales == 0, torch.zeros(()), 1 / scales.float())
    codes = (groups * factors.unsqueeze(-1)).round().clamp(-form.offset, limit) + form.offset
    return QuantizedTensor(form, codes.to(torch.uint8).flatten(-2)[..., :inputs].contiguous(), scales)


def read_and_quantize(weight: StoredWeight) -> QuantizedTensor:
    """Read a plain tensor and quantize it. Raises ``ModelError``."""
    tensor = read_tensor(weight.parts["weight"])
    return quantize(tensor.transpose(-1, -2) if weight.encoding == TRANSPOSED else tensor, weight.format)
