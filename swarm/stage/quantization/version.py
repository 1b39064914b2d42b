"""Versions of what turns a file's bytes into packed matrices. Does not import torch."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

# Version of the decoders. Increase it when a file's bytes get other codes or scales: workers of unlike versions are no
# equals.
DECODERS: Final = 1

_STAGE = Path(__file__).parent.parent
# Modules outside of this package that decide which bytes a matrix gets: names, order of rows, and packing.
_OTHERS: Final = (
    "model/conversion.py",
    "model/gguf_names.py",
    "model/gguf_source.py",
    "modules/attention.py",
    "modules/experts.py",
    "modules/matrices.py",
    "native/quantized.py",
    "native/quantizing.py",
)


def decoder_sources() -> list[Path]:
    """Return the Python files on which the contents of a packed matrix depend."""
    return [*sorted(Path(__file__).parent.glob("*.py")), *(_STAGE / name for name in _OTHERS)]


@cache
def digest_decoders() -> str:
    """Return a digest of these files. It changes more often than :data:`DECODERS`, and belongs to the keys of packed
    matrices: what an earlier version of a decoder has packed on this machine must not be used."""
    total = sha256(f"{DECODERS}".encode())
    for path in decoder_sources():
        content = path.read_bytes()
        total.update(f"{path.relative_to(_STAGE).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()
