"""``swarm``: the commands that run things. What each needs, it imports when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm import __version__
from swarm.cli.chat import chat
from swarm.cli.generate import generate
from swarm.cli.options import Common, LogFormat, LogLevel
from swarm.cli.profile import profile
from swarm.cli.run import broker, config_app, worker
from swarm.cli.sim import sim
from swarm.cli.up import up

app = typer.Typer(
    help="Run one language model over several processes and machines, and keep its word while they die.",
    epilog='Try: swarm up, and in another terminal: swarm generate "Once upon a time"',
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="The least that is logged, to stderr.")
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="auto: readable on a terminal, JSON lines elsewhere.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before the command's name."""
    context.obj = Common(log_level, log_format)


app.command()(up)
app.command()(broker)
app.command()(worker)
app.command()(generate)
app.command()(chat)
app.command()(profile)
app.command()(sim)
app.add_typer(config_app, name="config")
