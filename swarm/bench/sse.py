"""Parser of server-sent events. Pure; the stream may arrive in pieces of any size."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024  # of one event; a larger one is no answer of a language model


class BadStream(Exception):
    """The stream is not what its headers announced; the text describes the error."""


class SseParser:
    """Parser that takes pieces of a stream and returns the data of each complete event. Comments and other fields are
    skipped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece. Raises BadStream if an event grows without end."""
        text = self._rest + piece if self._rest else piece
        if b"\r" in text:
            # A line may end in CRLF or CR; a CR at the end of a piece may be half of a CRLF, so it waits.
            held = text.endswith(b"\r")
            text = (text[:-1] if held else text).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *whole, rest = text.split(b"\n\n")
            self._rest = rest + b"\r" if held else rest
        else:
            *whole, self._rest = text.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadStream(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return [data for event in whole if (data := _event_data(event)) is not None]

    def finish(self) -> list[bytes]:
        """Return the data of a last event without its empty line, which many servers omit."""
        rest, self._rest = self._rest.replace(b"\r", b"\n"), b""
        data = _event_data(rest.rstrip(b"\n"))
        return [] if data is None else [data]


def _event_data(event: bytes) -> bytes | None:
    """Return the data lines of an event, joined; None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:  # the usual case
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
