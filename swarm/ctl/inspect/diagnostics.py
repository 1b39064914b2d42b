"""Problems of a running swarm, found in its own reports, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from swarm.admin.report_rows import (
    Row,
    format_count,
    get_number,
    is_present,
    may_have_layers,
    read_rows,
    release_commands,
)
from swarm.cli.doctor.checks import Finding
from swarm.ctl.inspect.links import check_clocks, check_links
from swarm.ctl.inspect.versions import compare_versions
from swarm.ctl.inspect.workers import check_refused, check_spare_workers, check_workers, is_slow
from swarm.wire.messages import Json

MAX_DEVIATION: Final = 0.25  # Fraction by which a stage's step time may differ from the prediction.
MIN_STEPS: Final = 32
FULL_FRACTION: Final = 0.95


class Reports(NamedTuple):
    """The broker's reports, queried at about the same time."""

    status: Json
    nodes: Json
    plan: Json


def diagnose(reports: Reports) -> list[Finding]:
    """Return all findings, each once: the swarm as a whole, then each worker and each connection, then predictions."""
    nodes = reports.nodes
    general = [*_check_swarm(reports.status, nodes), *_check_builds(reports), *check_spare_workers(nodes)]
    here = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    release = release_commands(here)
    is_held_back_reported = bool(release) and any(finding.remedy.startswith(release) for finding in general)
    workers = check_workers(nodes, with_held_back=not is_held_back_reported)
    specific = [*workers, *check_refused(nodes), *check_links(nodes), *check_clocks(nodes)]
    slow = {str(row.get("name")) for row in here if is_slow(row)}
    return [*general, *specific, *_check_predictions(reports.plan, slow)]


def _check_swarm(status: Row, nodes: Row) -> Iterator[Finding]:
    if status.get("state") == "serving":
        text = (
            f"{status.get('model')} by {format_count(status.get('num_stages'), 'stage')}, epoch {status.get('epoch')}"
        )
        yield Finding("serving", "ok", text)
    else:
        waits = status.get("waits_for") or "a plan"
        yield Finding(
            "serving", "trouble", f"the swarm does not serve: it waits for {waits}", _waiting_remedy(str(waits), nodes)
        )
    if status.get("journal_problem"):
        remedy = "free space for the broker's state directory, or repair its disk; until then no request is accepted"
        yield Finding("journal", "trouble", str(status["journal_problem"]), remedy)
    if status.get("connections_problem"):
        yield Finding("doors", "trouble", str(status["connections_problem"]), "raise the broker's limit (ulimit -n)")
    for note in _texts(status.get("journal_notes")):
        yield Finding("journal", "note", note, "docs/explanation/recovery.md explains what was kept")
    for note in _texts(status.get("connections_notes")):
        yield Finding("doors", "note", note, "find the clients that connect so often")
    yield from _check_queue(status)


def _waiting_remedy(waits_for: str, nodes: Row) -> str:
    """Return the remedy: uncordon workers, if only cordoned ones could take the layers or the reason names them."""
    here = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    is_cure = "uncordon" in waits_for or not any(map(may_have_layers, here))
    lets = release_commands(here) if is_cure else ""
    return f"{lets} allows them to get layers again; see swarmctl nodes" if lets else "see swarmctl nodes"


def _check_queue(status: Row) -> Iterator[Finding]:
    waiting, capacity = get_number(status, "num_queued"), get_number(status, "kv_capacity")
    if not waiting:
        yield Finding("queue", "ok", f"none wait, {get_number(status, 'num_running'):.0f} run")
    elif capacity and get_number(status, "kv_reserved") >= FULL_FRACTION * capacity:
        text = f"{waiting:.0f} wait: the KV capacity is used up ({capacity:.0f} positions)"
        yield Finding("queue", "note", text, "add a worker, or memory (swarmctl plan shows the limiting worker)")
    else:
        yield Finding(
            "queue", "note", f"{waiting:.0f} wait", "swarmctl stats --all shows for what; another worker helps"
        )


def _check_builds(reports: Reports) -> Iterator[Finding]:
    rows = read_rows(compare_versions(reports.status, reports.nodes).get("processes"))
    different = [str(row["process"]) for row in rows if row["unlike"]]
    if different:
        text = f"builds that differ from the broker's: {', '.join(different)}"
        yield Finding("builds", "note", text, "swarmctl version shows them, swarmctl upgrade --rolling updates them")
    else:
        yield Finding("builds", "ok", f"all of {reports.status.get('version')}")


def _check_predictions(plan: Row, slow: Collection[str]) -> Iterator[Finding]:
    """Compare predicted and measured times. ``slow``: workers that are reported as slow already."""
    accurate = []
    for row in read_rows(plan.get("stages")):
        expected, seen = get_number(row, "expected_s"), get_number(row, "seen_s")
        if get_number(row, "seen_steps") < MIN_STEPS or not expected:
            continue
        text = f"{row.get('worker')} {expected * 1000:.3g} ms a step, took {seen * 1000:.3g}"
        if abs(seen / expected - 1) <= MAX_DEVIATION:
            accurate.append(text)
        elif seen < expected or row.get("worker") not in slow:
            yield Finding("predicted", "note", *_describe_deviation(text, seen / expected))
    if accurate:
        yield Finding("predicted", "ok", "; ".join(accurate))


def _describe_deviation(text: str, times: float) -> tuple[str, str]:
    """Return text and remedy for a stage whose steps take ``times`` as long as predicted.

    A plan keeps the costs that it was made with, so no command corrects it; the next plan uses the measured times.
    """
    next_one = "the next plan uses the measured times"
    if times > 1:
        return f"{text}: {times - 1:.0%} slower", f"check what else uses its cores or memory; {next_one}"
    why = "nothing to do: something else used its cores when it measured itself at its start"
    return f"{text}: {1 - times:.0%} faster", f"{why}; {next_one}"


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []
