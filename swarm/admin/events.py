"""Events of a swarm, found by comparing two snapshots. Pure.

The broker is asked for its state, and each difference from the last snapshot is an event. So events continue over a
restart of the broker, and cost nothing without readers. Something that came and went between two snapshots appears
only if the broker remembers it: recoveries, workers that have gone, and rejected workers.

A restarted broker gets its workers back one by one. Until then they are awaited, not lost: ``carry_over`` carries them
over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from swarm.admin.report_rows import Row, format_count, get_number, is_present, read_rows
from swarm.wire.messages import Json


class SwarmSnapshot(NamedTuple):
    """Snapshot: the broker's answers to three questions, asked at about the same time."""

    status: Json
    nodes: Json
    recoveries: Json
    # workers from before the broker's restart that have not returned, by incarnation
    awaited: Mapping[object, Row] = {}


@dataclass(frozen=True, slots=True)
class SwarmEvent:
    """An event: ``name`` and ``fields`` for programs, ``text`` for people."""

    name: str
    text: str
    fields: Json


AWAY = SwarmEvent("broker_away", "the broker does not answer; waiting for it", {})
BACK = SwarmEvent("broker_back", "the broker answers again", {})
NO_SNAPSHOT = SwarmSnapshot({}, {}, {})
AWAITED_S: Final = 15.0  # after the broker's start: a worker that has not returned by then is lost


def diff_events(before: SwarmSnapshot, after: SwarmSnapshot) -> list[SwarmEvent]:
    """Return the events between two snapshots: broker, workers, recoveries, plan, problems. After ``NO_SNAPSHOT``,
    everything is new."""
    events: list[SwarmEvent] = []
    if _has_restarted(before.status, after.status):
        events.append(SwarmEvent("broker_started", "the broker has restarted", {"uptime_s": after.status["uptime_s"]}))
        before = _as_awaited(before)
    events += _workers(before, after)
    events += _rejections(before.nodes, after.nodes)
    events += _recoveries(before.recoveries, after.recoveries)
    events += _plan(before.status, after.status)
    events += _problems(before.status, after.status)
    return events


def events_after_absence(events: list[SwarmEvent]) -> list[SwarmEvent]:
    """Return the events to report when the broker answers again. A restart of the broker implies that it answers."""
    return events if any(event.name == "broker_started" for event in events) else [BACK, *events]


def carry_over(before: SwarmSnapshot, after: SwarmSnapshot) -> SwarmSnapshot:
    """Return the snapshot for the next comparison: ``after``, with the workers that a restarted broker still awaits."""
    if _has_restarted(before.status, after.status):
        before = _as_awaited(before)
    workers = _index_workers(after.nodes)
    missed = {i: row for i, row in before.awaited.items() if i not in workers and not _is_given_up(row, after)}
    return after._replace(awaited=missed)


def _has_restarted(before: Json, after: Json) -> bool:
    was, is_now = before.get("uptime_s"), after.get("uptime_s")
    return isinstance(was, int | float) and isinstance(is_now, int | float) and is_now < was


def _as_awaited(look: SwarmSnapshot) -> SwarmSnapshot:
    """Return the snapshot to compare with the first snapshot of a restarted broker. Its workers are awaited; everything
    else is dropped, so that all of the new broker's data counts as new."""
    present = {i: row for i, row in _index_workers(look.nodes).items() if is_present(row)}
    return look._replace(recoveries={}, nodes={}, awaited={**look.awaited, **present})


def _is_given_up(awaited: Row, after: SwarmSnapshot) -> bool:
    """Whether to stop waiting for this worker: another process has its name, or it is late."""
    named = (row for row in read_rows(after.nodes.get("workers")) if row.get("name") == awaited.get("name"))
    return any(map(is_present, named)) or get_number(after.status, "uptime_s") > AWAITED_S


def _workers(before: SwarmSnapshot, after: SwarmSnapshot) -> Iterator[SwarmEvent]:
    workers_before, workers_after = _index_workers(before.nodes), _index_workers(after.nodes)
    for incarnation, row in workers_before.items():  # departures first, then arrivals under the same names
        if incarnation not in workers_after and is_present(row):
            yield _worker_event("worker_lost", row, "is unknown to the broker now")
    for incarnation, row in before.awaited.items():
        if incarnation not in workers_after and _is_given_up(row, after):
            yield _worker_event("worker_lost", row, "did not return to the restarted broker")
    for incarnation, row in workers_after.items():
        yield from _worker(workers_before.get(incarnation, {}), row, before.awaited.get(incarnation))


