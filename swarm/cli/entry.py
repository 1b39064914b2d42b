"""Start and end of a command's process. Imports almost nothing, so that an interrupt during imports is handled, too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from swarm.safe_stream import guard_stderr, prepare_stdin_and_stdout

if TYPE_CHECKING:
    import typer


def run(load: Callable[[], typer.Typer], name: str, arguments: Sequence[str]) -> int:
    """Run the app that ``load`` imports with these arguments; return the exit code."""
    try:
        from swarm.cli.output import run_app
    except KeyboardInterrupt:
        return 130
    return run_app(load, name, arguments)


def run_and_exit(command: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run the command with the process's arguments, and end the process with its exit code."""
    guard_stderr()  # a closed stderr must not turn into a failure
    prepare_stdin_and_stdout()
    try:
        code = command(sys.argv[1:])
    except KeyboardInterrupt:  # between the command's last instruction and this line
        code = 130
    # Only the interpreter's own shutdown remains, and an interrupt there would only print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
