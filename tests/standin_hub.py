"""A stand-in for a model hub, on loopback: what the package huggingface_hub asks a real one for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

NAME = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the stand-in serves and how it misbehaves; ``asked`` is what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None  # status and error code for everything
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # bytes of a file after which it ends
    cut_once: set[str] = field(default_factory=set)  # files that are cut in the middle, the first time only
    answers_ranges: bool = True
    has_other_sizes: bool = False  # ranges are of a file of another size than was reported
    has_other_etags: bool = False  # of another content
    has_other_commits: bool = False  # of another commit
    redirects: bool = False  # of large files, to another host
    cut_ranges: dict[str, int] = field(default_factory=dict)  # bytes of a range's answer after which it breaks off
    tells_sha256: bool = True
    asked: list[str] = field(default_factory=list)  # method and path, of files with the range that was asked for
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in order; parts of a file, such as headers, don't count."""
        start = f"GET /{NAME}/resolve/{COMMIT}/"
        return [line.removeprefix(start) for line in self.asked if line.startswith(start) and " bytes=" not in line]

    def fetched_weights(self) -> list[str]:
        return [name for name in self.fetched() if name.endswith(".safetensors")]

    def bytes_of(self, name: str) -> int:
        """How many bytes of a file were asked for in ranges."""
        start = f"GET /{NAME}/resolve/{COMMIT}/{name} bytes="
        ranges = [line.removeprefix(start).split("-") for line in self.asked if line.startswith(start)]
        return sum(min(int(last) + 1, len(self.files[name])) - int(first) for first, last in ranges)

    def parts(self) -> list[str]:
        """The files of which parts were asked for."""
        start = f"GET /{NAME}/resolve/{COMMIT}/"
        asked = [line.removeprefix(start) for line in self.asked if line.startswith(start)]
        return [line.partition(" bytes=")[0] for line in asked if " bytes=" in line]


class Handler(BaseHTTPRequestHandler):
    """The endpoints that the package uses: a repository's description, its tree, and its files."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *rest: object) -> None:
        self.hub = hub
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked_range = self.headers.get("Range")
        self.hub.asked.append(f"{self.command} {path}" + (f" {asked_range}" if asked_range else ""))
        if self.hub.refusal is not None:
            self.reply(self.hub.refusal[0], b"", {"X-Error-Code": self.hub.refusal[1]} if self.hub.refusal[1] else {})
        elif path in (f"/api/models/{NAME}", *(f"/api/models/{NAME}/revision/{name}" for name in ("main", COMMIT))):
            self.reply_json({"id": NAME, "sha": COMMIT, "siblings": [self.sibling(name) for name in self.hub.files]})
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self.reply_json([self.entry(name) for name in self.hub.files])
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            if self.hub.redirects and name in self.hub.files and self.is_large(name):
                self.redirect(name)
            else:
                self.reply_file(name)
        elif path.startswith("/cdn/"):
            self.reply_file(path.removeprefix("/cdn/"))
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def sibling(self, name: str) -> dict[str, object]:
        size = self.hub.claimed_sizes.get(name, len(self.hub.files[name]))
        found: dict[str, object] = {"rfilename": name, "size": size}
        if self.is_large(name):
            found["lfs"] = {"sha256": self.etag(name), "size": size, "pointerSize": 134}
        return found

    def is_large(self, name: str) -> bool:
        """Kept apart from the repository's small files, and named by its sha256."""
        return name.endswith((".safetensors", ".gguf")) and self.hub.tells_sha256

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": self.etag(name)}

    def etag(self, name: str) -> str:
        content = self.hub.files[name]
        return (hashlib.sha256(content) if self.is_large(name) else hashlib.sha1(content)).hexdigest()

    def redirect(self, name: str) -> None:
        """Large files come from elsewhere; the redirection has what identifies them."""
        size = str(len(self.hub.files[name]))
        linked = {"X-Linked-Etag": f'"{self.etag(name)}"', "X-Linked-Size": size, "X-Repo-Commit": COMMIT}
        host = self.hub.endpoint.replace("127.0.0.1", "localhost")
        self.reply(302, b"", {"Location": f"{host}/cdn/{name}", "ETag": f'"{"1" * 40}"', **linked})

    def reply_file(self, name: str) -> None:
        if name not in self.hub.files:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        whole = self.hub.files[name]
        etag = "0" * 64 if self.hub.has_other_etags else self.etag(name)
        commit = COMMIT[::-1] if self.hub.has_other_commits else COMMIT
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if self.path.startswith("/cdn/"):
            headers = {"ETag": '"another-kind-of-tag"'}
        asked = self.headers.get("Range") if self.hub.answers_ranges else None
        start, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        content = whole[int(start) : int(last) + 1 if last else self.hub.cut.get(name, len(whole))]
        if self.command == "HEAD":
            self.reply(200, whole, headers)
            return
        if asked is not None:
            size = len(whole) + self.hub.has_other_sizes
            headers["Content-Range"] = f"bytes {start}-{int(start) + len(content) - 1}/{size}"
        is_cut = name in self.hub.cut_once and not last
        self.hub.cut_once -= {name} if is_cut else set()
        num_sent = len(content) // 2 if is_cut else None
        if last and len(content) > self.hub.cut_ranges.get(name, len(content)):
            num_sent = self.hub.cut_ranges[name]
        self.reply(200 if asked is None else 206, content, headers, num_sent)

    def reply_json(self, data: object) -> None:
        self.reply(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, content: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:num_sent])
        if num_sent is not None:
            self.close_connection = True


@contextlib.contextmanager
def standin(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub that listens on loopback."""
    served = Hub(files)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served)) as server:
        served.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()
