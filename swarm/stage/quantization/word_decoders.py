"""Decoders of codes in 32-bit words: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import hashlib

import torch

from swarm.stage.quantization.blocks import read_scales, spread
from swarm.stage.quantization.contents import check_shape, check_symmetric, is_reordered
from swarm.stage.quantization.formats import NUM_BITS, Minima
from swarm.stage.quantization.gptq import FIRST_VERSION
from swarm.stage.quantization.parts import count_blocks
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # place within a word of each of eight outputs


def decode_gptq(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of a GPTQ matrix."""
    bits = NUM_BITS[weight.format.codes]
    words = unpack_words(read_tensor(weight.parts["codes"]), bits)  # [rows, outputs, inputs of a row]
    zeros = read_tensor(weight.parts["zeros"])
    if weight.encoding == FIRST_VERSION:
        zeros += 0x11111111 if bits == 4 else 0x01010101  # undoes the borrows, too
    return _assemble(
        weight,
        codes=words.transpose(0, 1).flatten(1),
        scales=read_scales(weight).T,
        zeros=unpack_words(zeros, bits).flatten(1).T[: weight.shape[0]],
    )


def decode_awq(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of an AWQ matrix."""
    codes, zeros = (
        unpack_words(read_tensor(weight.parts[role]), 4)[..., _AWQ_ORDER].flatten(1).T for role in ("codes", "zeros")
    )
    return _assemble(weight, codes, read_scales(weight).T, zeros)


def decode_compressed_packed(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of a packed integer matrix of compressed-tensors. Raises ``ModelError``."""
    check_shape(weight, tuple(read_tensor(weight.parts["shape"]).tolist()))
    bits = NUM_BITS[weight.format.codes]
    codes = unpack_words(read_tensor(weight.parts["codes"]), bits).flatten(1)
    return _assemble(weight, codes, read_scales(weight), _compressed_zeros(weight, bits))


def decode_compressed_int8(weight: StoredWeight) -> QuantizedTensor:
    """Return the numbers of an int8 matrix of compressed-tensors."""
    codes = _to_unsigned(read_tensor(weight.parts["codes"]), weight.format.offset)
    return _assemble(weight, codes, read_scales(weight), _compressed_zeros(weight, 8))


def _compressed_zeros(weight: StoredWeight, bits: int) -> torch.Tensor | None:
    """Return the zero points of the file's blocks, as unsigned codes."""
    part = weight.parts.get("zeros")
    if part is None:
        return None
    zeros = read_tensor(part)
    if part.dtype == "I8":
        return _to_unsigned(zeros, weight.format.offset)
    rows = count_blocks(weight.shape[0], weight.block[0])
    return unpack_words(zeros, bits).transpose(1, 2).flatten(0, 1)[:rows]


def _to_unsigned(numbers: torch.Tensor, offset: int) -> torch.Tensor:
    return (numbers.to(torch.int16) + offset).to(torch.uint8)


def _assemble(
    weight: StoredWeight, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedTensor:
    """Return the matrix of codes ``[outputs, inputs]`` and of scales and zero points of the file's blocks.

    The codes may have more rows or columns than the matrix. Raises ``ModelError`` if a symmetric matrix has zero
    points.
    """
    outputs, inputs = weight.shape
    order = read_order(weight)
    codes = codes[:outputs, :inputs]
    if zeros is not None and weight.format.minima is Minima.NONE:
        check_symmetric(weight, zeros.numpy())
        zeros = None
    return QuantizedTensor(
        format=weight.format,
        codes=codes.contiguous() if order is None else codes.index_select(1, order),
        scales=spread(scales, weight),
        minima=None if zeros is None else spread(zeros, weight),
        order=None if order is None else order.to(torch.int32),
    )


def read_order(weight: StoredWeight) -> torch.Tensor | None:
    """Return the inputs in the order of their groups; None if that is their own order.

    Raises ``ModelError`` if the groups do not have the sizes that the weight's format requires.
    """
    part = weight.parts.get("order")
    if part is None:
        return None
    groups = read_tensor(part)
    return torch.argsort(groups, stable=True) if is_reordered(weight, groups.numpy()) else None


def order_key(weight: StoredWeight) -> str:
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
