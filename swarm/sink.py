"""Write what nobody must fail by: log lines, progress, last words.

The disk that logs are on fills up, a terminal goes away: then lines are dropped and counted, and as soon as a write
succeeds again, one line says how many there were. Nothing here raises. What goes to the process's own stdout or stderr
is not kept in Python's buffers either, whose last flush would change the exit code of a process that did all it should.

Imports next to nothing: it is there before anything else is.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

MAX_PENDING = 1 << 16  # characters of a line that has no end yet

Tell = Callable[[int, str], str]  # (lines, reason) → the line that says so


def in_words(lines: int, reason: str) -> str:
    return f"swarm: {lines} lines could not be written here ({reason})\n"


class Sink(io.TextIOBase):
    """Guard ``stream``; None is a stream that was closed before we began. ``tell_dropped`` words what was dropped. A
    broken pipe is for good: whoever read it is gone."""

    def __init__(self, stream: TextIO | None, tell_dropped: Tell = in_words) -> None:
        self.tell_dropped = tell_dropped
        self._stream = stream
        self._fd = _own_fd(stream)
        self._lock = threading.RLock()  # a signal's handler may write while its thread does
        self._pending = ""
        self._torn = False  # only a beginning of the last line was written
        self._dropped = 0
        self._reason = ""
        self._is_over = stream is None

    # What a stream is asked for.

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    @property
    def buffer(self) -> object:
        """Return the bytes beneath, for whoever writes those."""
        return getattr(self._stream, "buffer", None)

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("there is no stream")
        return self._stream.fileno()

    @property
    def descriptor(self) -> int | None:
        """Return where lines go; None: to no descriptor of this process's own."""
        return self._fd

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write whole lines at once, the rest with its end or at :meth:`flush`."""
        with self._lock:
            self._pending += text
            if "\n" in text or len(self._pending) > MAX_PENDING:
                self._put_pending()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._put_pending()

    def close(self) -> None:
        """Leave the stream open: it is not ours to close."""
        self.flush()

    # How it is written.

    def _put_pending(self) -> None:
        text, self._pending = self._pending, ""
        if not text or self._is_over:
            return
        try:
            if self._dropped:
                lines, self._dropped = self._dropped, 0
                try:
                    self._put(self.tell_dropped(lines, self._reason))
                except OSError:
                    self._dropped = lines
                    raise
            self._put(text)
        except BrokenPipeError:
            self._is_over = True
        except (OSError, ValueError) as error:  # ValueError: somebody closed it
            self._dropped += max(1, text.count("\n"))
            self._reason = getattr(error, "strerror", None) or str(error)

    def _put(self, text: str) -> None:
        if self._fd is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        left = (("\n" if self._torn else "") + text).encode(self.encoding, "backslashreplace")
        while left:
            count = os.write(self._fd, left)
            self._torn = not left[:count].endswith(b"\n")
            left = left[count:]
        self._torn = False  # all of it went out, whether it ends a line or not


def _own_fd(stream: TextIO | None) -> int | None:
    """Find the descriptor of our own stdout or stderr, to write to it without Python's buffers."""
    if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        return None
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return None


def guard_stderr() -> None:
    """Let nothing fail by writing to stderr from here on."""
    if not isinstance(sys.stderr, Sink):
        sys.stderr = Sink(sys.stderr)


def guard_stdout() -> None:
    """Let nothing fail by writing to stdout: for commands whose output only tells what goes on."""
    if not isinstance(sys.stdout, Sink):
        sys.stdout = Sink(sys.stdout)


def settle_stdin_and_stdout() -> None:
    """Let both be there, and stdout take any letter. One that was closed before we began is empty, or tells nobody; its
    number, the lowest that is free, is no connection's. A letter that stdout's encoding lacks is a question mark."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (the same)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace" if has_all_letters(sys.stdout) else "replace")


def has_all_letters(stream: TextIO) -> bool:
    """Is it UTF-8? Then only half a letter, as a file's name may have, can't be written."""
    return (stream.encoding or "utf-8").lower().replace("-", "") == "utf8"
