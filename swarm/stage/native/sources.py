"""The C files that the library is made of: what the build compiles, and by what a built library is known.

Only the standard library is imported here: the build runs this file before anything is installed.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

VARIANTS = "variants"  # the folder of kernels for one kind of processor each


def sources(folder: Path) -> list[Path]:
    """List the C sources and headers of a folder and of the folders in it, sorted by their names there."""
    found = [path for pattern in ("*.[ch]", "*/*.[ch]") for path in folder.glob(pattern)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def digest(folder: Path) -> str:
    """Digest all names and contents; empty if there are none. Dates don't count: a package's files get
    theirs in whatever order they are unpacked."""
    found = sources(folder)
    total = sha256()
    for path in found:
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest() if found else ""