def _worker(was: Row, row: Row, awaited: Row | None) -> Iterator[SwarmEvent]:
    """Yield the events of one worker. ``awaited``: its row before the broker's restart."""
    state = row.get("state")
    if awaited is not None:
        was = awaited
        if is_present(row):
            yield _worker_event("worker_back", row, f"is back (process {row.get('pid')} on {row.get('host')})")
    if not is_present(row):
        if is_present(was):
            name, word = ("worker_left", "has left") if state == "left" else ("worker_lost", "is out")
            yield _worker_event(name, row, _add_reason(word, row.get("reason")))
        return
    if not was:
        yield _worker_event("worker_joined", row, f"is here (process {row.get('pid')} on {row.get('host')})")
    if row.get("verdict") != was.get("verdict", "well"):
        yield _worker_event("verdict", row, _add_reason(f"is {row.get('verdict')}", row.get("evidence")), "verdict")
    if (row.get("steered") or "") != (was.get("steered") or ""):
        yield _worker_event("steered", row, f"is {row.get('steered') or 'available for layers again'}", "steered")


def _worker_event(name: str, row: Row, text: str, *more: str) -> SwarmEvent:
    fields = {key: row.get(key) for key in (*more, "incarnation")}
    return SwarmEvent(name, f"{row.get('name')} {text}", {"worker": row.get("name"), **fields})


def _rejections(before: Json, after: Json) -> Iterator[SwarmEvent]:
    """Yield the rejected workers. The broker reports a worker that keeps retrying only at intervals."""
    reported = {row.get("number") for row in read_rows(before.get("refused"))}
    for row in read_rows(after.get("refused")):
        if row.get("number") not in reported:
            often = f", {row.get('times')} times by now" if get_number(row, "times") > 1 else ""
            text = f"{row.get('name')} was refused (process {row.get('pid')} on {row.get('host')}){often}"
            fields = {"worker": row.get("name"), "reason": row.get("reason"), "times": row.get("times")}
            yield SwarmEvent("worker_refused", _add_reason(text, row.get("reason")), fields)


def _recoveries(before: Json, after: Json) -> Iterator[SwarmEvent]:
    recoveries_before = {row.get("detected_at"): row for row in read_rows(before.get("recoveries"))}
    for row in read_rows(after.get("recoveries")):
        was = recoveries_before.get(row.get("detected_at"))
        fields = {"epoch": row.get("epoch"), "cause": row.get("cause")}
        if was is None:
            yield SwarmEvent("recovery_begun", f"recovery: {row.get('evidence') or row.get('cause')}", fields)
        if row.get("resumed_all_at") is not None and (was is None or was.get("resumed_all_at") is None):
            measured = row.get("measured")
            measured = measured if isinstance(measured, Mapping) else {}
            took = measured.get("total_s")
            # A reader's pause begins with the loss, not with its detection.
            words = f" after {took + get_number(measured, 'detect_s'):.2f} s" if isinstance(took, int | float) else ""
            count = row.get("sequences")
            who = "1 sequence continues" if count == 1 else f"{count} sequences continue"
            text = f"recovered{words}: {who} in epoch {row.get('epoch')}"
            yield SwarmEvent("recovery_ended", text, {**fields, "total_s": took})


def _plan(before: Json, after: Json) -> Iterator[SwarmEvent]:
    was, state = before.get("state"), after.get("state")
    epoch, waits_for = after.get("epoch"), after.get("waits_for")
    if state == "serving":
        if was != "serving" or before.get("epoch") != epoch:
            text = f"serving {after.get('model')} on {format_count(after.get('num_stages'), 'stage')}, epoch {epoch}"
            yield SwarmEvent("serving", text, {"epoch": epoch, "num_stages": after.get("num_stages")})
    elif (was, before.get("waits_for")) != (state, waits_for):
        yield SwarmEvent("not_serving", _add_reason(f"{state}", waits_for), {"state": state, "waits_for": waits_for})


def _problems(before: Json, after: Json) -> Iterator[SwarmEvent]:
    for subject in ("journal", "connections"):
        was, problem = before.get(f"{subject}_problem") or "", after.get(f"{subject}_problem") or ""
        if problem and problem != was:
            yield SwarmEvent("problem", f"{subject}: {problem}", {"of": subject})
        elif was and not problem:
            yield SwarmEvent("problem_over", f"{subject}: resolved", {"of": subject})


def _add_reason(text: str, reason: object) -> str:
    return f"{text}: {reason}" if reason else text


def _index_workers(nodes: Json) -> dict[object, Row]:
    return {row.get("incarnation"): row for row in read_rows(nodes.get("workers"))}
