"""Entry point of ``swarm``. Imports almost nothing, so that an interrupt during imports is handled here, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.cli import entry

if TYPE_CHECKING:
    import typer


def run(arguments: Sequence[str]) -> int:
    """Run ``swarm`` with these arguments; return the exit code."""
    return entry.run(_load, "swarm", arguments)


def main() -> None:
    entry.end_with(run)


def _load() -> typer.Typer:
    from swarm.cli.about.completion import prepare
    from swarm.cli.app import app

    prepare("swarm")
    return app
