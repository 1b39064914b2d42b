"""Scales of a file's blocks, spread over the outputs and the groups that our kernels have."""

from __future__ import annotations

import torch

from swarm.stage.quantization.parts import count_blocks
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight

_E8M0 = ("U8", "F8_E8M0")


def read_scales(weight: StoredWeight) -> torch.Tensor:
    """Return the stored scales; powers of two, stored as exponents, as bfloat16."""
    part = weight.parts["scales"]
    scales = read_tensor(part)
    return decode_exponents(scales) if part.dtype in _E8M0 else scales


def decode_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return E8M0 numbers ``2 ** (exponent - 127)`` as bfloat16, in which all of them are exact; 255 is NaN."""
    numbers = exponents.to(torch.int32) << 23
    numbers[exponents == 0] = 1 << 22  # 2 ** -127 is subnormal
    numbers[exponents == 255] = 0x7FC00000
    return numbers.view(torch.float32).to(torch.bfloat16)


def spread(numbers: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Return numbers of the file's blocks, such as scales, as ``[..., outputs, groups]``."""
    *experts, outputs, inputs = weight.shape
    rows, columns = weight.block
    group = weight.format.group
    num_groups = count_blocks(inputs, group)
    numbers = numbers.reshape(*experts, count_blocks(outputs, rows), count_blocks(inputs, columns))
    if rows != 1:
        numbers = numbers.repeat_interleave(min(rows or outputs, outputs), dim=-2)[..., :outputs, :]
    if columns == 0 or columns >= inputs:  # one block, of any size, with as many groups as the kernels need
        numbers = numbers.expand(*numbers.shape[:-1], num_groups)
    elif columns != group:
        numbers = numbers.repeat_interleave(columns // group, dim=-1)[..., :num_groups]
    return numbers.contiguous()
