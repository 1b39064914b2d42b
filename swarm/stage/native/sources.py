"""List of the library's C files, and the digest that identifies them.

Only the standard library is imported here: the build runs this file before anything is installed.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

VARIANTS = "variants"  # folder of variants, each for one kind of processor


def sources(folder: Path) -> list[Path]:
    """List the C sources and headers of a folder and its subfolders, sorted by name."""
    found = [path for pattern in ("*.[ch]", "*/*.[ch]") for path in folder.glob(pattern)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def digest(folder: Path) -> str:
    """Return a digest of all names and contents; empty if there are none. Dates do not count, since unpacking sets
    them."""
    found = sources(folder)
    total = sha256()
    for path in found:
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest() if found else ""
