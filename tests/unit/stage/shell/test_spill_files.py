"""Files of keys and values on the disk: whole, private, bounded, and found again only as what they are."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from pathlib import Path

import msgspec
import numpy as np
import pytest

from swarm.stage.shell import spill_files
from swarm.stage.shell.spill_files import ChunkFile, SpillFiles
from swarm.stage.shell.spill_thread import model_digest, open_spill_files
from swarm.testing import fake_manifest

MODEL = "0" * 32
NUMBERS = np.arange(1000, dtype=np.float32)
SIZE = 4000 + 56
Disk = namedtuple("Disk", "total used free")


def file(index: int = 0, layer: int = 0, name: str = "ab" * 20, model: str = MODEL) -> ChunkFile:
    return ChunkFile(model, name, index, layer)


@pytest.fixture
def files(tmp_path: Path) -> SpillFiles:
    return SpillFiles(tmp_path / "kv", 1 << 20)


def test_what_was_written_is_read_by_another_process(files: SpillFiles, tmp_path: Path) -> None:
    assert files.read(file()) is None
    assert files.write(file(), "float32", NUMBERS)
    half = NUMBERS.astype(np.uint16)
    assert files.write(file(1), "bfloat16", half)
    later = SpillFiles(tmp_path / "kv", 1 << 20)
    for number, dtype, expected in ((0, "float32", NUMBERS), (1, "bfloat16", half)):
        found = later.read(file(number))
        assert found is not None
        assert found[0] == dtype
        assert found[1].dtype == expected.dtype
        np.testing.assert_array_equal(found[1], expected)
    assert later.num_damaged == 0


def test_files_are_private(files: SpillFiles, tmp_path: Path) -> None:
    files.write(file(), "float32", NUMBERS)
    path = file().path(tmp_path / "kv")
    assert path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in path.parents if tmp_path in folder.parents} == {0o700}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing unfinished stays"


@pytest.mark.parametrize("at", [0, 20, 35, 48, 56, 2000, 4055])
def test_a_flipped_bit_anywhere_makes_it_missing(files: SpillFiles, tmp_path: Path, at: int) -> None:
    files.write(file(), "float32", NUMBERS)
    path = file().path(tmp_path / "kv")
    content = bytearray(path.read_bytes())
    assert len(content) == SIZE
    content[at] ^= 4
    path.write_bytes(content)
    assert files.read(file()) is None
    assert (files.num_damaged, path.exists()) == (1, False)
    assert files.write(file(), "float32", NUMBERS)
    assert files.read(file()) is not None


@pytest.mark.parametrize("length", [0, 10, 56, 3000])
def test_a_torn_file_is_missing(files: SpillFiles, tmp_path: Path, length: int) -> None:
    files.write(file(), "float32", NUMBERS)
    os.truncate(file().path(tmp_path / "kv"), length)
    assert files.read(file()) is None
    assert files.num_damaged == 1


def test_a_torn_file_is_written_again(files: SpillFiles, tmp_path: Path) -> None:
    files.write(file(), "float32", NUMBERS)
    os.truncate(file().path(tmp_path / "kv"), 0)
    assert files.write(file(), "float32", NUMBERS)
    assert files.read(file()) is not None
    assert (files.num_damaged, files.num_written) == (1, 2)


# --- other users and other kinds of files ----------------------------------------------------------------------------


def test_a_folder_that_others_can_write_is_not_used(files: SpillFiles, tmp_path: Path) -> None:
    files.write(file(), "float32", NUMBERS)
    (tmp_path / "kv").chmod(0o777)
    assert files.read(file()) is None
    for number in (0, 1):
        with pytest.raises(PermissionError, match="others may write"):
            files.write(file(number), "float32", NUMBERS)
    (tmp_path / "kv").chmod(0o700)
    assert files.read(file()) is not None


def test_a_folder_or_file_of_another_user_is_not_used(
    files: SpillFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(file(), "float32", NUMBERS)
    own = os.geteuid()
    monkeypatch.setattr(spill_files.os, "geteuid", lambda: own + 1)
    assert files.read(file()) is None
    with pytest.raises(PermissionError, match="another user"):
        files.write(file(), "float32", NUMBERS)
    monkeypatch.setattr(files, "_check_root", lambda: None)
    assert files.read(file()) is None
    assert files.num_damaged == 1


def test_nothing_is_written_through_a_link(files: SpillFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a file is, nor where it is being written."""
    victim, path = tmp_path / "victim", file().path(tmp_path / "kv")
    victim.write_text("precious")
    path.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "kv").chmod(0o700)
    path.symlink_to(victim)
    assert files.read(file()) is None
    path.symlink_to(victim)
    assert files.write(file(), "float32", NUMBERS)
    assert not path.is_symlink()
    monkeypatch.setattr(spill_files.secrets, "token_hex", lambda _: "name")
    path.with_name(".name").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write(file(1), "float32", NUMBERS)
    assert victim.read_text() == "precious"


def test_a_pipe_or_an_endless_file_is_removed_unread(files: SpillFiles, tmp_path: Path) -> None:
    path = file().path(tmp_path / "kv")
    files.write(file(), "float32", NUMBERS)
    path.unlink()
    os.mkfifo(path)
    assert files.read(file()) is None  # opening it would wait for a writer
    assert not path.exists()
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: reading it would take all memory
    assert files.read(file()) is None
    assert not path.exists()
    assert files.num_damaged == 2


@pytest.mark.parametrize(
    "other",
    [file(layer=1), file(index=1), file(name="cd" * 20), file(model="1" * 32)],
    ids=lambda other: str(other)[:60],
)
def test_a_file_under_another_name_is_missing(files: SpillFiles, tmp_path: Path, other: ChunkFile) -> None:
    """Somebody has renamed it, or a disk has mixed up two files."""
    files.write(file(), "float32", NUMBERS)
    path = other.path(tmp_path / "kv")
    path.parent.mkdir(parents=True, exist_ok=True)
    file().path(tmp_path / "kv").rename(path)
    assert files.read(other) is None
    assert files.num_damaged == 1


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path, 10 * SIZE)
    for index in range(10):
        files.write(file(index, name=f"{index:02}" * 20), "float32", NUMBERS)
        old = time.time() - 100_000 + 1000 * index
        os.utime(file(index, name=f"{index:02}" * 20).path(tmp_path), (old, old))
    assert files.read(file(0, name="00" * 20)) is not None
    assert files.write(file(10, name="10" * 20), "float32", NUMBERS)
    left = {path.name[:5] for path in tmp_path.glob("*/*/*")}
    assert "00001" not in left
    assert {"00000", "00010", "00009"} <= left
    assert files.num_removed >= 1
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 10 * SIZE


def test_of_one_prompt_the_end_goes_first(tmp_path: Path) -> None:
    """A chunk is of no use without those before it."""
    files = SpillFiles(tmp_path, 10 * SIZE)
    for index in range(10):
        files.write(file(index), "float32", NUMBERS)
    files.write(file(0, name="cd" * 20), "float32", NUMBERS)
    left = sorted(path.name[:5] for path in tmp_path.glob(f"{MODEL}/ab/*"))
    assert left == [f"{index:05}" for index in range(len(left))]
    assert len(left) < 10


def test_files_of_others_count(tmp_path: Path) -> None:
    """Of other workers and other models: the limit is the folder's."""
    mine, theirs = SpillFiles(tmp_path, 32 * SIZE), SpillFiles(tmp_path, 32 * SIZE)
    for index in range(64):
        assert mine.write(file(index), "float32", NUMBERS)
        assert theirs.write(file(index, model="1" * 32), "float32", NUMBERS)
        total = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
        assert total <= 34 * SIZE, "each may write a sixteenth until it looks again"


def test_too_small_a_limit_writes_nothing(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "kv", 1000)
    assert not files.write(file(), "float32", NUMBERS)
    assert not list(tmp_path.glob("kv/*/*/*"))


