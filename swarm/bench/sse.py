"""Cut a stream of server-sent events into the data of its events. Pure; bytes may come in any pieces."""

from __future__ import annotations

MOST_BYTES = 16 * 1024 * 1024  # of one event; more is no answer of a language model


class BadStream(Exception):
    """What came is not what was announced; the text says what is wrong."""


class Events:
    """Take pieces of a stream, give the data of each event that is complete. Comments and other fields are skipped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take what came. Raises BadStream if an event has no end."""
        text = self._rest + piece if self._rest else piece
        if b"\r" in text:
            # A line may end in CRLF or CR; a CR at the very end may be the half of one, so it waits.
            held = text.endswith(b"\r")
            text = (text[:-1] if held else text).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *whole, rest = text.split(b"\n\n")
            self._rest = rest + b"\r" if held else rest
        else:
            *whole, self._rest = text.split(b"\n\n")
        if len(self._rest) > MOST_BYTES:
            raise BadStream(f"an event of more than {MOST_BYTES >> 20} MiB")
        return [data for event in whole if (data := _data(event)) is not None]

    def end(self) -> list[bytes]:
        """The stream has ended: give what stands without its empty line, as many servers leave it out at the end."""
        rest, self._rest = self._rest.replace(b"\r", b"\n"), b""
        data = _data(rest.rstrip(b"\n"))
        return [] if data is None else [data]


def _data(event: bytes) -> bytes | None:
    """The data lines of an event, joined; None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly always
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
