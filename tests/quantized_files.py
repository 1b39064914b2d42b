"""Quantized checkpoints, written byte for byte as the documentation of their formats describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swarm.hub.headers import StoredTensor, read_header
from swarm.stage.quantization.decoding import read_stored
from swarm.stage.quantization.search import find_quantized
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def header(path: Path, tensors: Tensors) -> dict[str, StoredTensor]:
    """Write a file and return its tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return {tensor.name: tensor for tensor in read_header(path)}


def find(path: Path, settings: dict[str, Any], tensors: Tensors) -> dict[str, StoredWeight]:
    """Write a file and return its quantized matrices."""
    return find_quantized(settings, header(path, tensors))[0]


def decode(path: Path, settings: dict[str, Any], tensors: Tensors) -> QuantizedTensor:
    """Write a file and return its only quantized matrix."""
    (weight,) = find(path, settings, tensors).values()
    return read_stored(weight)


def random_codes(chance: torch.Generator, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=chance, dtype=torch.int64)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes ``[rows, columns]`` in int32 words along the columns, the first in the lowest bits."""
    rows, columns = codes.shape
    per_word = 32 // bits
    words = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
    for column in range(columns):
        words[:, column // per_word] |= codes[:, column].long() << (bits * (column % per_word))
    return wrap(words)


def wrap(words: torch.Tensor) -> torch.Tensor:
    """Return numbers modulo 2³² as int32."""
    return (((words + (1 << 31)) % (1 << 32)) - (1 << 31)).to(torch.int32)


def group_index(inputs: int, group: int, chance: torch.Generator | None = None) -> torch.Tensor:
    """Return the group of each input, scattered by ``chance``."""
    groups = torch.arange(inputs, dtype=torch.int32) // (group if group > 0 else inputs)
    return groups if chance is None else groups[torch.randperm(inputs, generator=chance)]


def gptq_tensors(
    module: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    g_idx: torch.Tensor,
    *,
    bits: int = 4,
    version: int = 1,
) -> Tensors:
    """Return a module's tensors. ``codes``: ``[outputs, inputs]``; ``scales`` and ``zeros``: ``[groups, outputs]``."""
    words = pack_words(zeros, bits).long()
    if version == 1:
        words = words - (0x11111111 if bits == 4 else 0x01010101)
    return {
        f"{module}.qweight": pack_words(codes, bits).T,
        f"{module}.qzeros": wrap(words),
        f"{module}.scales": scales,
        f"{module}.g_idx": g_idx,
    }


def awq_tensors(module: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    """Return a module's tensors. ``codes``: ``[outputs, inputs]``; ``scales`` and ``zeros``: ``[groups, outputs]``."""

    def interleave(numbers: torch.Tensor) -> torch.Tensor:
        places = [8 * word + output for word in range(numbers.shape[1] // 8) for output in AWQ_ORDER]
        return pack_words(numbers[:, places], 4)

    return {
        f"{module}.qweight": interleave(codes.T),
        f"{module}.qzeros": interleave(zeros),
        f"{module}.scales": scales,
    }


def mxfp4_tensors(name: str, codes: torch.Tensor, exponents: torch.Tensor) -> Tensors:
    """Return the tensors of experts' codes ``[experts, outputs, inputs]`` and exponents ``[..., groups]``."""
    halves = codes.to(torch.uint8).unflatten(-1, (-1, 16, 2))
    return {f"{name}_blocks": halves[..., 0] | halves[..., 1] << 4, f"{name}_scales": exponents.to(torch.uint8)}
