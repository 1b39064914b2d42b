"""``swarmctl doctor``: problems of a running swarm, with remedies."""

from __future__ import annotations

from dataclasses import asdict

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.cli.output import EXIT_FAILED, print_json


def doctor(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Check this swarm: list problems with remedies; change nothing.

    One line per finding: fine, worth knowing (·), or a problem (!). Covers builds, queue and journal, each worker's
    health and connection to the broker, and stages' predicted and measured times. Exit code 1 if there is a problem. To
    check a single machine, run swarm doctor there.
    """
    from swarm.cli.doctor.command import lines
    from swarm.ctl.look.ailments import Reports, ailments

    outer = context.obj
    with open_client(context, url or outer.url) as client:
        found = ailments(Reports(client.query("status"), client.query("nodes"), client.query("plan")))
    if as_json or outer.as_json:
        print_json({"findings": [asdict(each) for each in found]})
    else:
        print("\n".join(line for each in found for line in lines(each)))
    if any(each.level == "trouble" for each in found):
        raise typer.Exit(EXIT_FAILED)
