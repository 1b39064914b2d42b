"""Decoding of the quantized tensor types of GGUF files.

A tensor's bytes are blocks of 32 or 256 weights, row after row, each with its own scales. The layouts of the bits are
those of ggml's ``block_q…`` structures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from swarm.hub.gguf import TYPES
from swarm.stage.quantization.gguf_formats import FORMATS
from swarm.stage.quantization.reading import read_bytes
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor

_PIECE_BYTES = 16 << 20  # decoded at once: the steps in between take several times the memory of the codes


def read_gguf_matrix(weight: StoredWeight) -> QuantizedTensor:
    """Read a matrix from its file. Raises ``ModelError``."""
    part = weight.parts["codes"]
    return decode_gguf(part.dtype, read_bytes(part), torch.Size(weight.shape))


def decode_gguf(kind: str, data: torch.Tensor, shape: torch.Size) -> QuantizedTensor:
    """Return the numbers of a tensor of type ``kind``, of which ``data`` are the bytes (uint8)."""
    inputs = shape[-1]
    blocks = data.reshape(shape[:-1].numel(), -1)
    step = max(1, _PIECE_BYTES // blocks.shape[1])
    codes = torch.empty(shape, dtype=torch.uint8)
    flat = codes.view(-1, inputs)
    numbers: list[dict[str, torch.Tensor]] = []
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        part, others = _DECODERS[kind](some.reshape(len(some), -1, _BLOCK_BYTES[kind]))
        flat[first : first + step] = part.reshape(len(some), inputs)
        numbers.append({name: array.reshape(len(some), -1) for name, array in others.items()})
    joined = {name: torch.cat([part[name] for part in numbers]).view(*shape[:-1], -1) for name in numbers[0]}
    return QuantizedTensor(FORMATS[kind], codes, **joined)


_Decoded = tuple[torch.Tensor, dict[str, torch.Tensor]]  # codes, and the other fields of a QuantizedTensor


def _q8_0(blocks: torch.Tensor) -> _Decoded:
    return blocks[..., 2:] ^ 0x80, {"scales": _float16(blocks, 0)}  # q + 128


def _q4_0(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 2:]), {"scales": _float16(blocks, 0)}


def _q4_1(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 4:]), {"scales": _float16(blocks, 0), "minima": -_float16(blocks, 2)}


def _q5_0(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), {"scales": _float16(blocks, 0)}


def _q5_1(blocks: torch.Tensor) -> _Decoded:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes, {"scales": _float16(blocks, 0), "minima": -_float16(blocks, 2)}


def _q4_k(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(_lines(blocks[..., 16:], 4)), _k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> _Decoded:
    low = _nibbles(_lines(blocks[..., 48:], 4))  # [..., 4, 64]: two groups a line
    # bit j of the byte for input i of a group belongs to group j
    high = torch.stack([(blocks[..., 16:48] >> group & 1) << 4 for group in range(8)], dim=-2)
    return low.flatten(-2) | high.flatten(-2), _k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> _Decoded:
    low = _nibbles(_lines(blocks[..., :128], 2))  # [..., 2, 128]
    bits = _lines(blocks[..., 128:192], 2)
    high = torch.cat([(bits >> shift & 3) << 4 for shift in (0, 2, 4, 6)], dim=-1)
    return low | high, {"scales": _float16(blocks, 208), "group_scales": blocks[..., 192:208].view(torch.int8)}


def _mxfp4(blocks: torch.Tensor) -> _Decoded:
    exponents = blocks[..., :1].to(torch.int32)
    # 2^(e - 128) as bits of a float32; the first two are subnormal
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return _nibbles(blocks[..., 1:]), {"scales": bits.view(torch.float32).to(torch.bfloat16)}


_DECODERS: dict[str, Callable[[torch.Tensor], _Decoded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
_BLOCK_BYTES = {name: num_bytes for name, _, num_bytes in TYPES.values()}


def _float16(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)


def _lines(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last dimension as ``count`` lines."""
    return data.reshape(*data.shape[:-1], count, -1)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, followed by the high halves."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return bit ``i`` of four bytes as bit 4 of the code ``i``."""
    bits = torch.stack([data >> bit & 1 for bit in range(8)], dim=-1)
    return bits.flatten(-2) << 4


def _k_scales(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the scales and minima of Q4_K and Q5_K: two float16, then eight pairs of six bits in twelve bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=-1)
    return {
        "scales": _float16(blocks, 0),
        "minima": _float16(blocks, 2),
        "group_scales": scales.to(torch.int8),
        "group_minima": minima,
    }
