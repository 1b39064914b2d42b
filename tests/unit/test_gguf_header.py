"""Headers of GGUF files: read without their data, and refused with one clear error where they are damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import ModelError
from swarm.hub.gguf import TYPES, GgufFile, parse_gguf, part_names, read_gguf
from tests.gguf_headers import llama_tensors, write_file

HERE = Path("model.gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    extents = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + extents + struct.pack("<IQ", kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], num_bytes: int = 4096, start: bytes = b"GGUF\3\0\0\0") -> bytes:
    """A file with these parts, and zeros up to its size."""
    header = start + struct.pack("<QQ", len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return header + bytes(max(0, num_bytes - len(header)))


def parse(content: bytes) -> GgufFile:
    return parse_gguf(HERE, len(content), lambda offset, length: content[offset : offset + length])


def test_the_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == TYPES


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_array("some.words", ["a", "", "ä▁"])
        writer.add_array("some.numbers", [1, -2, 3])
        writer.add_bool("some.flag", True)
        writer.add_float64("some.number", 0.1)

    path = write_file(tmp_path / "tiny.gguf", change=change)
    model, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    } == model.metadata
    assert [
        (each.name, tuple(reversed(each.shape.tolist())), each.data_offset, each.n_bytes) for each in theirs.tensors
    ] == [(each.name, each.shape, each.offset, each.num_bytes) for each in model.files[0].tensors]


def test_only_the_header_is_read(tmp_path: Path) -> None:
    content = write_file(tmp_path / "tiny.gguf", llama_tensors() | {"output.weight": (12, 1 << 20)}).read_bytes()
    ranges: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        ranges.append((offset, length))
        return content[offset : offset + length]

    assert len(parse_gguf(HERE, len(content), read).tensors) == len(llama_tensors()) + 1
    assert sum(length for _, length in ranges) <= 1 << 20


TENSOR = described("a", (4, 32), 0, 0)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "another kind of file": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "nothing": (b"", "ends inside its header"),
    "big-endian": (file_of([], [], start=b"GGUF\0\0\0\3"), "big-endian"),
    "an old version": (file_of([], [], start=b"GGUF\1\0\0\0"), "version 1"),
    "absurd counts": (b"GGUF\3\0\0\0" + struct.pack("<QQ", 1 << 60, 1 << 60) + bytes(100), "more than it has room for"),
    "an absurd array": (
        file_of([text("a") + struct.pack("<IIQ", 9, 4, 1 << 40)], []),
        f"{1 << 40} values for a",
    ),
    "many arrays": (
        file_of(
            [text(key) + struct.pack("<IIQ", 9, 0, 1 << 21) + bytes(1 << 21) for key in "ab"]
            + [text("c") + struct.pack("<IIQB", 9, 0, 1, 0)],
            [],
        ),
        "1 values for c",
    ),
    "a truth value of 2": (file_of([text("a") + struct.pack("<IB", 7, 2)], []), "truth value"),
    "an absurd text": (file_of([text("a") + struct.pack("<IQ", 8, 1 << 50)], []), "text of"),
    "an unknown value": (file_of([text("a") + struct.pack("<I", 99)], []), "type 99"),
    "a list of lists": (file_of([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "type 9"),
    "a text that is none": (file_of([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)], []), "not UTF-8"),
    "a key twice": (file_of([number("a", 1), number("a", 2)], []), "key a twice"),
    "no alignment": (file_of([number("general.alignment", 0)], []), "aligns its tensors to 0"),
    "a tensor twice": (file_of([], [TENSOR, described("a", (4, 32), 0, 512)]), "two tensors with one name"),
    "tensors in each other": (file_of([], [TENSOR, described("b", (4, 32), 0, 256)]), "bytes of another one"),
    "an unknown type": (file_of([], [described("a", (4, 32), 77, 0)]), "type 77"),
    "a row that is no whole block": (file_of([], [described("a", (4, 33), 2, 0)]), "which Q4_0 can't have"),
    "an empty tensor": (file_of([], [described("a", (4, 0), 0, 0)]), "which F32 can't have"),
    "too many dimensions": (file_of([], [described("a", (1, 1, 1, 1, 1), 0, 0)]), "5 dimensions"),
    "a huge tensor": (file_of([], [described("a", (1 << 62, 1 << 62), 0, 0)]), "which F32 can't have"),
    "a crooked offset": (file_of([], [described("a", (4, 32), 0, 8)]), "not aligned"),
    "a tensor behind the end": (file_of([], [described("a", (4, 32), 0, 8192)]), "cut off"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_one_clear_error(name: str) -> None:
    content, why = DAMAGED[name]
    with pytest.raises(ModelError, match=r"model\.gguf") as raised:
        parse(content)
    assert why in str(raised.value)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    content = write_file(tmp_path / "tiny.gguf").read_bytes()
    assert len(parse(content).tensors) == 20
    end = max(tensor.offset + tensor.num_bytes for tensor in parse(content).tensors)
    for length in (*range(0, 2000, 7), end - 1):
        with pytest.raises(ModelError):
            parse(content[:length])


WHOLE = file_of(
    [number("general.alignment", 32), text("b") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("y")],
    [described("a", (4, 32), 0, 0), described("b", (2, 32), 8, 512)],
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 260), st.integers(0, 255)), max_size=4), st.integers(0, len(WHOLE)))
def test_any_damage_is_an_error_of_the_file_or_keeps_its_bounds(damage: list[tuple[int, int]], length: int) -> None:
    content = bytearray(WHOLE)
    for place, byte in damage:
        content[place] = byte
    for each in (bytes(content), bytes(content[:length])):
        try:
            file = parse(each)
        except ModelError:
            continue
        assert all(0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(each) for tensor in file.tensors)


def split(folder: Path, change: Callable[[int], dict[str, int]] = lambda _: {}) -> list[Path]:
    """The tiny model in two parts."""
    tensors = list(llama_tensors().items())
    paths = []
    for part, some in enumerate((tensors[:9], tensors[9:])):
        writer = gguf.GGUFWriter(folder / f"m-{part + 1:05}-of-00002.gguf", "llama")
        keys = {"split.no": part, "split.count": 2, "split.tensors.count": len(tensors)} | change(part)
        for key, value in keys.items():
            writer.add_uint16(key, value)
        for name, shape in some:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(folder / f"m-{part + 1:05}-of-00002.gguf")
    return paths


def test_any_part_of_a_split_model_stands_for_all_of_them(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        model = read_gguf(path)
        assert model.tensors.keys() == llama_tensors().keys()
        assert (model.name, [file.path for file in model.files]) == ("m", paths)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda part: {"split.no": 0}, "not part 2 of 2"),
        (lambda part: {"split.count": 3}, "a part of 3"),
        (lambda part: {"split.tensors.count": 20 + part}, "another model"),
        (lambda part: {"split.tensors.count": 21}, "20 tensors instead of 21"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Callable[[int], dict[str, int]], why: str
) -> None:
    paths = split(tmp_path, change)
    with pytest.raises(ModelError, match=why):
        read_gguf(paths[0])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf is missing"):
        read_gguf(first)
    with pytest.raises(ModelError, match="outside of its own 2 parts"):
        part_names("m-00003-of-00002.gguf")


def test_a_part_with_the_name_of_a_whole_file_is_refused(tmp_path: Path) -> None:
    first, _ = split(tmp_path)
    with pytest.raises(ModelError, match="keep the names"):
        read_gguf(first.rename(tmp_path / "m.gguf"))
