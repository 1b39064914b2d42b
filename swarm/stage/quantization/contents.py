"""Checks of the small parts of quantized matrices against their configuration. Does not import torch.

A file's header does not have what these parts contain: the order of the inputs, the shape of packed codes and the zero
points of a matrix that is declared symmetric. They are compared before a worker joins, where they are on this machine,
and again by the decoders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.hub.presence import check_present
from swarm.stage.quantization.at_load import LAYER
from swarm.stage.quantization.formats import Codes, Minima
from swarm.stage.quantization.gptq import FIRST_VERSION
from swarm.stage.quantization.parts import count_blocks
from swarm.stage.quantization.stored import StoredWeight

Numbers = npt.NDArray[Any]  # integers

_DTYPES = {"I64": "<i8", "I32": "<i4", "I8": "i1"}


def check_contents(weights: Iterable[StoredWeight]) -> None:
    """Raise ``ModelError`` if parts that are on this machine contradict the configuration.

    Zero points take more space than the other parts. They are read for one layer and for matrices outside of layers.
    """
    for weight in weights:
        for role, part in weight.parts.items():
            if role in ("order", "shape") or (role == "zeros" and _is_sample(weight)):
                numbers = _read(part)
                if numbers is not None:
                    _check_part(weight, role, numbers)


def _is_sample(weight: StoredWeight) -> bool:
    layer = LAYER.search(weight.name)
    return layer is None or layer[1] == "0"


def _check_part(weight: StoredWeight, role: str, numbers: Numbers) -> None:
    if role == "order":
        is_reordered(weight, numbers)
    elif role == "shape":
        check_shape(weight, tuple(numbers.tolist()))
    elif weight.format.minima is Minima.NONE:
        check_symmetric(weight, _unpack_zeros(weight, numbers))


def _read(part: StoredTensor) -> Numbers | None:
    """Return the numbers of a part; None if it is not on this machine, or not whole."""
    try:
        check_present(part)
        numbers = np.fromfile(part.path, _DTYPES[part.dtype], part.num_elements, offset=part.offset)
    except (OSError, ModelError):
        return None
    return numbers.reshape(part.shape) if len(numbers) == part.num_elements else None


def _unpack_zeros(weight: StoredWeight, numbers: Numbers) -> Numbers:
    """Return the zero points as unsigned codes, without those of outputs that a last word has room for."""
    offset, part = weight.format.offset, weight.parts["zeros"]
    if part.dtype == "I8":
        return numbers.astype(np.int16) + offset
    if weight.encoding == FIRST_VERSION:
        numbers = numbers + np.int32(0x11111111 if weight.format.codes is Codes.INT4 else 0x01010101)
    codes = np.ascontiguousarray(numbers)[..., np.newaxis].view(np.uint8)
    if weight.format.codes is Codes.INT4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    if weight.encoding == "compressed_packed":  # along the outputs: [words, blocks, codes of a word]
        rows = count_blocks(weight.shape[0], weight.block[0])
        return codes.transpose(0, 2, 1).reshape(-1, codes.shape[1])[:rows]
    return codes.reshape(len(codes), -1)[:, : weight.shape[0]]


def is_reordered(weight: StoredWeight, groups: Numbers) -> bool:
    """Whether the inputs' groups give them another order than their own.

    Raises ``ModelError`` if the groups do not have the sizes that the weight's format requires.
    """
    part, inputs = weight.parts["order"], weight.shape[-1]
    size = weight.block[1] or inputs
    expected = np.arange(inputs) // size
    if np.array_equal(groups, expected) or bool((groups == -1).all()):  # -1: not set, in compressed-tensors
        return False
    if not np.array_equal(np.sort(groups), expected):
        raise ModelError(
            f"{part.path} has {part.name} with groups that are not the {count_blocks(inputs, size)} groups of {size} "
            "inputs of its quantization_config; use files without desc_act"
        )
    return True


def check_shape(weight: StoredWeight, shape: tuple[int, ...]) -> None:
    """Raise ``ModelError`` unless a matrix of packed codes has this shape."""
    if shape != weight.shape:
        part = weight.parts["shape"]
        raise ModelError(
            f"{part.path} has {part.name} = {shape} beside codes of {weight.shape} numbers; download it again, or use "
            "files whose matrices fill whole words of 32 bits"
        )


def check_symmetric(weight: StoredWeight, zeros: Numbers) -> None:
    """Raise ``ModelError`` unless the zero points, as unsigned codes, are those of a symmetric matrix."""
    if not bool((zeros == weight.format.offset).all()):
        part = weight.parts["zeros"]
        name = "symmetric" if weight.encoding.startswith("compressed") else "sym"
        raise ModelError(
            f"{part.path} has zero points in {part.name}, but its quantization_config declares {name} = true; set it "
            "to false in the model's config.json"
        )
