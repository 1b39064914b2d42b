"""``swarm attach``: read the answer to an earlier request."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.generate.generate import TimeoutOption, WholeJsonOption, print_rest, print_stream
from swarm.cli.options import JoinOption, UrlOption, open_client


def attach(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="The request's id, as `swarm generate --detach` printed it.", show_default=False
        ),
    ],
    first: Annotated[
        int,
        typer.Option(
            "--from",
            metavar="N",
            min=0,
            help="First token to show, from 0. With --json, or for several answers, all are shown.",
        ),
    ] = 0,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    timeout: TimeoutOption = None,
    as_json: WholeJsonOption = False,
) -> None:
    """Read the answer to a request, from any client: while it is generated, or for as long as the broker keeps it.

    The answer goes to stdout, everything else to stderr. Ctrl-C ends the reading; a detached request continues.
    """
    with open_client(context, url, join) as client:
        stream = client.attach(request, first, timeout=timeout)  # raises errors about wrong options
        many = client.recall(request).params.n > 1
        completion = print_stream(stream, client, silent=as_json or many)
        print_rest(completion, client, as_json=as_json)
