"""Output of commands: errors, data, reports and progress."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import typer

from swarm.errors import InvalidRequest, SwarmError
from swarm.safe_stream import SafeStream, describe_dropped, is_utf8

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 160  # columns of tables if stdout is not a terminal
# errors of a write that are the environment's fault
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
EXIT_CODES = (
    "Exit codes: 0, done; 1, failed or refused, with the reason on stderr in one line, or stdout's reader is gone; "
    "2, the command line or the request is wrong, and nothing was started; 130, ended by Ctrl-C. Long-running commands "
    "list more codes in their own help."
)

# typer exports only some of click's exceptions, and newer versions include a copy of click. The common base classes are
# found from an exported exception.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def run_app(load: Callable[[], typer.Typer], name: str, arguments: Sequence[str]) -> int:  # noqa: PLR0911 (a line for each kind)
    """Run a command line; return its exit code. Any failure is printed as one line on stderr.

    ``load`` imports the app, so that an interrupt during slow imports is handled like a later one.
    """
    try:
        code = load()(list(arguments) or ["--help"], prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except SwarmError as error:
        return print_error(name, str(error), _exit_code(error))
    except _UsageError as error:
        return print_error(name, f"{_message(error)} ({_help_hint(error, name)})", EXIT_USAGE)
    except _ClickException as error:
        return print_error(name, _message(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "swarm":
            raise  # a bug in Swarm itself
        text = f"the package {error.name} is missing: install Swarm with its dependencies (README, Install)"
        return print_error(name, text)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_FAILED  # the same code as typer's, where typer notices it first
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        _discard_stdout()
        return print_error(name, f"can't write {error.filename or 'the output'}: {error.strerror}")
    return code if isinstance(code, int) else 0


def _discard_stdout() -> None:
    """Discard what stdout still buffers, because its reader is gone. Otherwise Python's flush at exit would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: SwarmError) -> int:
    """Return the exit code of an error: usage for a wrong request, failure for everything else.

    A request, worker or key that does not exist counts as a failure, not as wrong usage.
    """
    return EXIT_USAGE if isinstance(error, InvalidRequest) and error.code != "unknown" else EXIT_FAILED


def print_error(name: str, text: str, code: int = EXIT_FAILED) -> int:
    """Print an error on stderr as one line; return the exit code."""
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _message(error: Exception) -> str:
    return str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]


def _help_hint(error: Exception, name: str) -> str:
    context = getattr(error, "ctx", None)
    return f"try '{context.command_path if context else name} --help'"


def print_json(data: object) -> None:
    """Print data for ``--json``: one object, indented."""
    print(json.dumps(data, indent=2, ensure_ascii=not is_utf8(sys.stdout)))


def print_json_line(data: object) -> None:
    """Print data as one line and flush, for output that comes in parts."""
    print(json_line(data), flush=True)


def json_line(data: object) -> str:
    """Return data as one line of JSON for stdout. Characters that its encoding lacks are escaped."""
    return json.dumps(data, ensure_ascii=not is_utf8(sys.stdout))


def format_bytes(count: float) -> str:
    """Return a size as text: 1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def make_console() -> Console:
    """Return a console for tables on stdout. A pipe or file has no window, so it is wide unless COLUMNS is set."""
    from swarm.screen import ReportConsole

    return ReportConsole(highlight=False, width=window_width() or _FILE_WIDTH)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, optional: Sequence[str] = ()) -> None:
    """Print rows as a table that fits the window. ``optional``: columns that may be omitted, the first one first."""
    from rich.text import Text

    from swarm.screen import ReportTable

    table = ReportTable(optional=optional, box=None, pad_edge=False)
    for heading in headings:
        table.add_column(Text(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    make_console().print(table)


def window_width() -> int | None:
    """Return the columns of the terminal or of COLUMNS; None if stdout is a pipe or file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


Observer = Callable[[Sequence[str], Mapping[str, object]], None]  # lines for people, data for programs
_NOTE: Mapping[str, object] = {"event": "note"}
_PROGRESS: Mapping[str, object] = {"event": "progress"}


def ignore_report(_lines: Sequence[str], _data: Mapping[str, object]) -> None:
    pass


class ConsoleProgress:
    """Progress display: permanent lines for events, and one line for the current state.

    On a terminal, the state line is overwritten in place; elsewhere it is printed whenever it changes. When the
    stream's reader is gone, output stops silently, because the work must continue without it.
    """

    def __init__(self, stream: TextIO, observe: Observer = ignore_report) -> None:
        """``observe`` gets every line and event, too."""
        self._stream = stream
        self._observe = observe
        self._live = stream.isatty()
        self._silent = False  # set when the stream can't be written any more
        self._status = ""  # the current state line

    def print_line(self, text: str) -> None:
        """Print a permanent line."""
        self._observe((text,), _NOTE)
        self._print_line(text)

    def _print_line(self, text: str) -> None:
        shown = self._clear()
        self._write(text + "\n")
        if self._live and shown:
            self.set_status(shown)

    def set_status(self, text: str) -> None:
        """Show the current state."""
        if text == self._status:
            return
        self._observe((), _PROGRESS)
        self._clear()
        self._status = text
        if self._live:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80  # 0: the terminal has no size
            self._write(text if len(text) < width else text[: max(0, width - 2)] + "…")
        else:
            self._write(text + "\n")

    def report(self, lines: Sequence[str], data: Mapping[str, object]) -> None:
        """Report an event: people get ``lines``, programs get ``data``. The observer is called when the lines are
        written: ``swarm up --detach`` returns then."""
        for line in lines:
            self._print_line(line)
        self._observe(lines, data)

    def clear_status(self) -> None:
        """Remove the state line."""
        self._clear()

    def _clear(self) -> str:
        if not self._live:
            return ""
        shown, self._status = self._status, ""
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


class JsonProgress(ConsoleProgress):
    """Progress for programs: a JSON object per line. Its ``event`` is its kind; ``note`` and ``progress`` have a
    ``text``."""

    def __init__(self, stream: TextIO, observe: Observer = ignore_report) -> None:
        super().__init__(stream, observe)
        if isinstance(stream, SafeStream):
            stream.format_dropped = _format_dropped

    def print_line(self, text: str) -> None:
        self.report((text,), {**_NOTE, "text": text})

    def set_status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self.report((), {**_PROGRESS, "text": text})

    def report(self, lines: Sequence[str], data: Mapping[str, object]) -> None:
        self._write(json.dumps(data, ensure_ascii=False) + "\n")
        self._observe(lines, data)

    def clear_status(self) -> None:
        self._status = ""


def _format_dropped(lines: int, reason: str) -> str:
    return json.dumps({"event": "note", "text": describe_dropped(lines, reason).strip()}) + "\n"
