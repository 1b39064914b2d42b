"""Checks of the connections between workers and of their machines' clocks, from the broker's report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high, median_low
from typing import Final, NamedTuple

from swarm.admin.report_rows import Row, get_number, is_present, read_rows
from swarm.cli.doctor.checks import Finding, connection_remedy, describe_connection

MAX_CLOCK_OFFSET_S: Final = 1.0  # Allowed difference between two machines' clocks.
# A connection is slow if its round trip is this many times as long as the others', or its rate this many times lower.
SLOW_FACTOR: Final = 5.0
NOTICEABLE_S: Final = 2e-3  # Shorter round trips don't matter, however fast the others are.


class LinkMeasurement(NamedTuple):
    """Measurements of the connection that one worker's steps take to another machine. ``is_least``: it never had enough
    traffic to fill the path, so it may well be faster."""

    name: str  # "sender → receiver".
    round_trip_s: float
    bytes_per_s: float  # 0: unknown.
    is_least: bool


def check_links(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each connection: slow in absolute terms, or slow compared with the others."""
    links = list(_read_links(nodes))
    for link in links:
        others = [other for other in links if other is not link]
        rate = 0.0 if link.is_least else link.bytes_per_s
        remedy = connection_remedy(link.round_trip_s, rate) or "; ".join(_compare_with_others(link, others))
        yield Finding("way", "note" if remedy else "ok", _describe_link(link), remedy)


def _read_links(nodes: Row) -> Iterator[LinkMeasurement]:
    for row in read_rows(nodes.get("workers")):
        seen = row.get("next")
        if is_present(row) and isinstance(seen, Mapping):
            name = f"{row.get('name')} → {seen.get('to')}"
            yield LinkMeasurement(
                name, get_number(seen, "round_trip_s"), get_number(seen, "bytes_per_s"), bool(seen.get("is_least"))
            )


def _compare_with_others(link: LinkMeasurement, others: list[LinkMeasurement]) -> Iterator[str]:
    """Yield remedies for a connection that is slow compared with the median of the others (of two, the slower one)."""
    if not others:
        return
    usual_s = median_high(other.round_trip_s for other in others)
    if link.round_trip_s > max(NOTICEABLE_S, SLOW_FACTOR * usual_s):
        yield f"the others take {usual_s * 1000:.3g} ms: check the network between these two machines"
    full = [other.bytes_per_s for other in others if not other.is_least]
    if full and not link.is_least and link.bytes_per_s * SLOW_FACTOR <= median_low(full):
        times = median_low(full) / link.bytes_per_s
        yield f"others have {times:.0f} times the throughput: a slower port or cable, or a busy one?"


def _describe_link(link: LinkMeasurement) -> str:
    if not link.bytes_per_s:
        return f"{link.name}: {link.round_trip_s * 1000:.3g} ms there and back"
    return f"{link.name}: {describe_connection(link.round_trip_s, link.bytes_per_s, is_lower_bound=link.is_least)}"


def check_clocks(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each machine whose clock is off, or one for all."""
    here = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    ahead = {
        str(row.get("host")): get_number(row, "clock_ahead_s") for row in here if row.get("clock_ahead_s") is not None
    }
    off = {host: by_s for host, by_s in ahead.items() if not abs(by_s) <= MAX_CLOCK_OFFSET_S}
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
