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
    entry.end_with(run)


def _load() -> typer.Typer:
    from swarm.cli.about.completion import prepare
    from swarm.ctl.commands import app

    prepare("swarmctl")
    return app
