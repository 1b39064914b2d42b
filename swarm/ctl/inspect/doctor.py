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
    from swarm.cli.doctor.command import print_findings
    from swarm.ctl.inspect.diagnostics import Reports, diagnose

    outer = context.obj
    with open_client(context, url or outer.url) as client:
        findings = diagnose(Reports(client.query("status"), client.query("nodes"), client.query("plan")))
    if as_json or outer.as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
    if any(finding.level == "trouble" for finding in findings):
        raise typer.Exit(EXIT_FAILED)
