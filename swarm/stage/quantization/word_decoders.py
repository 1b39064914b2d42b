"""Decoders of codes in 32-bit words: GPTQ."""

from __future__ import annotations

import hashlib

import torch

from swarm.errors import ModelError
from swarm.stage.quantization.blocks import read_scales, spread
from swarm.stage.quantization.formats import Codes, Minima
from swarm.stage.quantization.gptq import FIRST_VERSION
from swarm.stage.quantization.parts import count_blocks
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor

BITS = {Codes.INT4: 4, Codes.INT8: 8}


def decode_gptq(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of a GPTQ matrix."""
    (outputs, inputs), bits = weight.shape, BITS[weight.format.codes]
    words = unpack_words(read_tensor(weight.parts["codes"]), bits)  # [rows, outputs, inputs of a row]
    codes = words.transpose(0, 1).reshape(outputs, -1)[:, :inputs]
    zeros = _gptq_zeros(weight, bits)
    order = read_order(weight)
    return QuantizedTensor(
        format=weight.format,
        codes=codes.contiguous() if order is None else codes.index_select(1, order),
        scales=spread(read_scales(weight).T, weight),
        minima=None if weight.format.minima is Minima.NONE else spread(zeros.T, weight),
        order=None if order is None else order.to(torch.int32),
    )


def _gptq_zeros(weight: StoredWeight, bits: int) -> torch.Tensor:
    """Return the zero points ``[groups, outputs]``. Raises ``ModelError`` if a symmetric matrix has other ones."""
    part = weight.parts["zeros"]
    words = read_tensor(part)
    if weight.encoding == FIRST_VERSION:
        words += 0x11111111 if bits == 4 else 0x01010101  # undoes the borrows, too
    zeros = unpack_words(words, bits).flatten(1)[:, : weight.shape[0]]
    if weight.format.minima is Minima.NONE and not bool((zeros == weight.format.offset).all()):
        raise ModelError(
            f"{part.path} has zero points in {part.name}, but its quantization_config declares sym = true; set it to "
            "false in the model's config.json"
        )
    return zeros


def read_order(weight: StoredWeight) -> torch.Tensor | None:
    """Return the inputs in the order of their groups; None if that is their own order.

    Raises ``ModelError`` if the groups do not have the sizes that the weight's format requires.
    """
    part = weight.parts.get("order")
    if part is None:
        return None
    groups = read_tensor(part).long()
    inputs = weight.shape[-1]
    size = weight.block[1] or inputs
    expected = torch.arange(inputs) // size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ModelError(
            f"{part.path} has {part.name} with groups that are not the {count_blocks(inputs, size)} groups of {size} "
            "inputs of its quantization_config; use files without desc_act"
        )
    return order


def gptq_order_key(weight: StoredWeight) -> str:
    """Return a text that identifies the order of a matrix's inputs; empty for their own order."""
    order = read_order(weight)
    return "" if order is None else digest_order(order)


def digest_order(order: torch.Tensor) -> str:
    """Return an order's key; matrices with the same order of inputs have the same key."""
    return hashlib.sha256(order.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of int32 words, the lowest bits first, as uint8 with one more dimension."""
    codes = words.contiguous().unsqueeze(-1).view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
