"""How many values a JSON text has, before it is decoded: decoding holds up everything else, and takes memory for each.

Pure. The text comes in pieces. Strings are left out by the quotes around them, so commas and brackets in them are not
counted. What is no JSON is counted somehow; up to where a decoder would refuse it, the count is right.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEST = 1 << 14  # values that are decoded in a moment
PIECE = 1 << 16  # bytes: a fraction of a millisecond

_MARKS = b'",[{'
_OTHERS = bytes(byte for byte in range(256) if byte not in _MARKS)


class Scanner:
    """Counts the values of one text."""

    def __init__(self) -> None:
        self.num_values = 1
        self._is_inside = False  # of a string
        self._rest = b""  # of an escape that is cut in two

    def feed(self, piece: bytes) -> None:
        piece = self._rest + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""
        piece = piece[: len(piece) - len(self._rest)]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _OTHERS).split(b'"')
        outside = b"".join(parts[self._is_inside :: 2])
        self.num_values += len(outside)  # a value stands behind each comma, and is begun by each bracket
        self._is_inside ^= len(parts) % 2 == 0


def counts(body: bytes) -> Iterator[int]:
    """Yield how many values there are at most, up to the end of each piece."""
    scanner = Scanner()
    for start in range(0, len(body), PIECE):
        scanner.feed(body[start : start + PIECE])
        yield scanner.num_values


def is_modest(text: str) -> bool:
    """Whether a JSON text within a body has few values."""
    if len(text) < MODEST:  # each takes a character at least
        return True
    pieces = (text[start : start + PIECE].encode("utf-8", "surrogatepass") for start in range(0, len(text), PIECE))
    scanner = Scanner()
    for piece in pieces:
        scanner.feed(piece)
        if scanner.num_values > MODEST:
            return False
    return True
