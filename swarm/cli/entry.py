"""Begin and end a command's process. Imports next to nothing, so that an interrupt during imports is met too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from swarm.sink import guard_stderr, settle_stdin_and_stdout

if TYPE_CHECKING:
    import typer


def run(load: Callable[[], typer.Typer], name: str, arguments: Sequence[str]) -> int:
    """Run the app that ``load`` imports with these arguments; return the exit code."""
    try:
        from swarm.cli.output import run_app
    except KeyboardInterrupt:
        return 130
    return run_app(load, name, arguments)


def end_with(command: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run the command with the process's arguments and end the process with its exit code."""
    guard_stderr()  # nobody fails by not being able to say so
    settle_stdin_and_stdout()
    try:
        code = command(sys.argv[1:])
    except KeyboardInterrupt:  # between the command's last instruction and here
        code = 130
    # What remains is the interpreter's own end; an interrupt could change nothing but make it ugly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
