"""What a running swarm suffers from, by its own reports, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from swarm.cli.doctor.checks import Finding, Level, slow_way, way
from swarm.ctl.look.versions import versions
from swarm.govern.rows import rows_of
from swarm.wire.messages import Json

Row = Mapping[str, object]

SLOW: Final = 1.5  # times as long as a worker measured at its start
OFF: Final = 0.25  # part by which a stage's steps may be another length than predicted
ENOUGH_STEPS: Final = 32
LATE_S: Final = 0.1  # a process's loop comes to its work so much later than it wanted to
FULL: Final = 0.95
_REMEDIES: Final = {
    "slow": "see what else uses its cores or memory; swarmctl drain lets it go",
    "blocked": "see what it waits for; it goes on by itself as soon as that is there",
    "silent": "look at its machine and at the way to it; it joins again by itself",
    "hung": "its log says where it stood; a supervisor (swarm up, systemd) starts it again",
    "dead": "its log says why; a supervisor (swarm up, systemd) starts it again",
    "lied": "test its machine's memory: what it computed was wrong, and nothing of it is used any more",
}


class Reports(NamedTuple):
    """The broker's answers, asked at about the same time."""

    status: Json
    nodes: Json
    plan: Json


def ailments(reports: Reports) -> list[Finding]:
    """The swarm as a whole first, then worker by worker, then how it keeps to what was predicted."""
    return [*_whole(reports.status), *_builds(reports), *_workers(reports.nodes), *_predictions(reports.plan)]


def _whole(status: Row) -> Iterator[Finding]:
    if status.get("state") == "serving":
        text = f"{status.get('model')} by {status.get('num_stages')} stages, epoch {status.get('epoch')}"
        yield Finding("serving", "ok", text)
    else:
        waits = status.get("waits_for") or "a plan"
        yield Finding(
            "serving", "trouble", f"it does not serve: it waits for {waits}", "swarmctl nodes says who is here"
        )
    if status.get("journal_problem"):
        remedy = "make room for the broker's state directory, or mend its disk; until then nothing is accepted"
        yield Finding("journal", "trouble", str(status["journal_problem"]), remedy)
    if status.get("connections_problem"):
        yield Finding("doors", "trouble", str(status["connections_problem"]), "raise the broker's limit (ulimit -n)")
    for note in _texts(status.get("journal_notes")):
        yield Finding("journal", "note", note, "docs/recovery.md tells what was kept")
    for note in _texts(status.get("connections_notes")):
        yield Finding("doors", "note", note, "see who knocks so often")
    yield from _queue(status)


def _queue(status: Row) -> Iterator[Finding]:
    waiting, capacity = _number(status, "num_queued"), _number(status, "kv_capacity")
    if not waiting:
        yield Finding("queue", "ok", f"nobody waits, {_number(status, 'num_running'):.0f} run")
    elif capacity and _number(status, "kv_reserved") >= FULL * capacity:
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


def _workers(nodes: Row) -> Iterator[Finding]:
    here = [row for row in rows_of(nodes.get("workers")) if row.get("state") not in ("left", "out")]
    if not here:
        yield Finding("workers", "trouble", "none is here", "swarmctl join, or swarm worker --join on another machine")
    for row in here:
        found = list(_worker(row))
        yield from found or [Finding(str(row.get("name")), "ok", _well(row))]


def _worker(row: Row) -> Iterator[Finding]:
    name, verdict = str(row.get("name")), str(row.get("verdict"))
    if verdict not in ("well", "loading"):
        level: Level = "note" if verdict in ("slow", "blocked") else "trouble"
        evidence = row.get("evidence") or verdict
        yield Finding(name, level, f"{verdict}: {evidence}", _REMEDIES.get(verdict, "swarmctl nodes says more"))
    elif _number(row, "pace") > SLOW:
        text = f"its steps take {_number(row, 'pace'):.1f} times as long as it measured at its start"
        yield Finding(name, "note", text, _REMEDIES["slow"])
    if row.get("lies"):
        yield Finding(name, "trouble", f"what it computed was proven wrong {row['lies']} times", _REMEDIES["lied"])
    if row.get("unreachable"):
        remedy = "let these machines reach its data port (a firewall?); until then the plan goes around it"
        yield Finding(name, "note", str(row["unreachable"]), remedy)
    if "inexact" in str(row.get("kernels")):
        remedy = "worker.bits = portable, or a device whose kernels are exact"
        yield Finding(name, "note", f"not the same bits everywhere: {row['kernels']}", remedy)
    if _number(row, "loop_lag_s") > LATE_S:
        text = f"its process comes to its work {_number(row, 'loop_lag_s') * 1000:.0f} ms late"
        yield Finding(name, "note", text, "its cores are taken by something else, or its memory is swapped out")
    yield from _way(name, row)


def _way(name: str, row: Row) -> Iterator[Finding]:
    """As it was measured over the worker's own connection."""
    measured = _number(row, "round_trip_s"), _number(row, "bytes_per_s")
    for remedy in slow_way(*measured):
        yield Finding(name, "note", f"its way to the broker: {way(*measured)}", remedy)


def _well(row: Row) -> str:
    layers = row.get("layers")
    held = f"layers {layers[0]}-{layers[1] - 1}" if isinstance(layers, list) else "no layers"
    measured = _number(row, "round_trip_s"), _number(row, "bytes_per_s")
    far = f"; its way to the broker: {way(*measured)}" if measured[0] else ""
    return f"well, with {held}{far}"


def _predictions(plan: Row) -> Iterator[Finding]:
    told = []
    for row in rows_of(plan.get("stages")):
        expected, seen = _number(row, "expected_s"), _number(row, "seen_s")
        if _number(row, "seen_steps") < ENOUGH_STEPS or not expected:
            continue
        text = f"{row.get('worker')} {expected * 1000:.3g} ms a step, took {seen * 1000:.3g}"
        told.append(text)
        if abs(seen / expected - 1) > OFF:
            remedy = "something shared its cores then or now: swarmctl rebalance plans with what was seen since"
            yield Finding("predicted", "note", text, remedy)
            told.pop()
    if told:
        yield Finding("predicted", "ok", "; ".join(told))


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []
