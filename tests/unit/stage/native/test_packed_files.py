"""Files of packed matrices: what is read back, what is refused, what makes way; without torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.stage.native import packed_files
from swarm.stage.native.packed_files import FIRST_NUMBER, CachedFile, PackedFiles, choose_removals

NUMBERS = bytes(range(256)) * 40
LIMIT = 1 << 30


def read(files: PackedFiles, name: str = "a", num_bytes: int = len(NUMBERS)) -> bytes | None:
    mapping = files.map(name, num_bytes)
    return None if mapping is None else mapping[FIRST_NUMBER:]


@pytest.fixture
def files(tmp_path: Path) -> PackedFiles:
    return PackedFiles(tmp_path / "packed", LIMIT)


def test_what_was_written_is_mapped(files: PackedFiles) -> None:
    """By another process, too: nothing but the folder is shared. Whoever writes to the mapping changes no file."""
    assert read(files) is None
    assert files.write("a", memoryview(NUMBERS))
    mapping = files.map("a", len(NUMBERS))
    assert mapping is not None
    assert mapping[FIRST_NUMBER:] == NUMBERS
    mapping[FIRST_NUMBER] = 77
    assert read(files) == NUMBERS


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "header only": lambda whole: whole[:FIRST_NUMBER],
    "empty": lambda _: b"",
    "one bit": lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    "header": lambda whole: b"swarm packed matrix 0" + whole[21:],
    "zeros": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_counts_as_missing(files: PackedFiles, tmp_path: Path, how: str) -> None:
    """It is removed, and can be written again."""
    files.write("a", memoryview(NUMBERS))
    path = tmp_path / "packed" / "a"
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    assert read(files) is None
    assert not path.exists()
    files.write("a", memoryview(NUMBERS))
    assert read(files) == NUMBERS


def test_a_file_of_another_size_is_not_this_matrix(files: PackedFiles) -> None:
    files.write("a", memoryview(NUMBERS))
    assert read(files, num_bytes=len(NUMBERS) + 1) is None


@pytest.mark.parametrize("error", [PermissionError(1, "not the owner"), OSError(30, "read-only file system")])
def test_a_file_whose_use_can_t_be_noted_is_mapped(
    files: PackedFiles, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """Another user's, or one on a read-only disk: it may be removed sooner, and has the same numbers."""
    files.write("a", memoryview(NUMBERS))

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(packed_files.os, "utime", refuse)
    assert read(files) == NUMBERS


def test_other_users_may_read_the_files(files: PackedFiles, tmp_path: Path) -> None:
    files.write("a", memoryview(NUMBERS))
    assert (tmp_path / "packed" / "a").stat().st_mode & 0o777 == 0o644


def test_a_mapping_outlives_its_file(files: PackedFiles, tmp_path: Path) -> None:
    """Another process may remove the file to make space."""
    files.write("a", memoryview(NUMBERS))
    mapping = files.map("a", len(NUMBERS))
    (tmp_path / "packed" / "a").unlink()
    assert mapping is not None
    assert mapping[FIRST_NUMBER:] == NUMBERS


def test_a_file_that_can_t_be_written_leaves_nothing(
    files: PackedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write("a", memoryview(NUMBERS))
    assert list((tmp_path / "packed").iterdir()) == []


def cached(*used_at: float) -> list[CachedFile]:
    """Files of ten bytes."""
    return [CachedFile(Path(f"f{number}"), 10, at) for number, at in enumerate(used_at)]


@pytest.mark.parametrize(
    ("used_at", "num_bytes", "limit", "expected"),
    [
        ((1, 2, 3), 10, 40, []),
        ((3, 1, 2), 10, 30, ["f1"]),
        ((3, 1, 2), 11, 30, ["f1", "f2"]),
        ((3, 1, 2), 30, 30, ["f1", "f2", "f0"]),
        ((3, 1, 2), 31, 30, None),  # larger than the cache
        ((3, 100, 2), 10, 30, ["f2"]),
        ((101, 100, 102), 10, 30, None),  # all of them are in use
        ((101, 1, 102), 20, 30, None),
        ((), 10, 5, None),
        ((), 10, -5, None),
    ],
)
def test_the_least_recently_used_make_way(
    used_at: tuple[float, ...], num_bytes: int, limit: int, expected: list[str] | None
) -> None:
    """If that helps; what was used since this process began (100) stays."""
    chosen = choose_removals(cached(*used_at), num_bytes, limit, in_use_since=100)
    assert (None if chosen is None else [file.path.name for file in chosen]) == expected


def test_the_total_stays_below_the_limit(tmp_path: Path) -> None:
    """A later process removes what it has not used itself."""
    size = FIRST_NUMBER + len(NUMBERS)
    for name in "ab":
        assert PackedFiles(tmp_path, 2 * size).write(name, memoryview(NUMBERS))
        os.utime(tmp_path / name, (1, {"a": 1, "b": 2}[name]))
    files = PackedFiles(tmp_path, 2 * size)
    assert read(files, "a") == NUMBERS  # which makes it the most recently used
    assert files.write("c", memoryview(NUMBERS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    assert not files.write("d", memoryview(NUMBERS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_a_part_of_the_disk_stays_free(files: PackedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    for free, has_space in ((1 << 20) // 20, False), (1 << 19, True):
        disk = usage._replace(total=1 << 20, free=free)
        monkeypatch.setattr(packed_files.shutil, "disk_usage", lambda _, disk=disk: disk)
        assert files.write("a", memoryview(NUMBERS)) == has_space


def test_leftovers_of_processes_that_ended_make_way(tmp_path: Path) -> None:
    """What another process is writing does not."""
    size = FIRST_NUMBER + len(NUMBERS)
    (tmp_path / ".old").write_bytes(bytes(size))
    (tmp_path / ".new").write_bytes(bytes(size))
    os.utime(tmp_path / ".old", (1, 1))
    assert PackedFiles(tmp_path, 2 * size).write("a", memoryview(NUMBERS))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new", "a"]
