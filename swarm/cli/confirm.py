"""Confirmation before a destructive action: on a terminal, unless ``--yes`` was given. A script is never asked."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarm.cli.output import print_error

YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Skip the confirmation, which is asked for only on a terminal.")
]


def confirm_or_exit(question: str, *, yes: bool, program: str = "swarmctl") -> None:
    """Return if the user at the terminal confirms; else exit with code 1 and a line from ``program``, with nothing
    done."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, err=True):
        raise typer.Exit(print_error(program, "nothing was done: the answer was no"))
