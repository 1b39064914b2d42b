"""Requests to a gateway's files and batches, repeated while the gateway is away."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from swarm.errors import InvalidRequest, SwarmError

PATIENCE_S = 600.0  # seconds that a gateway may be away
TIMEOUT_S = 60.0  # seconds without a byte
RETRY_S = 1.0
_BOUNDARY = "swarm-batch-5d0f8c1e7a"
_PIECE = 1 << 20
_AWAY = (408, 429, 502, 503, 504)

Json = dict[str, Any]


class GatewayAway(SwarmError):
    """The gateway cannot be reached, or serves no batches now."""


class GatewayRefused(SwarmError):
    """The gateway refused a request."""


class GatewayClient:
    """Client of one gateway."""

    def __init__(
        self,
        url: str,
        key: str = "",
        on_wait: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create the client. ``on_wait``: called with the reason before a request is repeated. Raises InvalidRequest
        for a wrong URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is no URL of a gateway, such as http://127.0.0.1:8000")
        self.url, self._parts, self._on_wait, self._sleep = url, parts, on_wait, sleep
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Json:
        return self._repeat(lambda: self._json("GET", path))

    def post(self, path: str, body: Json) -> Json:
        """Send a request once: only the caller can decide whether a repetition is safe. Raises GatewayAway."""
        return self._json("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})

    def upload(self, file: Path) -> str:
        """Upload an input file and return its id."""
        return str(self._repeat(lambda: self._upload(file))["id"])

    def download(self, file_id: str, target: Path) -> None:
        """Write a file's content to ``target``, whole or not at all."""
        part = target.with_name(f"{target.name}.part")

        def copy() -> Json:
            connection, response = self._open("GET", f"/v1/files/{file_id}/content", None, {})
            try:
                with part.open("wb") as out:
                    while piece := self._read_piece(response):
                        out.write(piece)
            finally:
                connection.close()
            return {}

        self._repeat(copy)
        part.replace(target)

    def _read_piece(self, response: http.client.HTTPResponse) -> bytes:
        """Read the next bytes of a response; empty at its end. Raises GatewayAway if the connection ends before."""
        try:
            piece = response.read(_PIECE)
        except (OSError, http.client.HTTPException) as error:
            raise GatewayAway(f"the gateway {self.url} broke off its answer ({type(error).__name__})") from None
        if not piece and response.length:  # bytes of the declared length that did not come
            raise GatewayAway(f"the gateway {self.url} broke off its answer ({response.length} bytes are missing)")
        return piece

    def _upload(self, file: Path) -> Json:
        head = (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="input.jsonl"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{_BOUNDARY}--\r\n".encode()
        with file.open("rb") as content:
            length = len(head) + file.stat().st_size + len(tail)
            headers = {
                "content-type": f"multipart/form-data; boundary={_BOUNDARY}",
                "content-length": str(length),
            }
            return self._json("POST", "/v1/files", _Joined(head, content, tail), headers)

    def _json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Json:
        connection, response = self._open(method, path, body, headers or {})
        try:
            decoded: Json = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise GatewayAway(f"the gateway {self.url} broke off its answer ({type(error).__name__})") from None
        finally:
            connection.close()
        return decoded

    def _open(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and return the response if its status is good. Raises GatewayAway or GatewayRefused."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, body, {**self._headers, **headers})
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            text = _error_text(response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise GatewayAway(f"the gateway {self.url} can't be reached ({error or type(error).__name__})") from None
        connection.close()
        if response.status in _AWAY:
            raise GatewayAway(text)
        raise GatewayRefused(text)

    def _repeat(self, send: Callable[[], Json]) -> Json:
        """Send until the gateway answers. Raises GatewayAway after ``PATIENCE_S``."""
        waited_s = 0.0
        while True:
            try:
                return send()
            except GatewayAway as error:
                if waited_s >= PATIENCE_S:
                    raise
                self.wait(str(error))
                waited_s += RETRY_S

    def wait(self, reason: str) -> None:
        """Pause before a repetition."""
        self._on_wait(reason)
        self._sleep(RETRY_S)


class _Joined:
    """Readable of a form: its head, a file, and its tail."""

    def __init__(self, head: bytes, content: BinaryIO, tail: bytes) -> None:
        self._head, self._content, self._tail = head, content, tail

    def read(self, size: int = -1) -> bytes:
        if self._head:
            piece, self._head = self._head, b""
            return piece
        if piece := self._content.read(size if size > 0 else _PIECE):
            return piece
        piece, self._tail = self._tail, b""
        return piece


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "the gateway refused without a reason"
