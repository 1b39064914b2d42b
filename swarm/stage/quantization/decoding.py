"""Decoding of quantized matrices from a model's files.

Each kind of file has a module with decoders, which are listed here by the encodings that its headers' reader gives to
:class:`StoredWeight`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.errors import ModelError
from swarm.stage.quantization.at_load import PLAIN, TRANSPOSED
from swarm.stage.quantization.quantize import read_and_quantize
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight


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
    PLAIN: Decoder(read_and_quantize),
    TRANSPOSED: Decoder(read_and_quantize),
}


def read_stored(weight: StoredWeight) -> QuantizedTensor:
    """Read a matrix from its file. Raises ``ModelError``."""
    return _decoder(weight).read(weight)


def open_stored(weight: StoredWeight, file_digest: str) -> QuantizedWeight:
    """Return the matrix, which is read when it is needed. ``file_digest`` identifies the contents of its file."""
    return QuantizedWeight(
        weight.format,
        torch.Size(weight.shape),
        key=f"{file_digest} {weight.encoding} {weight.name} {weight.format.name}/{weight.format.group}",
        read=lambda: read_stored(weight),
        order_key=_decoder(weight).order_key(weight),
    )


def digest_order(order: torch.Tensor) -> str:
    """Return an order's key; matrices with the same order of inputs have the same key."""
    return hashlib.sha256(order.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


def _decoder(weight: StoredWeight) -> Decoder:
    decoder = DECODERS.get(weight.encoding)
    if decoder is None:
        raise ModelError(f"{weight.name} is stored as {weight.encoding}, which is not supported")
    return decoder
