"""Headers of GGUF files: their metadata, their tensors and the positions of the tensors' bytes. Does not import torch.

A file consists of a magic number, a version, two counts, the metadata (name → typed value), a description of each
tensor (name, shape, type, offset), and the aligned data. The gguf package's reader maps the whole file, trusts its
counts and offsets, and needs the file on this machine. This one reads the header only, through a function that may as
well ask a hub for ranges, and checks every number against the file's size.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from swarm.errors import ModelError
from swarm.hub.headers import MAX_HEADER_BYTES, StoredTensor, check_no_overlap

__all__ = ["GgufFile", "GgufModel", "Metadata", "Value", "join_parts", "parse_gguf", "part_names", "read_gguf"]

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
Metadata = dict[str, Value]
_Description = tuple[str, tuple[int, ...], int, int]  # name, shape, type and offset of a tensor
ReadRange = Callable[[int, int], bytes]  # (offset, length); fewer bytes only at the end of the file

MAGIC = b"GGUF"
ROPE_DIVISORS = "rope_freqs.weight"
_VERSIONS = (2, 3)
_MAX_ELEMENTS = 1 << 22  # of all arrays; the largest vocabularies have a quarter of a million tokens, twice the merges
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16  # of a key or a tensor's name
_CHUNK_BYTES = 1 << 20  # read at once
_MAX_DIVISOR_BYTES = 1 << 16
_ALIGNMENT = 32  # unless the metadata has another

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Tensor types by their number: name, elements of a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of one file. A tensor's ``dtype`` is the name of its type, such as Q4_K; its shape is outermost first."""

    path: Path
    num_bytes: int
    metadata: Metadata
    tensors: tuple[StoredTensor, ...]
    data_start: int  # offset of the first tensor's bytes, which is the size of the header
    rope_divisors: bytes = b""  # contents of ``rope_freqs.weight``, a setting of the model in the form of a tensor


@dataclass(frozen=True)
class GgufModel:
    """All files of one model."""

    files: tuple[GgufFile, ...]

    @property
    def metadata(self) -> Metadata:
        """The metadata of the first file. Those of the others only have their number."""
        return self.files[0].metadata

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}

    @property
    def rope_divisors(self) -> bytes:
        """The contents of ``rope_freqs.weight``; empty if there is none."""
        return b"".join(file.rope_divisors for file in self.files)

    @property
    def name(self) -> str:
        """The files' name, without the number of a part."""
        file_name = self.files[0].path.name
        part = PART.fullmatch(file_name)
        return part["stem"] if part else file_name.removesuffix(".gguf")


def read_gguf(path: Path) -> GgufModel:
    """Return the model that this file, or this part of it, belongs to. Raises ``ModelError``."""
    return join_parts([_read_file(path.with_name(name)) for name in part_names(path.name)])


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model that the file with this name belongs to."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count:
        raise ModelError(f"{name} is numbered outside of its own {count} parts; rename it as it was published")
    return [f"{part['stem']}-{number:05}-of-{part['count']}.gguf" for number in range(1, count + 1)]


def join_parts(files: Sequence[GgufFile]) -> GgufModel:
    """Return the model of these files, in the order of :func:`part_names`. Raises ``ModelError``."""
    first = files[0]
    count, num_tensors = first.metadata.get("split.count", 1), first.metadata.get("split.tensors.count")
    names: set[str] = set()
    for number, file in enumerate(files):
        if (file.metadata.get("split.count", 1) or 1) != max(len(files), 1):
            raise ModelError(
                f"{file.path} is a part of {file.metadata.get('split.count', 1)}, but its name is that of one of "
                f"{len(files)}; keep the names with which the parts were published"
            )
        if len(files) > 1 and file.metadata.get("split.no") != number:
            raise ModelError(f"{file.path} is not part {number + 1} of {count}; keep the published names")
        if file.metadata.get("split.tensors.count") != num_tensors:
            raise ModelError(f"{file.path} belongs to another model than {first.path.name}")
        for tensor in file.tensors:
            if tensor.name in names:
                raise ModelError(f"{file.path} has tensor {tensor.name} again; it belongs to another model")
            names.add(tensor.name)
    if len(files) > 1 and len(names) != num_tensors:
        raise ModelError(
            f"{first.path} and the other parts have {len(names)} tensors instead of {num_tensors}; download them again"
        )
    return GgufModel(tuple(files))


def _read_file(path: Path) -> GgufFile:
    try:
        with path.open("rb", buffering=0) as file:

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            return parse_gguf(path, os.fstat(file.fileno()).st_size, read)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error})") from None


