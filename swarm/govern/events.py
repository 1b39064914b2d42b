"""Events of a swarm, found by comparing two snapshots. Pure.

The broker is asked for its state, and each difference from the last snapshot is an event. So events continue over a
restart of the broker, and cost nothing while no one watches. Something that came and went between two snapshots appears
only if the broker remembers it: recoveries, workers that have gone, and rejected workers.

A restarted broker gets its workers back one by one. Until then they are awaited, not lost: ``carry_over`` carries them
over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from swarm.govern.rows import Row, counted, is_here, number, rows_of
from swarm.wire.messages import Json


class Look(NamedTuple):
    """Snapshot: the broker's answers to three questions, asked at about the same time."""

    status: Json
    nodes: Json
    recoveries: Json
    # workers from before the broker's restart that have not returned, by incarnation
    awaited: Mapping[object, Row] = {}


@dataclass(frozen=True, slots=True)
class Event:
    """An event: ``name`` and ``fields`` for programs, ``text`` for people."""

    name: str
    text: str
    fields: Json


AWAY = Event("broker_away", "the broker does not answer; waiting for it", {})
BACK = Event("broker_back", "the broker answers again", {})
NOTHING = Look({}, {}, {})
AWAITED_S: Final = 15.0  # after the broker's start: a worker that has not returned by then is lost


def happened(before: Look, after: Look) -> list[Event]:
    """Return the events between two snapshots: broker, workers, recoveries, plan, problems. After ``NO_SNAPSHOT``,
    everything is new."""
    found: list[Event] = []
    if _is_another_life(before.status, after.status):
        found.append(Event("broker_started", "the broker has restarted", {"uptime_s": after.status["uptime_s"]}))
        before = _of_former_life(before)
    found += _workers(before, after)
    found += _refused(before.nodes, after.nodes)
    found += _recoveries(before.recoveries, after.recoveries)
    found += _plan(before.status, after.status)
    found += _problems(before.status, after.status)
    return found


def after_absence(found: list[Event]) -> list[Event]:
    """Return the events to report when the broker answers again. A restart of the broker implies that it answers."""
    return found if any(event.name == "broker_started" for event in found) else [BACK, *found]


def remembered(before: Look, after: Look) -> Look:
    """Return the snapshot for the next comparison: ``after``, with the workers that a restarted broker still awaits."""
    if _is_another_life(before.status, after.status):
        before = _of_former_life(before)
    known = _by_incarnation(after.nodes)
    missed = {i: row for i, row in before.awaited.items() if i not in known and not _is_given_up(row, after)}
    return after._replace(awaited=missed)


def _is_another_life(before: Json, after: Json) -> bool:
    was, is_now = before.get("uptime_s"), after.get("uptime_s")
    return isinstance(was, int | float) and isinstance(is_now, int | float) and is_now < was


def _of_former_life(look: Look) -> Look:
    """Return a snapshot after which everything but the workers is new, and the workers are awaited."""
    here = {i: row for i, row in _by_incarnation(look.nodes).items() if is_here(row)}
    return look._replace(recoveries={}, nodes={}, awaited={**look.awaited, **here})


def _is_given_up(awaited: Row, after: Look) -> bool:
    """Whether to stop waiting for this worker: another process has its name, or it is late."""
    named = (row for row in rows_of(after.nodes.get("workers")) if row.get("name") == awaited.get("name"))
    return any(map(is_here, named)) or number(after.status, "uptime_s") > AWAITED_S


def _workers(before: Look, after: Look) -> Iterator[Event]:
    known, found = _by_incarnation(before.nodes), _by_incarnation(after.nodes)
    for incarnation, row in known.items():  # departures first, then arrivals under the same names
        if incarnation not in found and is_here(row):
            yield _of_worker("worker_lost", row, "is unknown to the broker now")
    for incarnation, row in before.awaited.items():
        if incarnation not in found and _is_given_up(row, after):
            yield _of_worker("worker_lost", row, "did not return to the restarted broker")
    for incarnation, row in found.items():
        yield from _worker(known.get(incarnation, {}), row, before.awaited.get(incarnation))


