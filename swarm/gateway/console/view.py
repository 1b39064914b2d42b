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

from swarm.admin.report_rows import Row, get_number, is_present, read_rows
from swarm.gateway.console import recoveries as retold
from swarm.gateway.console.patch import Tree
from swarm.gateway.console.recent_metrics import round_digits
from swarm.wire.messages import MEASURABLE_BYTES_PER_S, Json

MAX_REQUESTS: Final = 1000
MAX_ENDED: Final = 20
MAX_RECOVERIES: Final = 8
STEADY_S: Final = 1.5  # tolerance between two polls' values for the same timestamp
_BROKER: Final = "broker"
_BEAT: Final = re.compile(r", last heartbeat \d+ ms ago")
_CLOCK_FIELDS: Final = ("beat_age_s", "verdict_for_s", "clock_ahead_s", "here_for_s", "next")
_COARSE_S: Final = 0.01  # seconds; a smaller lag of the loop is noise
# fields of a status that change with every step; rates show them
_STEP_FIELDS: Final = ("tokens_total", "steps_in_flight", "kv_reserved", "kv_cached")
_AGES: Final = ("age_s", "ended_age_s", "deadline_s")  # fields of requests
_NUMBER: Final = (int, float)  # isinstance is faster with a tuple
_ADMIN_FIELDS: Final = ("pid", "endpoint")  # fields of workers that only admins see


@dataclass(frozen=True, slots=True)
class LatestReports:
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


NO_REPORTS: Final = LatestReports(0.0)


def build_view(reports: LatestReports, rates: Tree, former: Tree, before: LatestReports = NO_REPORTS) -> Tree:
    """Return the view with all permissions. ``former``: the previous view, built from ``before``. Parts whose reports
    have not been requested since are reused."""
    is_same_plan, is_same_nodes = reports.plan is before.plan, reports.nodes is before.nodes
    built = {
        "at": round(reports.at, 3),
        "away_s": None if reports.away_s is None else int(reports.away_s),
        "status": _status(reports, former),
        "workers": former["workers"] if is_same_nodes and former else _workers(reports.nodes),
        "plan": former["plan"] if is_same_plan and former else _plan(reports.plan),
        "rates": dict(rates),
        "links": former["links"] if is_same_plan and is_same_nodes and former else _links(reports),
    }
    if reports.requests is before.requests and former:
        built |= {name: former[name] for name in ("requests", "requests_more", "ended")}
    else:
        built |= _requests(reports, former)
    if reports.recoveries is before.recoveries and former:
        return built | {name: former[name] for name in ("recovery", "recoveries")}
    under_way, ended = _recoveries(reports, former)
    return built | {"recovery": under_way, "recoveries": ended}


def restrict_to_tenant(tenant: str | None, whole: Tree) -> Tree:
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
        "workers": {key: _omit(row, _ADMIN_FIELDS) for key, row in whole["workers"].items()},
    }


def _omit(row: Row, names: Sequence[str]) -> Tree:
    return {key: value for key, value in row.items() if key not in names}


def keep_timestamp(was: object, moment: float) -> float:
    """Return the earlier timestamp if it denotes the same moment, otherwise the new one, rounded."""
    if isinstance(was, _NUMBER) and abs(was - moment) < STEADY_S:
        return was
    return round(moment, 2)


def _status(reports: LatestReports, former: Tree) -> Tree:
    body = _omit(reports.status, _STEP_FIELDS)
    uptime_s = body.pop("uptime_s", None)
    if isinstance(uptime_s, int | float):
        body["started_at"] = keep_timestamp(former.get("status", {}).get("started_at"), reports.at - uptime_s)
    return body


def _workers(nodes: Json) -> Tree:
    return {str(row["incarnation"]): _worker(row) for row in read_rows(nodes.get("workers"))}


def _worker(row: Row) -> Tree:
    body: Tree = {key: _round_fractions(value) for key, value in row.items() if key not in _CLOCK_FIELDS}
    body["evidence"] = _BEAT.sub("", str(row.get("evidence") or ""))
    lag_s = get_number(row, "loop_lag_s")
    body["loop_lag_s"] = round_digits(lag_s, 2) if lag_s >= _COARSE_S else 0.0
    body["resident_bytes"] = int(round_digits(get_number(row, "resident_bytes"), 2))
    return body


