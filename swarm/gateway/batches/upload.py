"""Upload of an input file: the form's fields, and the file's lines in pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.gateway.batches.lines import LineSplitter, LineTooLong
from swarm.gateway.batches.multipart import MultipartParser, PartBegan, PartData, PartEvent
from swarm.gateway.batches.objects import PAGE_BYTES, parse_max_age
from swarm.gateway.errors import ApiError, invalid_field

MAX_LINES = 1 << 20  # lines of a file, including blank ones
MAX_NAME = 255  # characters of a file's name
PAGE_LINES = 4096  # lines that are stored at a time
_MAX_FIELD = 1024  # bytes of a plain field
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = {"purpose", "file", _ANCHOR, _SECONDS}

Page = tuple[int, list[bytes]]  # the first line's number, and the lines


class Upload:
    """One upload as it arrives. Keeps at most a page of lines and the next line's beginning."""

    def __init__(self, boundary: bytes, max_line_bytes: int, max_bytes: int) -> None:
        self._parser, self._splitter = MultipartParser(boundary), LineSplitter(max_line_bytes)
        self._max_line_bytes, self._max_bytes = max_line_bytes, max_bytes
        self._fields: dict[str, bytes] = {}
        self._part = ""
        self._has_file = False
        self._num_bytes = 0
        self._first = 1  # number of the page's first line
        self._lines: list[bytes] = []
        self._size = 0  # bytes of the page
        self.filename = ""
        self.max_age_s: int | None = None  # known at the end; None if the form gives none

    def feed(self, data: bytes) -> Iterator[Page]:
        """Yield the pages that these bytes complete. Takes long for many short lines, so a thread calls it. Raises
        ApiError."""
        for event in self._parser.feed(data):
            yield from self._add(event)

    def finish(self) -> Iterator[Page]:
        """Check the whole form, and yield the last page. Raises ApiError."""
        self._parser.check_complete()
        if not self._has_file:
            raise invalid_field("file", "is missing")
        values = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = values.get("purpose", "")
        if purpose != "batch":
            raise invalid_field("purpose", f"must be batch, not {purpose[:40]!r}: files are only for batches here")
        if _ANCHOR in values or _SECONDS in values:
            self.max_age_s = parse_max_age("expires_after", values.get(_ANCHOR), values.get(_SECONDS))
        for line in self._splitter.finish():
            yield from self._keep(line)
        if self._lines:
            yield self._take()

    def _add(self, event: PartEvent) -> Iterator[Page]:
        if isinstance(event, PartBegan):
            self._begin(event)
        elif isinstance(event, PartData) and self._part == "file":
            yield from self._split(event.data)
        elif isinstance(event, PartData):
            self._fields[self._part] += event.data
            if len(self._fields[self._part]) > _MAX_FIELD:
                raise invalid_field(self._part, f"has more than {_MAX_FIELD} bytes")

    def _begin(self, part: PartBegan) -> None:
        if part.name not in _FIELDS:
            raise ApiError(
                400, f"{part.name[:40]} is not supported here; leave it out", param=part.name[:40],
                code="unsupported_parameter",
            )  # fmt: skip
        if part.name in self._fields or (part.name == "file" and self._has_file):
            raise invalid_field(part.name, "is given twice")
        self._part = part.name
        if part.name == "file":
            self._has_file, self.filename = True, (part.filename or "file.jsonl")[:MAX_NAME]
        else:
            self._fields[part.name] = b""

    def _split(self, data: bytes) -> Iterator[Page]:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise _too_large(f"the file has more than {self._max_bytes} bytes (batch.max_file): split it")
        try:
            for line in self._splitter.feed(data):
                yield from self._keep(line)
        except LineTooLong as error:
            text = f"line {error.line} has more than {self._max_line_bytes} bytes (gateway.max_body)"
            raise _too_large(text) from None

    def _keep(self, line: bytes) -> Iterator[Page]:
        if self._splitter.num_lines > MAX_LINES:
            raise _too_large(f"the file has more than {MAX_LINES} lines: split it")
        self._lines.append(line)
        self._size += len(line)
        if self._size >= PAGE_BYTES or len(self._lines) >= PAGE_LINES:
            yield self._take()

    def _take(self) -> Page:
        page = self._first, self._lines
        self._first, self._lines, self._size = self._first + len(self._lines), [], 0
        return page


def _too_large(text: str) -> ApiError:
    return ApiError(413, text, param="file", code="too_large")
