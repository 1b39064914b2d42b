"""Headers of safetensors files: the tensors of a file and the positions of their bytes. Does not import torch.

A file consists of eight bytes of length, that many bytes of JSON (name → dtype, shape, offsets), then raw little-endian
data. The first kilobytes therefore describe a file of any size, even one that is still on a hub.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Progress = Callable[[int, int], None]  # (bytes received, bytes in total)
Report = Callable[[str], None]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # The format's own limit.

# Stored dtype -> dtype of the computation.
FLOAT_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ELEMENT_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class RemoteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a safetensors file on a hub, without its data. ``header`` is its JSON."""

    num_bytes: int
    sha256: str
    header: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position of a tensor's bytes in a file. ``dtype`` is the safetensors name, such as BF16."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_DTYPES


def read_header(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a file; every bound is checked against the file's size. Raises ModelError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise ModelError(f"{path} is not a complete safetensors file; download it again")
            header = file.read(length)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} has a damaged header ({error}); download it again") from None
    yield from _parse_header(path, header, size)


def remote_header(path: Path, described: RemoteFile) -> Iterator[StoredTensor]:
    """Yield the tensors of a file that is not downloaded yet; ``path`` is its future location."""
    yield from _parse_header(path, described.header.encode(), described.num_bytes)


def _parse_header(path: Path, text: bytes, file_size: int) -> Iterator[StoredTensor]:
    try:
        header = json.loads(text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header; download it again")
    tensors = [
        _stored_tensor(path, name, entry, LENGTH_BYTES + len(text), file_size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    check_no_overlap(path, tensors)
    yield from tensors


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object from its pairs. Raises ValueError for a duplicate name, which parsers treat differently."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name comes twice")
    for name in result:
        name.encode()  # Raises UnicodeEncodeError, a ValueError, for a lone surrogate.
    return result


def check_no_overlap(path: Path, tensors: list[StoredTensor]) -> None:
    """Raise ModelError if two tensors overlap: the format forbids it, and the sizes would exceed the file's."""
    stop = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.num_bytes and tensor.offset < stop:
            raise ModelError(f"{path} has tensor {tensor.name} in bytes of another one; download it again")
        stop = max(stop, tensor.offset + tensor.num_bytes)


def _stored_tensor(path: Path, name: str, entry: object, base: int, file_size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            isinstance(extent, int) and extent >= 0 for extent in shape
        ):
            pass
        case _:
            raise ModelError(f"{path} describes tensor {name} wrongly; download it again")
    bits = ELEMENT_BITS.get(dtype)  # a dtype that is not known is refused by its name where the tensor is needed
    if not 0 <= start <= stop or (bits is not None and 8 * (stop - start) != math.prod(shape) * bits):
        raise ModelError(f"{path} describes tensor {name} with a size that doesn't fit its shape; download it again")
    if base + stop > file_size:
        raise ModelError(f"{path} ends before tensor {name}; the file is cut off, download it again")
    return StoredTensor(name, path, dtype, tuple(shape), base + start, stop - start)
