"""``swarmctl version``: query the builds of broker, workers and gateways, and display them."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.ctl.inspect import gateways


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
    from swarm.cli.output import make_console, print_json
    from swarm.ctl.inspect.versions import compare_versions, render_versions

    outer, key = context.obj, gateways.api_key_from(api_key_env)
    gateway_answers = {address: gateways.query_gateway(address, "/console/me", key) for address in gateway or ()}
    with open_client(context, url or outer.url) as client:
        body = compare_versions(client.query("status"), client.query("nodes"), gateway_answers)
    if as_json or outer.as_json:
        print_json(body)
    else:
        make_console().print(render_versions(body))
