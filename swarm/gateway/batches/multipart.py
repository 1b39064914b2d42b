"""Parser of multipart/form-data bodies: bytes come in as they arrive, pieces of parts go out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from swarm.gateway.errors import ApiError

MAX_PART_HEAD = 8192  # bytes of a part's headers
MAX_PARTS = 32
_MAX_BOUNDARY = 200  # characters; the standard allows 70
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True, slots=True)
class PartBegan:
    """A part of the form begins. ``filename`` None: a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """The next bytes of the part."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The part is complete."""


PartEvent = PartBegan | PartData | PartEnded


def parse_boundary(content_type: str) -> bytes:
    """Return the boundary that a content type names. Raises ApiError."""
    kind, _, _ = content_type.partition(";")
    boundary = _parameters(content_type).get("boundary", "")
    if kind.strip().lower() != "multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _malformed("the content type must be multipart/form-data with a boundary")
    return boundary.encode("latin-1")


class MultipartParser:
    """Parser of one body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the first delimiter has no line before it
        self._is_in_part = False
        self._num_head_bytes = 0  # bytes at the start of the buffer that end the part's headers
        self._num_parts = 0
        self.has_ended = False

    def feed(self, data: bytes) -> Iterator[PartEvent]:
        """Yield what these bytes complete. Raises ApiError for a malformed body."""
        self._buffer += data
        while not self.has_ended:
            event = self._next_data() if self._is_in_part else self._next_head()
            if event is None:
                return
            yield event

    def check_complete(self) -> None:
        """Raise ApiError if the body ended before its last boundary."""
        if not self.has_ended:
            raise _malformed("it ends before its last boundary")

    def _next_head(self) -> PartBegan | None:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            self._buffer = self._buffer[-len(self._delimiter) :]  # a preamble, which has no meaning
            return None
        start = at + len(self._delimiter)
        if self._buffer[start : start + 2] == b"--":
            self.has_ended = True
            return None
        end = self._buffer.find(b"\r\n\r\n", start)
        if end < 0:
            if len(self._buffer) - start > MAX_PART_HEAD:
                raise _malformed(f"a part's headers have more than {MAX_PART_HEAD} bytes")
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        head = self._buffer[start:end].decode("utf-8", "replace")
        # the line break after the headers may also begin the delimiter of an empty part
        self._buffer, self._is_in_part, self._num_head_bytes = self._buffer[end + 2 :], True, 2
        return _parse_head(head)

    def _next_data(self) -> PartData | PartEnded | None:
        at = self._buffer.find(self._delimiter)
        if at == 0:
            self._is_in_part = False
            return PartEnded()
        # bytes that may begin a delimiter stay until more arrive
        stop = at if at > 0 else len(self._buffer) - len(self._delimiter)
        if stop <= self._num_head_bytes and at < 0:
            return None
        data, self._buffer, self._num_head_bytes = self._buffer[self._num_head_bytes : stop], self._buffer[stop:], 0
        return PartData(data)


def _parse_head(head: str) -> PartBegan:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            fields = _parameters(value)
            if "name" in fields:
                return PartBegan(fields["name"], fields.get("filename"))
    raise _malformed("a part has no name")


def _parameters(value: str) -> dict[str, str]:
    pairs = _PARAMETER.findall(value)
    return {name.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain for name, quoted, plain in pairs}


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the form can't be read: {why}", code="invalid_form")
