"""Command line of ``swarmctl top``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.ctl.top.poller import AWAY_S, TopPoller, query_data


def top(
    context: typer.Context,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=60, help="Polling interval.")
    ] = 1.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the swarm live, on the whole terminal: stages, memory, keys and values, tokens/s, queue, recoveries,
    requests.

    Arrow keys select a worker or a request; d drains a worker, u uncordons it, c cancels a request (d and c ask for
    confirmation); q quits. An unreachable broker is indicated, and the view continues. With --json: print the data
    once.
    """
    outer = context.obj
    wants_json = as_json or outer.as_json
    with open_client(context, url or outer.url, away_s=AWAY_S) as client:
        known = query_data(client)
        if wants_json:
            from swarm.cli.output import print_json

            print_json({part: getattr(known, part) for part in ("status", "nodes", "stats", "requests")})
            return
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise typer.BadParameter("top needs a terminal; scripts take --json, or swarmctl stats --watch")
        from swarm.ctl.top.screen import run

        with TopPoller(client, known, every) as asking:
            run(asking)
