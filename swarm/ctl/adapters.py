"""``swarmctl adapters``: LoRA adapters of a running swarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.client.blocking import Client
    from swarm.wire.messages import Json

adapters_app = typer.Typer(
    help="LoRA adapters: list them (without a command), load and drop them while the swarm serves.",
    epilog="Example: swarmctl adapters load red /models/red",
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What requests name as their model.")]


@adapters_app.callback(invoke_without_command=True)
def adapters(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the adapters, or load or drop one."""
    if context.invoked_subcommand is None:
        from swarm.ctl import render

        _run(context, url, lambda client: client.adapters(), render.adapters, as_json=as_json)


@adapters_app.command(
    "load", short_help="Load an adapter on every worker.", epilog="Example: swarmctl adapters load red owner/red"
)
def load(
    context: typer.Context,
    name: NameArgument,
    source: Annotated[
        str, typer.Argument(metavar="DIR|OWNER/NAME", help="A folder that each worker has; or a name on the hub.")
    ],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a LoRA adapter on every worker, now and after restarts. Requests may name it once all workers have it."""
    from swarm.config.values import check_adapter
    from swarm.ctl import render

    try:
        check_adapter(f"{name}={source}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if (path := Path(source).expanduser()).is_dir():
        source = str(path.resolve())
    _run(context, url, lambda client: client.load_adapter(name, source), render.fields, as_json=as_json)


@adapters_app.command("drop", short_help="Drop an adapter.", epilog="Example: swarmctl adapters drop red")
def drop(context: typer.Context, name: NameArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Drop an adapter: new requests can't name it any more, and it is unloaded when those that have it end."""
    from swarm.ctl import render

    _run(context, url, lambda client: client.drop_adapter(name), render.fields, as_json=as_json)


def _run(
    context: typer.Context,
    url: str | None,
    query: Callable[[Client], Json],
    show: Callable[[Json], RenderableType],
    *,
    as_json: bool,
) -> None:
    from swarm.cli.output import make_console, print_json

    outer = context.find_root().obj
    with open_client(context, url or outer.url) as client:
        body = query(client)
    if as_json or outer.as_json:
        print_json(body)
    else:
        make_console().print(show(body))
