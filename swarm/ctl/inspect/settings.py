"""``swarmctl config show``: the settings of a running process, queried from the process itself."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.meta.completion import worker_names
from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.ctl.inspect import gateways

config_app = typer.Typer(
    help="Settings of running processes.", epilog="Example: swarmctl config show --worker w1 --changed"
)


@config_app.callback()
def config() -> None:
    """Settings of running processes."""


@config_app.command(
    short_help="Show the settings of a running process.", epilog="Example: swarmctl config show --worker w1 --changed"
)
def show(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    worker: Annotated[
        str,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Show this worker's settings. [default: the broker's]",
            show_default=False,
            autocompletion=worker_names,
        ),
    ] = "",
    gateway: Annotated[
        str,
        typer.Option(
            "--gateway", metavar="URL", help="Show those of the gateway at http://HOST:PORT.", show_default=False
        ),
    ] = "",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env", metavar="VARIABLE", help="With --gateway: the variable that holds an admin's API key."
        ),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from their defaults.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the settings of the broker, a worker or a gateway: each value in effect and its source. Passwords are
    hidden.

    A broker's and a gateway's are current, including reloads; a worker's are those at its join. For the settings of a
    process that would be started here now, use swarm config show.
    """
    from swarm.admin.report_rows import read_rows
    from swarm.cli.meta.show import format_settings
    from swarm.cli.output import print_json, window_width
    from swarm.config import DEFAULTS

    if worker and gateway:
        raise typer.BadParameter("--worker and --gateway name two processes: give one of them")
    outer = context.obj
    if gateway:
        body = gateways.query_gateway(gateway, "/console/settings", gateways.api_key_from(api_key_env))
    else:
        with open_client(context, url or outer.url) as client:
            body = client.settings(worker)
    rows = [dict(row) for row in read_rows(body.get("settings")) if not changed or row.get("from") != DEFAULTS]
    if as_json or outer.as_json:
        print_json({**body, "settings": rows})
    else:
        print("\n".join(format_settings(rows, [], window_width())) or "every setting is at its default")
