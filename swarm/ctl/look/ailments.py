"""What a running swarm suffers from, by its own reports, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from swarm.cli.doctor.checks import Finding
from swarm.ctl.look.versions import versions
from swarm.ctl.look.ways import of_clocks, of_ways
from swarm.ctl.look.workers import of_held_back, of_refused, of_workers
from swarm.govern.rows import Row, counted, is_here, lets_them, may_have_layers, number, rows_of
from swarm.wire.messages import Json

OFF: Final = 0.25  # part by which a stage's steps may be another length than predicted
ENOUGH_STEPS: Final = 32
FULL: Final = 0.95


class Reports(NamedTuple):
    """The broker's answers, asked at about the same time."""

    status: Json
    nodes: Json
    plan: Json


def ailments(reports: Reports) -> list[Finding]:
    """The swarm as a whole first, then worker by worker and way by way, then how it keeps to what was predicted."""
    nodes = reports.nodes
    of_all = [*_whole(reports.status, nodes), *_builds(reports), *of_held_back(nodes)]
    of_each = [*of_workers(nodes), *of_refused(nodes), *of_ways(nodes), *of_clocks(nodes)]
    return [*of_all, *of_each, *_predictions(reports.plan)]


def _whole(status: Row, nodes: Row) -> Iterator[Finding]:
    if status.get("state") == "serving":
        text = f"{status.get('model')} by {counted(status.get('num_stages'), 'stage')}, epoch {status.get('epoch')}"
        yield Finding("serving", "ok", text)
    else:
        waits = status.get("waits_for") or "a plan"
        yield Finding("serving", "trouble", f"it does not serve: it waits for {waits}", _of_waiting(str(waits), nodes))
    if status.get("journal_problem"):
        remedy = "make room for the broker's state directory, or mend its disk; until then nothing is accepted"
        yield Finding("journal", "trouble", str(status["journal_problem"]), remedy)
    if status.get("connections_problem"):
        yield Finding("doors", "trouble", str(status["connections_problem"]), "raise the broker's limit (ulimit -n)")
    for note in _texts(status.get("journal_notes")):
        yield Finding("journal", "note", note, "docs/explanation/recovery.md tells what was kept")
    for note in _texts(status.get("connections_notes")):
        yield Finding("doors", "note", note, "see who knocks so often")
    yield from _queue(status)


def _of_waiting(waits_for: str, nodes: Row) -> str:
    """What to do about it: let those have layers who are held back by hand, where nobody else may or they are named."""
    here = [row for row in rows_of(nodes.get("workers")) if is_here(row)]
    is_cure = "uncordon" in waits_for or not any(map(may_have_layers, here))
    lets = lets_them(here) if is_cure else ""
    return (
        f"{lets} lets them have layers again; swarmctl nodes shows them" if lets else "swarmctl nodes says who is here"
    )


def _queue(status: Row) -> Iterator[Finding]:
    waiting, capacity = number(status, "num_queued"), number(status, "kv_capacity")
    if not waiting:
        yield Finding("queue", "ok", f"nobody waits, {number(status, 'num_running'):.0f} run")
    elif capacity and number(status, "kv_reserved") >= FULL * capacity:
        text = f"{waiting:.0f} wait: there is no more room for keys and values ({capacity:.0f} positions)"
        yield Finding("queue", "note", text, "another worker, or more memory (swarmctl plan: who binds all)")
    else:
        yield Finding("queue", "note", f"{waiting:.0f} wait", "swarmctl stats says for what; another worker helps")


def _builds(reports: Reports) -> Iterator[Finding]:
    rows = rows_of(versions(reports.status, reports.nodes).get("processes"))
    strange = [str(row["process"]) for row in rows if row["unlike"]]
    if strange:
        text = f"of another build than the broker: {', '.join(strange)}"
        yield Finding(
            "builds", "note", text, "swarmctl version shows them, swarmctl upgrade --rolling makes them alike"
        )
    else:
        yield Finding("builds", "ok", f"all of {reports.status.get('version')}")


def _predictions(plan: Row) -> Iterator[Finding]:
    told = []
    for row in rows_of(plan.get("stages")):
        expected, seen = number(row, "expected_s"), number(row, "seen_s")
        if number(row, "seen_steps") < ENOUGH_STEPS or not expected:
            continue
        text = f"{row.get('worker')} {expected * 1000:.3g} ms a step, took {seen * 1000:.3g}"
        told.append(text)
        if abs(seen / expected - 1) > OFF:
            yield Finding("predicted", "note", *_off(text, seen / expected))
            told.pop()
    if told:
        yield Finding("predicted", "ok", "; ".join(told))


def _off(text: str, times: float) -> tuple[str, str]:
    """What is said of a stage that takes so many times as long as predicted, and why that may be. A plan is compared
    with what it was made with, so nobody's order mends it: the next one is made with what was seen."""
    next_one = "the next plan reckons with what was seen"
    if times > 1:
        return f"{text}: {times - 1:.0%} slower", f"see what else uses its cores or memory; {next_one}"
    why = "nothing to do: when it measured itself, at its start, something else used its cores"
    return f"{text}: {1 - times:.0%} quicker", f"{why}; {next_one}"


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []
