"""``swarm completion SHELL``: the script by which a shell completes our command lines.

On the Tab key, the shell runs the program with the current line in an environment variable, and typer prints the
completions in the shell's format. Workers' names are queried from the broker. If it does not answer quickly, nothing is
completed and no error is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from swarm.cli.options import JsonOption, load_settings
from swarm.cli.output import print_json
from swarm.errors import SwarmError

TIMEOUT_S: Final = 0.5  # a user is waiting after pressing Tab
_LEFT_STATES: Final = ("left", "out")  # states of workers that are no longer members


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


_INSTALL: Final = {
    Shell.bash: 'eval "$({} completion bash)"   # in ~/.bashrc',
    Shell.zsh: 'eval "$({} completion zsh)"   # in ~/.zshrc, after compinit',
    Shell.fish: "{} completion fish | source   # in ~/.config/fish/config.fish",
}


def make_command(program: str) -> Callable[..., None]:
    """Return the ``completion`` command of this program."""

    def completion(
        shell: Annotated[Shell, typer.Argument(help="Shell to print the script for.", show_default=False)],
        as_json: JsonOption = False,
    ) -> None:
        from typer._completion_shared import get_completion_script  # public only as an option of typer's own

        script = get_completion_script(prog_name=program, complete_var=_variable(program), shell=shell.value)
        if as_json:
            print_json({"program": program, "shell": shell.value, "script": script})
        else:
            print(f"# {_INSTALL[shell].format(program)}\n{script}")

    completion.__doc__ = f"""Print the script with which bash, zsh or fish completes command lines of {program}.

    It completes commands, options and their choices, and names of workers if a broker answers within half a second.
    The first line of the script shows where to put it.
    """
    return completion


def handle_completion(program: str) -> None:
    """Answer a shell's completion request, if this process was started for one."""
    if _variable(program) in os.environ:
        from typer._click.shell_completion import add_completion_class
        from typer._completion_classes import ZshComplete, completion_init

        class Zsh(ZshComplete):
            def complete(self) -> str:
                return _quote_for_zsh(super().complete())

        completion_init()
        add_completion_class(Zsh, Shell.zsh.value)


def _quote_for_zsh(answer: str) -> str:
    """Quote an answer for zsh to evaluate.

    typer doubles quotation marks, which zsh removes: "The brokers clients door".
    """
    return answer.replace("''", "'\\''").replace('""', '\\"')


def _variable(program: str) -> str:
    return f"_{program.upper()}_COMPLETE"


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of current workers that begin with ``incomplete``."""
    try:
        return [name for name in _query_workers(ctx) if name.startswith(incomplete)]
    except (SwarmError, typer.BadParameter, OSError):
        return []


def _query_workers(context: typer.Context) -> Iterator[str]:
    from swarm.cli.joining import resolve_client
    from swarm.client.blocking import Client

    outer = context.parent.params if context.parent is not None else {}
    settings = load_settings(context, None, {"client.url": context.params.get("url") or outer.get("url")})
    access = resolve_client(settings, None)
    with Client(access, connect_timeout_s=TIMEOUT_S, reconnect_timeout_s=TIMEOUT_S) as client:
        rows: Any = client.query("nodes").get("workers")
    return (str(row["name"]) for row in rows if row["state"] not in _LEFT_STATES)
