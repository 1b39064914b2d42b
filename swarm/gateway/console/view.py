"""Builds one view of the swarm from the broker's reports: everything that the page shows, except values that change
with the clock alone.

An idle swarm must cause no updates. So figures are rounded and ages are converted into timestamps, and a timestamp
keeps its first value, although each poll would compute a slightly different one. Ages by the broker's clock are
converted into wall-clock timestamps here, because only the time of the gateway's own poll relates the two clocks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.gateway.console import recoveries as retold
from swarm.gateway.console.figures import rounded
from swarm.gateway.console.patch import Tree
from swarm.govern.rows import Row, is_here, number, rows_of
from swarm.wire.messages import MEASURABLE_BYTES_PER_S, Json

MAX_REQUESTS: Final = 1000
MAX_ENDED: Final = 20
MAX_RECOVERIES: Final = 8
STEADY_S: Final = 1.5  # tolerance between two polls' values for the same timestamp
_BROKER: Final = "broker"
_BEAT: Final = re.compile(r", last beat \d+ ms ago")
_BY_THE_CLOCK: Final = ("beat_age_s", "verdict_for_s", "clock_ahead_s", "here_for_s", "next")
_COARSE_S: Final = 0.01  # seconds; a smaller lag of the loop is noise
# fields of a status that change with every step; rates show them
_BY_THE_STEP: Final = ("tokens_total", "steps_in_flight", "kv_reserved", "kv_cached")
_AGES: Final = ("age_s", "ended_age_s", "deadline_s")  # fields of requests
_NUMBER: Final = (int, float)  # isinstance is faster with a tuple
_OF_ADMINS: Final = ("pid", "endpoint")  # fields of workers that only admins see


@dataclass(frozen=True, slots=True)
class Known:
    """The broker's latest reports. ``at``: seconds since 1970. ``away_s``: how long the broker has not answered; None
    while it does."""

    at: float
    status: Json = field(default_factory=dict)
    nodes: Json = field(default_factory=dict)
    plan: Json = field(default_factory=dict)
    stats: Json = field(default_factory=dict)
    requests: Json = field(default_factory=dict)
    recoveries: Json = field(default_factory=dict)
    away_s: float | None = None


NOTHING: Final = Known(0.0)


def view(known: Known, rates: Tree, former: Tree, before: Known = NOTHING) -> Tree:
    """Return the view with all permissions. ``former``: the previous view, built from ``before``. Parts whose reports
    have not been requested since are reused."""
    is_same_plan, is_same_nodes = known.plan is before.plan, known.nodes is before.nodes
    made = {
        "at": round(known.at, 3),
        "away_s": None if known.away_s is None else int(known.away_s),
        "status": _status(known, former),
        "workers": former["workers"] if is_same_nodes and former else _workers(known.nodes),
        "plan": former["plan"] if is_same_plan and former else _plan(known.plan),
        "rates": dict(rates),
        "links": former["links"] if is_same_plan and is_same_nodes and former else _links(known),
    }
    if known.requests is before.requests and former:
        made |= {name: former[name] for name in ("requests", "requests_more", "ended")}
    else:
        made |= _requests(known, former)
    if known.recoveries is before.recoveries and former:
        return made | {name: former[name] for name in ("recovery", "recoveries")}
    under_way, ended = _recoveries(known, former)
    return made | {"recovery": under_way, "recoveries": ended}


def seen_by(tenant: str | None, whole: Tree) -> Tree:
    """Return the part of the view that one tenant sees; None sees everything. Of other tenants' requests, it contains
    only the number."""
    if tenant is None:
        return whole
    own = {key: row for key, row in whole["requests"].items() if row.get("tenant") == tenant}
    others = len(whole["requests"]) - len(own)
    return whole | {
        "requests": own,
        "requests_more": whole["requests_more"] + others,
        "ended": {key: row for key, row in whole["ended"].items() if row.get("tenant") == tenant},
        "workers": {key: _without(row, _OF_ADMINS) for key, row in whole["workers"].items()},
    }


def _without(row: Row, names: Sequence[str]) -> Tree:
    return {key: value for key, value in row.items() if key not in names}


def steady(was: object, moment: float) -> float:
    """Return the earlier timestamp if it denotes the same moment, otherwise the new one, rounded."""
    if isinstance(was, _NUMBER) and abs(was - moment) < STEADY_S:
        return was
    return round(moment, 2)


def _status(known: Known, former: Tree) -> Tree:
    body = _without(known.status, _BY_THE_STEP)
    uptime_s = body.pop("uptime_s", None)
    if isinstance(uptime_s, int | float):
        body["started_at"] = steady(former.get("status", {}).get("started_at"), known.at - uptime_s)
    return body


def _workers(nodes: Json) -> Tree:
    return {str(row["incarnation"]): _worker(row) for row in rows_of(nodes.get("workers"))}


def _worker(row: Row) -> Tree:
    body: Tree = {key: _quiet(value) for key, value in row.items() if key not in _BY_THE_CLOCK}
    body["evidence"] = _BEAT.sub("", str(row.get("evidence") or ""))
    lag_s = number(row, "loop_lag_s")
    body["loop_lag_s"] = rounded(lag_s, 2) if lag_s >= _COARSE_S else 0.0
    body["resident_bytes"] = int(rounded(number(row, "resident_bytes"), 2))
    return body


def _quiet(value: Any) -> Any:
    """Round every fraction to three digits."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {key: _quiet(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_quiet(each) for each in value]
    return value


