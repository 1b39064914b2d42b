"""Files of the page: read once at startup, each with its ETag and a compressed copy."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parent / "page"
FIRST: Final = "index.html"
_KINDS: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page: its content, compressed content, media type and ETag."""

    content: bytes
    packed: bytes
    kind: str
    tag: str

    def headers(self, *, is_packed: bool) -> dict[str, str]:
        headers = {"etag": self.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        return headers | ({"content-encoding": "gzip"} if is_packed else {})


def load_page_files(folder: Path = PAGE) -> Mapping[str, PageFile]:
    """Return the files by path: ``/`` is the page itself, all others are below ``/console/``."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _KINDS and path.is_file():
            name = path.relative_to(folder).as_posix()
            files["/" if name == FIRST else f"/console/{name}"] = _read_file(path)
    return files


def _read_file(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return PageFile(content, gzip.compress(content, 9, mtime=0), _KINDS[path.suffix], tag)
