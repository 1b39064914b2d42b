"""Files of the page: read once at startup, each with its ETag and a compressed copy."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parent / "page"
API_PAGE: Final = Path(__file__).parent / "api_page"
_ROUTES: Final = {"index.html": "/", "docs.html": "/docs"}  # all others are below /console/
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


def load_page_files(*folders: Path) -> Mapping[str, PageFile]:
    """Return the files by path: ``/`` is the page itself, ``/docs`` the description of the API, which needs nothing
    from other servers; all others are below ``/console/``."""
    files = {}
    for folder in folders or (PAGE, API_PAGE):
        for path in sorted(folder.rglob("*")):
            if path.suffix in _KINDS and path.is_file():
                name = path.relative_to(folder).as_posix()
                files[_ROUTES.get(name, f"/console/{name}")] = _read_file(path)
    return files


def _read_file(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return PageFile(content, gzip.compress(content, 9, mtime=0), _KINDS[path.suffix], tag)