def _plan(plan: Json) -> Tree | None:
    return _quiet(dict(plan)) if plan.get("stages") or plan.get("coming") else None


def _requests(known: Known, former: Tree) -> Tree:
    rows = rows_of(known.requests.get("requests"))
    live = [row for row in rows if row.get("state") != "ended"]
    over = sorted(
        [*(row for row in rows if row.get("state") == "ended"), *rows_of(known.requests.get("kept"))],
        key=lambda row: number(row, "ended_age_s"),
    )
    was_live, was_over = former.get("requests", {}), former.get("ended", {})
    ended: Tree = {}
    for row in over:
        if len(ended) < MAX_ENDED:
            key = str(row.get("request_id"))
            ended.setdefault(key, _request(row, known.at, was_over.get(key) or was_live.get(key) or {}))
    return {
        "requests": {
            (key := str(row.get("request_id"))): _request(row, known.at, was_live.get(key, {}))
            for row in live[:MAX_REQUESTS]
        },
        "requests_more": max(0, len(live) - MAX_REQUESTS),
        "ended": ended,
    }


def _request(row: Row, at: float, was: Row) -> Tree:
    """Convert ages into timestamps, from which the page computes ages itself."""
    body: Tree = dict(row)  # for up to a thousand rows per poll, copying is faster than selecting
    age_s, ended_s, left_s = (body.pop(name, None) for name in _AGES)
    body["began_at"] = steady(was.get("began_at"), at - (age_s if isinstance(age_s, _NUMBER) else 0.0))
    if isinstance(ended_s, _NUMBER):
        body["ended_at"] = steady(was.get("ended_at"), at - ended_s)
    if isinstance(left_s, _NUMBER):
        body["deadline_at"] = steady(was.get("deadline_at"), at + left_s)
    return body


def _recoveries(known: Known, former: Tree) -> tuple[Tree | None, list[Tree] | None]:
    """Return the recovery in progress and the ended ones, newest first; None before the broker has sent its first
    report of recoveries. A recovery is identified by its first timestamp."""
    if not known.recoveries:
        return None, None
    was = {row["key"]: row for row in [former.get("recovery") or {}, *(former.get("recoveries") or [])] if row}
    under_way, ended = None, []
    for row in rows_of(known.recoveries.get("recoveries"))[-MAX_RECOVERIES - 1 :]:
        key = str(row.get("detected_at"))
        age_s, before = row.get("age_s"), was.get(key, {})
        began_at = steady(before.get("began_at"), known.at - age_s) if isinstance(age_s, int | float) else None
        holders = _holders(known.plan, row.get("epoch"))
        told: Tree = {"key": key, **retold.told(row, began_at, holders)}
        if not retold.is_over(row):
            under_way = told
        else:
            if not holders:
                # keep the first one: layers may have moved since
                told["sentence"] = before.get("sentence") or told["sentence"]
            ended.append(told)
    return under_way, ended[::-1][:MAX_RECOVERIES]


def _holders(plan: Json, epoch: object) -> dict[int, str]:
    """Return the worker of each layer in the plan of that epoch, active or coming; empty if only another plan is
    available, which does not show who took what."""
    found: dict[int, str] = {}
    coming = plan.get("coming")
    known = [plan, coming] if isinstance(coming, Mapping) else [plan]
    for row in next((rows_of(each.get("stages")) for each in known if each.get("epoch") == epoch), []):
        first, stop = _range(row.get("layers"))
        found |= dict.fromkeys(range(first, stop), str(row.get("worker")))
    return found


def _range(layers: object) -> tuple[int, int]:
    if isinstance(layers, list | tuple) and len(layers) == 2:
        return int(layers[0]), int(layers[1])
    return 0, 0


def _links(known: Known) -> Tree:
    """Return the links between neighbours in the chain, with the broker at both ends. Each worker measures its latency
    to the broker. The latency of a hop between workers is the plan's estimate, and its throughput is measured."""
    workers = {str(row.get("name")): row for row in rows_of(known.nodes.get("workers")) if is_here(row)}
    forecast = known.plan.get("forecast")
    stages = rows_of(forecast.get("stages")) if isinstance(forecast, Mapping) else []
    hops = {str(row.get("worker")): number(row, "hop_s") for row in stages}
    chain = [_BROKER, *(str(row.get("worker")) for row in rows_of(known.plan.get("stages"))), _BROKER]
    if len(chain) < 3:
        return {}
    links = {}
    for one, other in itertools.pairwise(chain):
        ends = [workers[name] for name in (one, other) if name in workers]
        way_s = sum(number(end, "round_trip_s") / 2 for end in ends)
        latency_s = hops.get(one) or way_s if _BROKER not in (one, other) else way_s
        links[f"{one}>{other}"] = {
            "from": one,
            "to": other,
            "latency_s": rounded(latency_s),
            "bytes_per_s": _rate(ends),
        }
    return links


def _rate(ends: Sequence[Row]) -> float | None:
    """Return the throughput between these two workers, or between the broker and this one; None if it could not be
    measured."""
    told: object = ends[0] if ends else None
    if len(ends) == 2:
        told = ends[0].get("next")
        if isinstance(told, Mapping) and (told.get("to") != ends[1].get("name") or told.get("is_least")):
            return None
    rate = number(told, "bytes_per_s") if isinstance(told, Mapping) else 0.0
    return rounded(rate) if 0 < rate <= MEASURABLE_BYTES_PER_S else None
