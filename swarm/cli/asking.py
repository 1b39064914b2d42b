"""Asking before something is ended: on a terminal, unless ``--yes`` was said. A script can't answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarm.cli.output import complain

YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Don't ask. On a terminal it asks first, in a script it never does.")
]


def ask_first(question: str, *, yes: bool, program: str = "swarmctl") -> None:
    """Go on if whoever sits at the terminal says so; else end with exit code 1 and a line of ``program``'s, having done
    nothing."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, err=True):
        raise typer.Exit(complain(program, "nothing was done: the answer was no"))
