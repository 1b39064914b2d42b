"""The entry point of ``swarmctl``. It imports next to nothing, so that an interrupt during imports is met here too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def run(arguments: Sequence[str]) -> int:
    """Run ``swarmctl`` with these arguments; return the exit code."""
    try:
        from swarm.cli.output import run_app
    except KeyboardInterrupt:
        return 130
    return run_app(_load, "swarmctl", arguments)


def main() -> None:
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # between the command's last instruction and here
        code = 130
    # What remains is the interpreter's own end; an interrupt could change nothing but make it ugly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _load() -> typer.Typer:
    from swarm.ctl.commands import app

    return app
