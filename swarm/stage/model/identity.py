"""Digests that identify a model's files: whether two workers have the same weights.

====================================================  =====================================================
a file of the model                                   its digest
====================================================  =====================================================
on a hub, or in a hub's cache                         the sha256 by which the hub names it; its bytes need
                                                      not be here, and are not read
in a folder that the hub's own tool downloaded        the same, from the tool's note next to the file, unless
(``hf download --local-dir``)                         the file is younger than the note
anywhere else, up to 64 MiB                           the sha256 of its bytes: the same again
anywhere else, larger                                 xxh3-128 of its size, its header and pieces of its data
====================================================  =====================================================

All of these can be compared with each other, except that a large file in a plain copy of a folder can be compared with
other plain copies only. (For its sha256, all of it would have to be read before the worker can join: a minute and more
for 100 GB, of which the worker may need a tenth.) The two kinds of digest differ in length, so they cannot be confused.
If some workers have the one and some the other, they get an error that asks to name the model in the same way.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import xxhash

from swarm.hub.gguf import MAGIC as GGUF_MAGIC
from swarm.hub.headers import MAX_HEADER_BYTES

MAX_WHOLE_BYTES = 64 << 20  # largest file that is hashed as a whole
_NUM_PIECES = 256  # pieces of a larger file that are hashed
_PIECE_BYTES = 16 << 10
_GGUF_HEADER_BYTES = 16 << 20  # a GGUF file does not have its header's size; the largest vocabularies take 10 MiB

_SHA256 = re.compile(r"[0-9a-f]{64}")


def compute_digest(path: Path) -> str:
    """Return the digest of a local file of the model, by the table above."""
    recorded = _recorded_sha256(path)
    if recorded is not None:
        return recorded
    return _compute_sha256(path) if path.stat().st_size <= MAX_WHOLE_BYTES else _sample_digest(path)


def is_sampled(digest: str) -> bool:
    """Whether a digest is of pieces of a file only."""
    return not _SHA256.fullmatch(digest)


def describe_version(path: Path) -> str:
    """Return a text that changes with every change of a local file: its size and when it was written."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def compute_xxh3(path: Path) -> str:
    """Return xxh3-128 of a whole file: for small files that are sent on and verified by the receiver."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _recorded_sha256(path: Path) -> str | None:
    """Return the sha256 that the hub's tools have recorded for this file; None if there is none.

    In a hub's cache, a file is a link to ``blobs/SHA256``. In a downloaded folder it has a note: commit, sha256, time
    of the download. (Small files have another kind of name there, which is not usable.)
    """
    real = path.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    note = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    try:
        _, digest, noted_at = note.read_text("utf-8").split()
        is_valid = path.stat().st_mtime <= float(noted_at) + 1  # the same rule as the tool's
    except (OSError, ValueError):
        return None
    return digest if is_valid and _SHA256.fullmatch(digest) else None


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")  # of the header, which has the names and offsets of all tensors
        if start.startswith(GGUF_MAGIC):
            digest.update(start)
            length = _GGUF_HEADER_BYTES
        digest.update(file.read(min(length, MAX_HEADER_BYTES)))
        for number in range(_NUM_PIECES):
            file.seek((size - _PIECE_BYTES) * number // (_NUM_PIECES - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
