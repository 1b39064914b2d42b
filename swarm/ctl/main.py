"""The entry point of ``swarmctl``. It imports next to nothing, so that an interrupt during imports is met here too."""

from __future__ import annotations

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
    sys.exit(run(sys.argv[1:]))


def _load() -> typer.Typer:
    from swarm.ctl.commands import app

    return app