def _worker(was: Row, row: Row, awaited: Row | None) -> Iterator[Event]:
    """Yield the events of one worker. ``awaited``: its row before the broker's restart."""
    state = row.get("state")
    if awaited is not None:
        was = awaited
        if is_here(row):
            yield _of_worker("worker_back", row, f"is back (process {row.get('pid')} on {row.get('host')})")
    if not is_here(row):
        if is_here(was):
            name, word = ("worker_left", "has left") if state == "left" else ("worker_lost", "is out")
            yield _of_worker(name, row, _with_reason(word, row.get("reason")))
        return
    if not was:
        yield _of_worker("worker_joined", row, f"is here (process {row.get('pid')} on {row.get('host')})")
    if row.get("verdict") != was.get("verdict", "well"):
        yield _of_worker("verdict", row, _with_reason(f"is {row.get('verdict')}", row.get("evidence")), "verdict")
    if (row.get("steered") or "") != (was.get("steered") or ""):
        yield _of_worker("steered", row, f"is {row.get('steered') or 'available for layers again'}", "steered")


def _of_worker(name: str, row: Row, text: str, *more: str) -> Event:
    fields = {key: row.get(key) for key in (*more, "incarnation")}
    return Event(name, f"{row.get('name')} {text}", {"worker": row.get("name"), **fields})


def _refused(before: Json, after: Json) -> Iterator[Event]:
    """Yield the rejected workers. The broker repeats a worker that keeps trying only now and then."""
    told = {row.get("number") for row in rows_of(before.get("refused"))}
    for row in rows_of(after.get("refused")):
        if row.get("number") not in told:
            often = f", {row.get('times')} times by now" if number(row, "times") > 1 else ""
            text = f"{row.get('name')} was refused (process {row.get('pid')} on {row.get('host')}){often}"
            fields = {"worker": row.get("name"), "reason": row.get("reason"), "times": row.get("times")}
            yield Event("worker_refused", _with_reason(text, row.get("reason")), fields)


def _recoveries(before: Json, after: Json) -> Iterator[Event]:
    known = {row.get("detected_at"): row for row in rows_of(before.get("recoveries"))}
    for row in rows_of(after.get("recoveries")):
        was = known.get(row.get("detected_at"))
        fields = {"epoch": row.get("epoch"), "cause": row.get("cause")}
        if was is None:
            yield Event("recovery_begun", f"recovery: {row.get('evidence') or row.get('cause')}", fields)
        if row.get("resumed_all_at") is not None and (was is None or was.get("resumed_all_at") is None):
            measured = row.get("measured")
            took = measured.get("total_s") if isinstance(measured, Mapping) else None
            words = f" after {took:.2f} s" if isinstance(took, int | float) else ""
            count = row.get("sequences")
            who = "1 sequence goes on" if count == 1 else f"{count} sequences go on"
            text = f"recovered{words}: {who} in epoch {row.get('epoch')}"
            yield Event("recovery_ended", text, {**fields, "total_s": took})


def _plan(before: Json, after: Json) -> Iterator[Event]:
    was, state = before.get("state"), after.get("state")
    epoch, waits_for = after.get("epoch"), after.get("waits_for")
    if state == "serving":
        if was != "serving" or before.get("epoch") != epoch:
            text = f"serving {after.get('model')} on {counted(after.get('num_stages'), 'stage')}, epoch {epoch}"
            yield Event("serving", text, {"epoch": epoch, "num_stages": after.get("num_stages")})
    elif (was, before.get("waits_for")) != (state, waits_for):
        yield Event("not_serving", _with_reason(f"{state}", waits_for), {"state": state, "waits_for": waits_for})


def _problems(before: Json, after: Json) -> Iterator[Event]:
    for what in ("journal", "connections"):
        was, problem = before.get(f"{what}_problem") or "", after.get(f"{what}_problem") or ""
        if problem and problem != was:
            yield Event("problem", f"{what}: {problem}", {"of": what})
        elif was and not problem:
            yield Event("problem_over", f"{what}: resolved", {"of": what})


def _with_reason(text: str, reason: object) -> str:
    return f"{text}: {reason}" if reason else text


def _by_incarnation(nodes: Json) -> dict[object, Row]:
    return {row.get("incarnation"): row for row in rows_of(nodes.get("workers"))}
