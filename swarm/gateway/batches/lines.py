"""Lines of input files: how bytes become lines, and what a line must have. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarm.gateway.batches.objects import LineError
from swarm.gateway.errors import ApiError
from swarm.gateway.middleware.body import decode_body
from swarm.wire.messages import MAX_TOKENS

MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # errors of one batch that are reported
MAX_BODY_VALUES = 2 * MAX_TOKENS  # values in a line's body; the model that runs it may allow fewer
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BatchLine(msgspec.Struct, frozen=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineSplitter:
    """Splits a file, which arrives in pieces, into lines that keep their line breaks."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # the beginning of the next line
        self._size = 0
        self.num_lines = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete. Raises LineTooLong."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(line + b"\n")
            yield self._take()
        self._add(rest)

    def finish(self) -> Iterator[bytes]:
        """Yield the last line if it has no line break."""
        if self._size:
            yield self._take()

    def _add(self, data: bytes) -> None:
        if not data:
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._max_bytes:
            raise LineTooLong(self.num_lines + 1)

    def _take(self) -> bytes:
        line = b"".join(self._parts)
        self._parts, self._size = [], 0
        self.num_lines += 1
        return line


class LineTooLong(Exception):
    """A line has more bytes than a request's body may have."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class LineChecker:
    """Checks the lines of one batch in their order."""

    def __init__(self, endpoint: str, max_lines: int) -> None:
        self._endpoint, self._max_lines = endpoint, max_lines
        self._first_lines: dict[str, int] = {}  # number of the line with each custom_id
        self.errors: list[LineError] = []
        self.num_lines = 0

    @property
    def is_full(self) -> bool:
        """Whether further lines would change nothing."""
        return len(self.errors) >= MAX_ERRORS or self.num_lines > self._max_lines

    def check(self, number: int, content: bytes) -> None:
        """Check a line that is not blank."""
        self.num_lines += 1
        if self.num_lines > self._max_lines:
            text = f"A batch has at most {self._max_lines} requests."
            self.errors = [LineError("too_many_tasks", text, None, number)]
            return
        try:
            line = msgspec.json.decode(content, type=BatchLine)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.errors.append(_decoding_error(number, error))
            return
        if (problem := self._problem_of(number, line)) is not None:
            self.errors.append(problem)

    def finish(self) -> tuple[LineError, ...]:
        """Return all errors, after the last line."""
        if not self.num_lines:
            return (LineError("empty_file", "The input file has no requests.", None, None),)
        return tuple(self.errors)

    def _problem_of(self, number: int, line: BatchLine) -> LineError | None:
        if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID:
            text = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters."
            return LineError("invalid_custom_id", text, "custom_id", number)
        first = self._first_lines.setdefault(line.custom_id, number)
        if first != number:
            text = f"The custom_id {line.custom_id[:80]!r} is a duplicate: line {first} has it too."
            return LineError("duplicate_custom_id", text, "custom_id", number)
        if line.method != "POST":
            return LineError("invalid_method", f"The method must be POST, not {line.method[:20]!r}.", "method", number)
        if line.url != self._endpoint:
            text = f"The url {line.url[:80]!r} does not match the batch's endpoint {self._endpoint}."
            return LineError("invalid_url", text, "url", number)
        return _problem_of_body(number, bytes(line.body))


def _problem_of_body(number: int, body: bytes) -> LineError | None:
    try:
        decoded = decode_body(body, MAX_BODY_VALUES)
    except ApiError as problem:
        return LineError("invalid_request", f"This line is not a request: {problem.message}.", "body", number)
    if not isinstance(decoded, dict):
        return LineError("invalid_request", "The body must be an object.", "body", number)
    if decoded.get("stream"):
        return LineError("invalid_request", "stream is not supported in a batch.", "body.stream", number)
    return None


def _decoding_error(number: int, error: Exception) -> LineError:
    if isinstance(error, msgspec.ValidationError):
        return LineError("invalid_request", f"This line is not a request: {error}.", None, number)
    return LineError("invalid_json_line", f"This line is not parseable as valid JSON: {error}.", None, number)


def read_custom_id(line: bytes) -> str:
    """Return the custom_id without decoding the rest; empty if the line was never checked and has none."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class _Named(msgspec.Struct):
    custom_id: str


def is_blank(line: bytes) -> bool:
    return not line.strip()
