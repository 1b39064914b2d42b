"""Decoding of quantized matrices from a model's files.

Each kind of file has a module with decoders, which are listed here by the encodings that its headers' reader gives to
:class:`StoredWeight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.errors import ModelError
from swarm.stage.quantization.at_load import PLAIN, TRANSPOSED
from swarm.stage.quantization.float_decoders import decode_fp8, decode_mxfp4
from swarm.stage.quantization.gguf_decode import read_gguf_matrix
from swarm.stage.quantization.gguf_formats import FORMATS as GGUF_FORMATS
from swarm.stage.quantization.quantize import Quantize, quantize, read_and_quantize
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight
from swarm.stage.quantization.version import digest_decoders
from swarm.stage.quantization.word_decoders import (
    decode_awq,
    decode_compressed_int8,
    decode_compressed_packed,
    decode_gptq,
    order_key,
)


def _own_order(weight: StoredWeight) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Functions that read a matrix from its file.

    ``order_key`` returns a text that identifies the order of the matrix's inputs, such as a digest; it is empty if they
    are in their own order. It is called before anything else is read.
    """

    read: Callable[[StoredWeight], QuantizedTensor]
    order_key: Callable[[StoredWeight], str] = _own_order


DECODERS: dict[str, Decoder] = {  # by encoding
    "gptq": Decoder(decode_gptq, order_key),
    "gptq_v2": Decoder(decode_gptq, order_key),
    "awq": Decoder(decode_awq),
    "compressed_packed": Decoder(decode_compressed_packed, order_key),
    "compressed_int8": Decoder(decode_compressed_int8, order_key),
    "fp8": Decoder(decode_fp8),
    "mxfp4": Decoder(decode_mxfp4),
    **dict.fromkeys(GGUF_FORMATS, Decoder(read_gguf_matrix)),
}


def read_stored(weight: StoredWeight, quantize: Quantize = quantize) -> QuantizedTensor:
    """Read a matrix from its file; ``quantize`` it if it is plain there. Raises ``ModelError``."""
    if weight.encoding in (PLAIN, TRANSPOSED):
        return read_and_quantize(weight, quantize)
    return _decoder(weight).read(weight)


def open_stored(weight: StoredWeight, file_digest: str, quantize: Quantize = quantize) -> QuantizedWeight:
    """Return the matrix, which is read when it is needed. ``file_digest`` identifies the contents of its file;
    ``quantize`` is applied to matrices that are plain there."""
    is_plain = weight.encoding in (PLAIN, TRANSPOSED)
    described = f"{weight.name} {weight.encoding} {weight.shape} {weight.block} {weight.format}"
    return QuantizedWeight(
        weight.format,
        torch.Size(weight.shape),
        key=f"{file_digest} {described} {digest_decoders()}",
        read=lambda: read_stored(weight, quantize),
        order_key="" if is_plain else _decoder(weight).order_key(weight),
    )


def _decoder(weight: StoredWeight) -> Decoder:
    decoder = DECODERS.get(weight.encoding)
    if decoder is None:
        raise ModelError(f"{weight.name} is stored as {weight.encoding}, which is not supported")
    return decoder