def test_a_twentieth_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SpillFiles(tmp_path, 1 << 20)
    free = 1000 * SIZE

    def usage(_: Path) -> Disk:
        taken = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
        return Disk(1000 * SIZE, 0, free - taken)

    monkeypatch.setattr(spill_files.shutil, "disk_usage", usage)
    for index in range(4):
        assert files.write(file(index), "float32", NUMBERS)
    free = 52 * SIZE
    assert files.write(file(0, name="cd" * 20), "float32", NUMBERS)
    assert usage(tmp_path).free >= 50 * SIZE
    free = 49 * SIZE
    assert not files.write(file(1, name="cd" * 20), "float32", NUMBERS)
    assert not list(tmp_path.glob("*/*/*")), "what others need is theirs"


def test_a_lower_limit_and_the_size_are_known_from_the_start(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path, 100 * SIZE)
    for index in range(40):
        files.write(file(index), "float32", NUMBERS)
    later = SpillFiles(tmp_path, 100 * SIZE)
    later.tidy()
    assert (later.num_bytes, later.num_removed) == (40 * SIZE, 0)
    lower = SpillFiles(tmp_path, 16 * SIZE)
    lower.tidy()
    assert lower.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) == 15 * SIZE
    assert lower.num_removed == 25


def test_without_a_limit_old_files_and_empty_folders_go(tmp_path: Path) -> None:
    """What was used lately may be another worker's."""
    files = SpillFiles(tmp_path, 100 * SIZE)
    old, recent = file(model="1" * 32), file()
    for each in (old, recent):
        files.write(each, "float32", NUMBERS)
    long_ago = time.time() - 90_000
    os.utime(old.path(tmp_path), (long_ago, long_ago))
    SpillFiles(tmp_path, 0).tidy()
    assert [path.name for path in tmp_path.iterdir()] == [MODEL]
    assert recent.path(tmp_path).exists()
    recent.path(tmp_path).unlink()
    SpillFiles(tmp_path, 0).tidy()
    assert list(tmp_path.iterdir()) == []
    SpillFiles(tmp_path / "absent", 0).tidy()
    assert not (tmp_path / "absent").exists()


def test_settings_without_spill_look_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    SpillFiles(tmp_path / "kv", 1 << 20).write(file(), "float32", NUMBERS)
    os.utime(file().path(tmp_path / "kv"), (1, 1))
    assert open_spill_files(0) is None
    assert list((tmp_path / "kv").iterdir()) == []
    (tmp_path / "kv").chmod(0o777)
    assert open_spill_files(0) is None  # and a warning, no error


def test_an_error_leaves_nothing_behind(files: SpillFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(file(), "float32", NUMBERS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill_files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        files.write(file(1), "float32", NUMBERS)
    assert [path.name[:5] for path in tmp_path.glob("kv/*/*/*")] == ["00000"]


def test_what_a_killed_process_left_unfinished_goes(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path, 1 << 20)
    files.write(file(), "float32", NUMBERS)
    folder = file().path(tmp_path).parent
    old, new = folder / ".1-1", folder / ".2-1"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    SpillFiles(tmp_path, 1 << 20).write(file(1), "float32", NUMBERS)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_read_only_folder_is_read(files: SpillFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(file(), "float32", NUMBERS)

    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(spill_files.os, "utime", denied)
    assert files.read(file()) is not None


def test_a_model_is_its_files_its_quantization_its_code_and_its_bits_not_its_name() -> None:
    plain = fake_manifest()
    digest = model_digest(plain, "code", "bits")
    assert digest == model_digest(fake_manifest(name="renamed"), "code", "bits")
    others = [
        model_digest(plain, "code", "other bits"),
        model_digest(plain, "other code", "bits"),
        model_digest(plain, "codeb", "its"),
        model_digest(fake_manifest(vocab_size=98), "code", "bits"),
        model_digest(msgspec.structs.replace(plain, weights="int4"), "code", "bits"),
    ]
    assert len({digest, *others}) == 6