def parse_gguf(path: Path, num_bytes: int, read: ReadRange) -> GgufFile:
    """Return the header of a file of this size, of which ``read`` returns ranges. Raises ``ModelError``."""
    header = _Header(path, num_bytes, read)
    version = _check_magic(header)
    num_tensors, num_keys = header.unpack("QQ")
    # a key takes at least thirteen bytes, a tensor twenty-five
    if num_keys * 13 + num_tensors * 25 > min(num_bytes, MAX_HEADER_BYTES):
        raise ModelError(
            f"{path} (GGUF version {version}) counts {num_keys} keys and {num_tensors} tensors, more than it has room "
            "for; download it again"
        )
    metadata: Metadata = {}
    for _ in range(num_keys):
        name = header.text(_MAX_NAME_BYTES)
        if name in metadata:
            raise ModelError(f"{path} has the key {name} twice; download it again")
        metadata[name] = header.value(name)
    described = [_read_description(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise ModelError(f"{path} aligns its tensors to {str(alignment)[:40]} bytes; download it again")
    data_start = -(-header.position // alignment) * alignment
    tensors = [_place(header, data_start, alignment, description) for description in described]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ModelError(f"{path} has two tensors with one name; download it again")
    check_no_overlap(path, tensors)
    divisors = b"".join(
        read(tensor.offset, tensor.num_bytes)
        for tensor in tensors
        if tensor.name == ROPE_DIVISORS and tensor.num_bytes <= _MAX_DIVISOR_BYTES
    )
    return GgufFile(path, num_bytes, metadata, tuple(tensors), data_start, divisors)


def _check_magic(header: _Header) -> int:
    path = header.path
    if header.take(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it doesn't begin with GGUF")
    raw = header.take(4)
    version = int.from_bytes(raw, "little")
    if version not in _VERSIONS:
        if int.from_bytes(raw, "big") in _VERSIONS:
            raise ModelError(f"{path} is a big-endian GGUF file, which is not supported; use the little-endian one")
        raise ModelError(
            f"{path} has version {version} of GGUF; versions {' and '.join(map(str, _VERSIONS))} are supported: "
            "convert it again with a current llama.cpp"
        )
    return version


def _read_description(header: _Header) -> _Description:
    name = header.text(_MAX_NAME_BYTES)
    (num_dimensions,) = header.unpack("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"{header.path} has tensor {name} with {num_dimensions} dimensions; download it again")
    extents = header.unpack("Q" * num_dimensions)
    kind, offset = header.unpack("IQ")
    return name, tuple(reversed(extents)), kind, offset


def _place(header: _Header, data_start: int, alignment: int, described: _Description) -> StoredTensor:
    path, num_bytes = header.path, header.num_bytes
    name, shape, kind, offset = described
    if kind not in TYPES:
        raise ModelError(f"{path} stores {name} as type {kind}, which is unknown; use a Q4_K_M or Q8_0 file")
    type_name, block, block_bytes = TYPES[kind]
    if min(shape) < 1 or prod(shape) > 1 << 50 or shape[-1] % block:
        raise ModelError(
            f"{path} has tensor {name} of shape {list(shape)}, which {type_name} can't have; download it again"
        )
    size = prod(shape) // block * block_bytes
    if offset % alignment:
        raise ModelError(f"{path} has tensor {name} at an offset that is not aligned; download it again")
    if data_start + offset + size > num_bytes:
        raise ModelError(f"{path} ends before or inside tensor {name}; the file is cut off, download it again")
    return StoredTensor(name, path, type_name, shape, data_start + offset, size)


class _Header:
    """The bytes of a header, read in large pieces. ``position`` is the offset of the next byte."""

    def __init__(self, path: Path, num_bytes: int, read: ReadRange) -> None:
        self.path = path
        self.position = 0
        self.num_bytes, self._read = num_bytes, read
        self._buffer, self._begin = b"", 0  # a piece, and its offset
        self._num_elements = 0  # of all arrays so far

    def take(self, length: int) -> bytes:
        start = self.position - self._begin
        if start + length > len(self._buffer):
            self._refill(length)
            start = 0
        self.position += length
        return self._buffer[start : start + length]

    def _refill(self, length: int) -> None:
        if self.position + length > self.num_bytes:
            raise ModelError(f"{self.path} ends inside its header; the file is cut off or damaged, download it again")
        if self.position + length > MAX_HEADER_BYTES:
            raise ModelError(f"{self.path} has a header of more than {MAX_HEADER_BYTES} bytes; download it again")
        wanted = min(max(length, _CHUNK_BYTES), self.num_bytes - self.position)
        pieces = [self._buffer[self.position - self._begin :]]
        while sum(map(len, pieces)) < wanted:
            piece = self._read(self.position + sum(map(len, pieces)), wanted - sum(map(len, pieces)))
            if not piece:
                raise ModelError(f"{self.path} ends inside its header; the file is cut off, download it again")
            pieces.append(piece)
        self._buffer, self._begin = b"".join(pieces), self.position

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def text(self, limit: int = MAX_HEADER_BYTES) -> str:
        length = int.from_bytes(self.take(8), "little")
        if length > limit:
            raise ModelError(f"{self.path} has a text of {length} bytes in its header; download it again")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path} has a text in its header that is not UTF-8; download it again") from None

    def value(self, name: str) -> Value:
        (kind,) = self.unpack("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(name)
        return self._numbers(name, kind, 1)[0]

    def _array(self, name: str) -> list[str] | list[int]:
        kind, count = self.unpack("IQ")
        self._num_elements += count
        if self._num_elements > _MAX_ELEMENTS:
            raise ModelError(f"{self.path} has {count} values for {name} in its header; download it again")
        return [self.text() for _ in range(count)] if kind == _STRING else list(self._numbers(name, kind, count))

    def _numbers(self, name: str, kind: int, count: int) -> tuple[int, ...]:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} has a value of type {kind} for {name}, which is unknown; download it again")
        values = self.unpack(f"{count}{_SCALARS[kind]}")
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise ModelError(f"{self.path} has a truth value other than 0 and 1 for {name}; download it again")
        return tuple(map(bool, values))
