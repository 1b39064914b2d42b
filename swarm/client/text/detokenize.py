"""Incremental detokenizing and matching of stop strings. Pure.

Both hold text back only for as long as the next token may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_OPEN = 3  # bytes of an unfinished UTF-8 character; each may show as one replacement character


@dataclass(slots=True)
class Detokenizer:
    """Turns tokens into text one by one. No piece contains part of a character, and the joined pieces are the text of
    the whole.

    ``decode`` returns the text of some ids; ``is_silent`` tells whether an id never has text (special and unknown
    ones). A token's text can depend on the tokens before it (a leading space, say), so two windows are decoded, with
    and without the new ids, and the difference is the new text. Some decoders read bytes in runs (byte fallback): if a
    run turns out to be invalid later, the characters already returned stay.
    """

    decode: Callable[[Sequence[int]], str]
    is_silent: Callable[[int], bool]
    # the window: old ids for context, then ids whose text is not all returned yet
    _ids: list[int] = field(default_factory=list)
    _num_context: int = 0  # how many ids of the window are context
    _num_returned: int = 0  # characters of the new ids' text that were returned

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain."""
        if self.is_silent(token):
            return ""
        self._ids.append(token)
        new_text = self._new_text()
        num_open = min(len(new_text) - len(new_text.rstrip(_BROKEN)), _MAX_OPEN)
        stop = len(new_text) - num_open
        piece = new_text[self._num_returned : stop]
        self._num_returned = max(self._num_returned, stop)
        if new_text and not num_open:
            self._ids = self._ids[self._num_context :]
            self._num_context, self._num_returned = len(self._ids), 0
        return piece

    def finish(self) -> str:
        """Return the text that was held back, as it is: no more tokens will come."""
        piece = self._new_text()[self._num_returned :] if len(self._ids) > self._num_context else ""
        self._ids, self._num_context, self._num_returned = [], 0, 0
        return piece

    def _new_text(self) -> str:
        old, both = self.decode(self._ids[: self._num_context]), self.decode(self._ids)
        if both.startswith(old):
            return both[len(old) :]
        return self.decode(self._ids[self._num_context :])  # the decoder has changed the text of earlier ids


@dataclass(slots=True)
class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and releases the text that certainly precedes them.

    The first stop string to be complete ends the text, no matter how the pieces were cut; if several are complete with
    the same character, the longest one counts. ``found_at`` is then its offset in the whole text, and ``found_stop``
    the string.
    """

    stops: tuple[str, ...]
    found_at: int | None = None
    found_stop: str | None = None
    num_released: int = 0  # characters released
    _held: str = ""  # text that may be the beginning of a stop string

    def push(self, text: str) -> str:
        """Add text and return the text that may be shown now."""
        if self.found_at is not None:
            return ""
        buffer = self._held + text
        match = self._find(buffer)
        if match is not None:
            start, self.found_stop = match
            self.found_at = self.num_released + start
            return self._release(buffer, start)
        return self._release(buffer, len(buffer) - self._num_open(buffer))

    def skip(self, text: str) -> str:
        """Release text in which stop strings do not count. Only valid before the first ``push``."""
        self.num_released += len(text)
        return text

    def finish(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        return self._release(self._held, len(self._held)) if self.found_at is None else ""

    def _release(self, buffer: str, stop: int) -> str:
        self._held = "" if self.found_at is not None else buffer[stop:]
        self.num_released += stop
        return buffer[:stop]

    def _find(self, buffer: str) -> tuple[int, str] | None:
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := buffer.find(stop)) >= 0]
        return min(matches)[1:] if matches else None

    def _num_open(self, buffer: str) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a stop string."""
        longest = min(max((len(stop) for stop in self.stops), default=1) - 1, len(buffer))
        for length in range(longest, 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self.stops):
                return length
        return 0