def _round_fractions(value: Any) -> Any:
    """Round every fraction to three digits."""
    if isinstance(value, float):
        return round_digits(value)
    if isinstance(value, dict):
        return {key: _round_fractions(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_round_fractions(each) for each in value]
    return value


def _plan(plan: Json) -> Tree | None:
    return _round_fractions(dict(plan)) if plan.get("stages") or plan.get("coming") else None


def _requests(reports: LatestReports, former: Tree) -> Tree:
    rows = read_rows(reports.requests.get("requests"))
    live = [row for row in rows if row.get("state") != "ended"]
    over = sorted(
        [*(row for row in rows if row.get("state") == "ended"), *read_rows(reports.requests.get("kept"))],
        key=lambda row: get_number(row, "ended_age_s"),
    )
    was_live, was_over = former.get("requests", {}), former.get("ended", {})
    ended: Tree = {}
    for row in over:
        if len(ended) < MAX_ENDED:
            key = str(row.get("request_id"))
            ended.setdefault(key, _request(row, reports.at, was_over.get(key) or was_live.get(key) or {}))
    return {
        "requests": {
            (key := str(row.get("request_id"))): _request(row, reports.at, was_live.get(key, {}))
            for row in live[:MAX_REQUESTS]
        },
        "requests_more": max(0, len(live) - MAX_REQUESTS),
        "ended": ended,
    }


def _request(row: Row, at: float, was: Row) -> Tree:
    """Convert ages into timestamps, from which the page computes ages itself."""
    body: Tree = dict(row)  # for up to a thousand rows per poll, copying is faster than selecting
    age_s, ended_s, left_s = (body.pop(name, None) for name in _AGES)
    body["began_at"] = keep_timestamp(was.get("began_at"), at - (age_s if isinstance(age_s, _NUMBER) else 0.0))
    if isinstance(ended_s, _NUMBER):
        body["ended_at"] = keep_timestamp(was.get("ended_at"), at - ended_s)
    if isinstance(left_s, _NUMBER):
        body["deadline_at"] = keep_timestamp(was.get("deadline_at"), at + left_s)
    return body


def _recoveries(reports: LatestReports, former: Tree) -> tuple[Tree | None, list[Tree] | None]:
    """Return the recovery in progress and the ended ones, newest first; None before the broker has sent its first
    report of recoveries. A recovery is identified by its first timestamp."""
    if not reports.recoveries:
        return None, None
    was = {row["key"]: row for row in [former.get("recovery") or {}, *(former.get("recoveries") or [])] if row}
    under_way, ended = None, []
    for row in read_rows(reports.recoveries.get("recoveries"))[-MAX_RECOVERIES - 1 :]:
        key = str(row.get("detected_at"))
        age_s, before = row.get("age_s"), was.get(key, {})
        began_at = (
            keep_timestamp(before.get("began_at"), reports.at - age_s) if isinstance(age_s, int | float) else None
        )
        holders = _holders(reports.plan, row.get("epoch"))
        recovery: Tree = {"key": key, **retold.describe_recovery(row, began_at, holders)}
        if not retold.has_ended(row):
            under_way = recovery
        else:
            if not holders:
                # keep the first one: layers may have moved since
                recovery["sentence"] = before.get("sentence") or recovery["sentence"]
            ended.append(recovery)
    return under_way, ended[::-1][:MAX_RECOVERIES]


def _holders(plan: Json, epoch: object) -> dict[int, str]:
    """Return the worker of each layer in the plan of that epoch, active or coming; empty if only another plan is
    available, which does not show who took what."""
    holders: dict[int, str] = {}
    coming = plan.get("coming")
    known = [plan, coming] if isinstance(coming, Mapping) else [plan]
    for row in next((read_rows(each.get("stages")) for each in known if each.get("epoch") == epoch), []):
        first, stop = _range(row.get("layers"))
        holders |= dict.fromkeys(range(first, stop), str(row.get("worker")))
    return holders


def _range(layers: object) -> tuple[int, int]:
    if isinstance(layers, list | tuple) and len(layers) == 2:
        return int(layers[0]), int(layers[1])
    return 0, 0


def _links(reports: LatestReports) -> Tree:
    """Return the links between neighbours in the chain, with the broker at both ends. Each worker measures its latency
    to the broker. The latency of a hop between workers is the plan's estimate, and its throughput is measured."""
    workers = {str(row.get("name")): row for row in read_rows(reports.nodes.get("workers")) if is_present(row)}
    forecast = reports.plan.get("forecast")
    stages = read_rows(forecast.get("stages")) if isinstance(forecast, Mapping) else []
    hops = {str(row.get("worker")): get_number(row, "hop_s") for row in stages}
    chain = [_BROKER, *(str(row.get("worker")) for row in read_rows(reports.plan.get("stages"))), _BROKER]
    if len(chain) < 3:
        return {}
    links = {}
    for one, other in itertools.pairwise(chain):
        ends = [workers[name] for name in (one, other) if name in workers]
        way_s = sum(get_number(end, "round_trip_s") / 2 for end in ends)
        latency_s = hops.get(one) or way_s if _BROKER not in (one, other) else way_s
        links[f"{one}>{other}"] = {
            "from": one,
            "to": other,
            "latency_s": round_digits(latency_s),
            "bytes_per_s": _rate(ends),
        }
    return links


def _rate(ends: Sequence[Row]) -> float | None:
    """Return the throughput between these two workers, or between the broker and this one; None if it could not be
    measured."""
    report: object = ends[0] if ends else None
    if len(ends) == 2:
        report = ends[0].get("next")
        if isinstance(report, Mapping) and (report.get("to") != ends[1].get("name") or report.get("is_least")):
            return None
    rate = get_number(report, "bytes_per_s") if isinstance(report, Mapping) else 0.0
    return round_digits(rate) if 0 < rate <= MEASURABLE_BYTES_PER_S else None
