"""Output streams whose failure must not stop the process: log lines, progress, final messages.

When the disk is full or the terminal is gone, lines are dropped and counted, and as soon as a write succeeds again, one
line reports their number. Nothing here raises. Output to the process's own stdout or stderr bypasses Python's buffers,
because a failing final flush would change the exit code of a successful process.

Imports almost nothing, because it must be usable before everything else.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

MAX_PENDING = 1 << 16  # Characters of an unfinished line.

FormatDropped = Callable[[int, str], str]  # (lines, reason) -> the line that reports them


def describe_dropped(lines: int, reason: str) -> str:
    return f"swarm: {lines} lines could not be written here ({reason})\n"


class SafeStream(io.TextIOBase):
    """Text stream that never raises. ``stream`` None: it was closed before this process started. ``format_dropped``:
    formats the line about dropped lines. After a broken pipe nothing is written any more: its reader is gone."""

    def __init__(self, stream: TextIO | None, format_dropped: FormatDropped = describe_dropped) -> None:
        self.format_dropped = format_dropped
        self._stream = stream
        self._fd = _own_fd(stream)
        self._lock = threading.RLock()  # Reentrant: a signal handler may write while its thread does.
        self._pending = ""  # An unfinished line.
        self._is_line_torn = False  # Only a part of the last line was written.
        self._num_dropped = 0
        self._reason = ""
        self._is_closed = stream is None

    # The interface of a text stream.

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    @property
    def buffer(self) -> object:
        """Return the underlying binary stream."""
        return getattr(self._stream, "buffer", None)

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("there is no stream")
        return self._stream.fileno()

    @property
    def descriptor(self) -> int | None:
        """Return the descriptor that lines are written to; None if it is not this process's own stdout or stderr."""
        return self._fd

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # Closed.
            return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write complete lines immediately, the rest when its line is complete or at :meth:`flush`."""
        with self._lock:
            self._pending += text
            if "\n" in text or len(self._pending) > MAX_PENDING:
                self._write_pending()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._write_pending()

    def close(self) -> None:
        """Flush. The stream stays open: this object does not own it."""
        self.flush()

    # Writing.

    def _write_pending(self) -> None:
        text, self._pending = self._pending, ""
        if not text or self._is_closed:
            return
        try:
            if self._num_dropped:
                lines, self._num_dropped = self._num_dropped, 0
                try:
                    self._write_now(self.format_dropped(lines, self._reason))
                except OSError:
                    self._num_dropped = lines
                    raise
            self._write_now(text)
        except BrokenPipeError:
            self._is_closed = True
        except (OSError, ValueError) as error:  # ValueError: the stream was closed.
            self._num_dropped += max(1, text.count("\n"))
            self._reason = getattr(error, "strerror", None) or str(error)

    def _write_now(self, text: str) -> None:
        if self._fd is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        left = (("\n" if self._is_line_torn else "") + text).encode(self.encoding, "backslashreplace")
        while left:
            count = os.write(self._fd, left)
            self._is_line_torn = not left[:count].endswith(b"\n")
            left = left[count:]
        self._is_line_torn = False  # Everything was written, whether it ends with a newline or not.


def _own_fd(stream: TextIO | None) -> int | None:
    """Return the descriptor of our own stdout or stderr, for unbuffered writes; None for other streams."""
    if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        return None
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return None


def guard_stderr() -> None:
    """Replace ``sys.stderr`` by a stream that never raises."""
    if not isinstance(sys.stderr, SafeStream):
        sys.stderr = SafeStream(sys.stderr)


def guard_stdout() -> None:
    """Replace ``sys.stdout`` by a stream that never raises, for commands whose output is only informative."""
    if not isinstance(sys.stdout, SafeStream):
        sys.stdout = SafeStream(sys.stdout)


def prepare_stdin_and_stdout() -> None:
    """Ensure that stdin and stdout exist, and that stdout accepts any character.

    A stream that was closed before this process started is replaced by the null device; otherwise the next opened file
    or connection would get its descriptor number. Characters that stdout's encoding lacks become question marks.
    """
    if sys.stdin is None:
        # For as long as the process lives.
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (the same)  # The same.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace" if is_utf8(sys.stdout) else "replace")


def is_utf8(stream: TextIO) -> bool:
    """Whether the stream is UTF-8, which fails only for lone surrogates, as file names may contain."""
    return (stream.encoding or "utf-8").lower().replace("-", "") == "utf8"
