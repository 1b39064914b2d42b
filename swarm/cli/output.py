"""How commands fail, print data, draw reports and show progress."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import typer

from swarm.errors import InvalidRequest, SwarmError
from swarm.sink import Sink, has_all_letters, in_words

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_ELSEWHERE = 160
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_CODES = (
    "Exit codes: 0, done; 1, it failed or was refused, and stderr says why in one line (or nobody reads the output any "
    "more); 2, the command line or the request is wrong, and was not begun; 130, ended by Ctrl-C. Commands that run "
    "for long have more to say in their own help."
)

# typer exports only some of click's exceptions, and newer versions bring a click of their own: what is common to all
# of them is found from one that is exported.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def run_app(load: Callable[[], typer.Typer], name: str, arguments: Sequence[str]) -> int:  # noqa: PLR0911 (a line for each kind)
    """Run a command line; return its exit code. A failure is one line on stderr, whatever it was.

    ``load`` imports the app, so that an interrupt during slow imports ends as quietly as one later.
    """
    try:
        code = load()(list(arguments) or ["--help"], prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except SwarmError as error:
        return complain(name, str(error), _code_of(error))
    except _UsageError as error:
        return complain(name, f"{_message(error)} ({_help_hint(error, name)})", EXIT_USAGE)
    except _ClickException as error:
        return complain(name, _message(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "swarm":
            raise  # a bug of ours
        text = f"the package {error.name} is missing: install Swarm with all that it needs (README, Install)"
        return complain(name, text)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _hear_no_more()
        return EXIT_FAILED  # as typer itself answers, where it notices first
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _hear_no_more()
        return complain(name, f"can't write {error.filename or 'what it says'}: {error.strerror}")
    return code if isinstance(code, int) else 0


def _hear_no_more() -> None:
    """What stdout still holds can't be written. Python flushes it once more at exit and must not stumble over it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code_of(error: SwarmError) -> int:
    """Who names a request that isn't there is refused, as who names such a worker or key; else the request is wrong."""
    return EXIT_USAGE if isinstance(error, InvalidRequest) and error.code != "unknown" else EXIT_FAILED


def complain(name: str, text: str, code: int = EXIT_FAILED) -> int:
    """Say on stderr, in one line, what is wrong; return the exit code."""
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _message(error: Exception) -> str:
    return str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]


def _help_hint(error: Exception, name: str) -> str:
    context = getattr(error, "ctx", None)
    return f"try '{context.command_path if context else name} --help'"


def print_json(data: object) -> None:
    """Print data as ``--json`` does: one object, readable and parsable."""
    print(json.dumps(data, indent=2, ensure_ascii=not has_all_letters(sys.stdout)))


def print_json_line(data: object) -> None:
    """Print data in one line, at once: for what comes bit by bit."""
    print(json_line(data), flush=True)


def json_line(data: object) -> str:
    """Write data for stdout; what its encoding lacks is escaped, as JSON allows."""
    return json.dumps(data, ensure_ascii=not has_all_letters(sys.stdout))


def in_bytes(count: float) -> str:
    """Write a size for people: 1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def console() -> Console:
    """Open stdout for tables; not a terminal, it is wide: lines of a pipe or a file need not fit a window."""
    from swarm.cli.screen import Screen

    return Screen(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_ELSEWHERE)


class Progress:
    """Show lines that tell what happened, and one that tells what is going on.

    On a terminal the latter is overwritten in place; elsewhere it is printed whenever it has changed. When nobody reads
    any more, it falls silent: what is shown must go on without its audience.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._silent = False
        self._shown = ""

    def say(self, text: str) -> None:
        """Write a line that stays."""
        shown = self._clear()
        self._write(text + "\n")
        if self._live and shown:
            self.update(shown)

    def update(self, text: str) -> None:
        """Show what is going on now."""
        if text == self._shown:
            return
        self._clear()
        self._shown = text
        if self._live:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80  # 0: the terminal doesn't know
            self._write(text if len(text) < width else text[: max(0, width - 2)] + "…")
        else:
            self._write(text + "\n")

    def report(self, lines: Sequence[str], data: Mapping[str, object]) -> None:
        """Show an event that programs may wait for: people get its lines, programs its data."""
        for line in lines:
            self.say(line)

    def done(self) -> None:
        """Remove the line that told what was going on."""
        self._clear()

    def _clear(self) -> str:
        if not self._live:
            return ""
        shown, self._shown = self._shown, ""
        if shown:
            self._write("\r\x1b[2K")
        return shown

    def _write(self, text: str) -> None:
        if self._silent:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._silent = True


class JsonProgress(Progress):
    """Show the same to programs: a JSON object per line, whose ``event`` says what it is; ``note`` and ``progress``
    have a ``text``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        if isinstance(stream, Sink):
            stream.tell_dropped = _tell_dropped

    def say(self, text: str) -> None:
        self.report((), {"event": "note", "text": text})

    def update(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self.report((), {"event": "progress", "text": text})

    def report(self, lines: Sequence[str], data: Mapping[str, object]) -> None:
        self._write(json.dumps(data, ensure_ascii=False) + "\n")

    def done(self) -> None:
        self._shown = ""


def _tell_dropped(lines: int, reason: str) -> str:
    return json.dumps({"event": "note", "text": in_words(lines, reason).strip()}) + "\n"
