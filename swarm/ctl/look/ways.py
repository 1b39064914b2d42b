"""Checks of the connections between workers and of their machines' clocks, from the broker's report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high, median_low
from typing import Final, NamedTuple

from swarm.cli.doctor.checks import Finding, slow_way, way
from swarm.govern.rows import Row, is_here, number, rows_of

CLOCK_S: Final = 1.0  # Allowed difference between two machines' clocks.
# A connection is slow if its round trip is this many times as long as the others', or its rate this many times lower.
TIMES: Final = 5.0
FELT_S: Final = 2e-3  # Shorter round trips don't matter, however fast the others are.


class Measured(NamedTuple):
    """Measurements of the connection that one worker's steps take to another machine. ``is_least``: it never had enough
    traffic to fill the path, so it may well be faster."""

    name: str  # "sender → receiver".
    round_trip_s: float
    bytes_per_s: float  # 0: unknown.
    is_least: bool


def of_ways(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each connection: slow in absolute terms, or slow compared with the others."""
    found = list(_measured(nodes))
    for each in found:
        others = [other for other in found if other is not each]
        rate = 0.0 if each.is_least else each.bytes_per_s
        remedies = list(slow_way(each.round_trip_s, rate)) or list(_beside(each, others))
        yield from (Finding("way", "note", _told(each), remedy) for remedy in remedies)
        if not remedies:
            yield Finding("way", "ok", _told(each))


def _measured(nodes: Row) -> Iterator[Measured]:
    for row in rows_of(nodes.get("workers")):
        seen = row.get("next")
        if is_here(row) and isinstance(seen, Mapping):
            name = f"{row.get('name')} → {seen.get('to')}"
            yield Measured(name, number(seen, "round_trip_s"), number(seen, "bytes_per_s"), bool(seen.get("is_least")))


def _beside(each: Measured, others: list[Measured]) -> Iterator[str]:
    """Yield remedies for a connection that is slow compared with the median of the others (of two, the slower one)."""
    if not others:
        return
    usual_s = median_high(other.round_trip_s for other in others)
    if each.round_trip_s > max(FELT_S, TIMES * usual_s):
        yield f"the others take {usual_s * 1000:.3g} ms: check the network between these two machines"
    full = [other.bytes_per_s for other in others if not other.is_least]
    if full and not each.is_least and each.bytes_per_s * TIMES <= median_low(full):
        times = median_low(full) / each.bytes_per_s
        yield f"others have {times:.0f} times the throughput: a slower port or cable, or a busy one?"


def _told(each: Measured) -> str:
    if not each.bytes_per_s:
        return f"{each.name}: {each.round_trip_s * 1000:.3g} ms there and back"
    return f"{each.name}: {way(each.round_trip_s, each.bytes_per_s, is_least=each.is_least)}"


def of_clocks(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each machine whose clock is off, or one for all."""
    here = [row for row in rows_of(nodes.get("workers")) if is_here(row)]
    ahead = {str(row.get("host")): number(row, "clock_ahead_s") for row in here if row.get("clock_ahead_s") is not None}
    off = {host: by_s for host, by_s in ahead.items() if not abs(by_s) <= CLOCK_S}
    for host, by_s in off.items():
        where = "ahead of" if by_s > 0 else "behind"
        text = f"{host} is {abs(by_s):,.1f} s {where} the broker's machine"
        yield Finding(
            "clock",
            "note",
            text,
            "run a time service on both: expiry of invitations and keys, and log times, depend on it",
        )
    if ahead and not off:
        yield Finding("clock", "ok", f"all machines within {max(map(abs, ahead.values())) * 1000:.0f} ms")
