"""``swarm doctor``: this machine's problems for running a swarm, and their remedies."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import ConfigOption, JsonOption, StateDirOption, WeightsOption, load_settings
from swarm.cli.output import EXIT_FAILED, print_json, window_width

if TYPE_CHECKING:
    from swarm.cli.doctor.checks import Finding

_MARKS = {"ok": "  ", "note": "· ", "trouble": "! "}


def doctor(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Check this model's files, too, and estimate how fast it would run here."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=64, help="With --model: number of workers here.")
    ] = 2,
    weights: WeightsOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Test the connection to this broker, too. [default: the broker that this worker machine joined]",
        ),
    ] = None,
    state_dir: StateDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine is fit to run a swarm, or a part of one; nothing is changed.

    One line per finding: what is right, what is worth noting (·), and what prevents a start (!), with a remedy. With
    --model (a directory, a GGUF file, or owner/name on a hub, of which no weights are fetched) also how fast it would
    run. Exit code 1 if anything prevents a start. With --url, or if this machine joined a swarm, also the connection to
    its broker, on the workers' port: round trip and throughput. Where systemd units are installed, their settings and
    state are checked, unless others are named. For the problems of a running swarm, use swarmctl doctor.
    """
    from swarm.cli.doctor.checks import make_findings
    from swarm.cli.doctor.facts import gather
    from swarm.cli.doctor.paths import choose_paths
    from swarm.stage.shell.openmp import configure_openmp

    places = choose_paths(config, state_dir)
    overrides = {
        "model": model,
        "worker.weights": weights.value if weights else None,
        "client.url": url,
        "state_dir": str(places.state) if places.state else None,
    }
    settings = load_settings(context, places.settings, overrides)
    configure_openmp(
        settings.worker.threads
    )  # like a worker, before any import of torch, so that the measured times are a worker's
    results = make_findings(gather(settings, workers if model else 0, is_of_units=places.is_of_units))
    if as_json:
        print_json({"findings": [asdict(each) for each in results]})
    else:
        print_findings(results)
    if any(each.level == "trouble" for each in results):
        raise typer.Exit(EXIT_FAILED)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings for people. In a window, lines are wrapped between words."""
    width = window_width() or sys.maxsize
    print("\n".join(line for finding in findings for line in format_finding(finding, width)))


def format_finding(finding: Finding, width: int = sys.maxsize) -> list[str]:
    """Return a finding as text for people: the remedy is below the finding."""
    first = f"{_MARKS[finding.level]}{finding.about:12} "
    lines = _wrap(first, finding.text, width)
    return lines + _wrap(f"{'':{len(first)}}→ ", finding.remedy, width) if finding.remedy else lines


def _wrap(prefix: str, text: str, width: int) -> list[str]:
    """Break a text between words; continued lines are indented like the first one."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )
