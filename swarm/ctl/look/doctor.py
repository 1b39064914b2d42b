"""``swarmctl doctor``: what a running swarm suffers from, with what to do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.cli.output import EXIT_FAILED, print_json


def doctor(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """What this swarm suffers from, with what to do about it; nothing is changed.

    A line for each finding: what is right, what is worth knowing (·), and what is in the way (!). Builds, queue and
    journal, each worker's health and way to the broker, stages predicted beside measured. Exit code 1 if anything is in
    the way. Of a machine by itself: swarm doctor, there.
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
