"""``swarmctl version``: query the builds of broker, workers and gateways, and display them."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.ctl.look import gateways


def version(
    context: typer.Context,
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            "--gateway",
            metavar="URL",
            help="Include the gateway at http://HOST:PORT (may be repeated): the broker has no list of gateways.",
            show_default=False,
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="VARIABLE", help="With --gateway: the variable that holds an API key."),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the build of every process: the broker, its workers, named gateways, and this command. Differences are
    pointed out."""
    from swarm.cli.output import console, print_json
    from swarm.ctl.look.versions import drawn, versions

    outer, key = context.obj, gateways.key_in(api_key_env)
    told = {address: gateways.asked(address, "/console/me", key) for address in gateway or ()}
    with open_client(context, url or outer.url) as client:
        body = versions(client.query("status"), client.query("nodes"), told)
    if as_json or outer.as_json:
        print_json(body)
    else:
        console().print(drawn(body))
