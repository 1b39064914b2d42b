"""Entry point of ``swarmctl``. Imports almost nothing, so that an interrupt during imports is handled here, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.cli import entry

if TYPE_CHECKING:
    import typer


def run(arguments: Sequence[str]) -> int:
    """Run ``swarmctl`` with these arguments; return the exit code."""
    return entry.run(_load, "swarmctl", arguments)


def main() -> None:
    entry.run_and_exit(run)


def _load() -> typer.Typer:
    from swarm.cli.meta.completion import handle_completion
    from swarm.ctl.commands import app

    handle_completion("swarmctl")
    return app
