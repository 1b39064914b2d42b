"""By what files of weights are known."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from swarm.stage.model import identity
from swarm.stage.model.identity import compute_digest

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def test_a_small_file_is_known_by_its_sha256(plain: Path) -> None:
    """As a hub knows it."""
    assert compute_digest(plain) == SHA256


def test_a_large_file_is_known_by_pieces_of_it(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest can't be mistaken for the other kind; it tells size, beginning, middle and end apart."""
    monkeypatch.setattr(identity, "MAX_WHOLE_BYTES", 1000)
    digests = {compute_digest(plain)}
    for changed in (
        CONTENT + b"1",
        b"1" + CONTENT[1:],
        CONTENT[:50_000] + b"1" + CONTENT[50_001:],
        CONTENT[:-1] + b"1",
    ):
        plain.write_bytes(changed)
        digests.add(compute_digest(plain))
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {32}


def test_a_large_gguf_file_is_known_by_its_whole_header(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with a word, not with the size of its header: a change between two pieces is found there alone."""
    monkeypatch.setattr(identity, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_GGUF_HEADER_BYTES", 1000)
    monkeypatch.setattr(identity, "_PIECE_BYTES", 10)
    digests = []
    for place in (100, 900, 1100):
        content = bytearray(b"GGUF" + CONTENT)
        before = compute_digest(plain) if plain.write_bytes(content) else ""
        content[place] ^= 1
        plain.write_bytes(content)
        digests.append(compute_digest(plain) != before)
    assert digests == [True, True, False]


def test_a_file_in_a_hubs_cache_is_known_without_being_read(tmp_path: Path) -> None:
    """It is a link to a file whose name is the sha256. Names of another kind (of small files) tell nothing."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("model.safetensors", "a" * 64), ("config.json", "b" * 40)):
        (blobs / blob).write_bytes(CONTENT)
        (snapshot / name).symlink_to(blobs / blob)
    assert compute_digest(snapshot / "model.safetensors") == "a" * 64
    assert compute_digest(snapshot / "config.json") == SHA256


def test_a_downloaded_folder_has_notes(plain: Path) -> None:
    """The hub's tool writes beside each file what it is; a file that was changed since is read."""
    note = plain.parent / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"0123\n{'a' * 64}\n1000.0\n")
    os.utime(plain, (999.0, 999.0))
    assert compute_digest(plain) == "a" * 64
    os.utime(plain, (1002.0, 1002.0))
    assert compute_digest(plain) == SHA256


@pytest.mark.parametrize("text", ["", "0123\n", f"0123\n{'a' * 40}\n1000.0", f"0123\n{'a' * 64}\nyesterday"])
def test_notes_that_say_nothing(plain: Path, text: str) -> None:
    """Damaged ones, and of small files."""
    note = plain.parent / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(text)
    os.utime(plain, (999.0, 999.0))
    assert compute_digest(plain) == SHA256
