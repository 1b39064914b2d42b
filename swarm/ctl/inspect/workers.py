"""Checks of a swarm's workers, from the broker's report, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from swarm.admin.report_rows import (
    Row,
    describe_held_back,
    format_layers,
    get_number,
    is_present,
    may_have_layers,
    read_rows,
    release_commands,
)
from swarm.cli.doctor.checks import Finding, Level, connection_remedy, describe_connection

SLOW_FACTOR: Final = 1.5  # Step time relative to the worker's measurement at its start.
# Refusals older than this are ignored, because no one reports that the process is not wanted any more.
RECENT_S: Final = 3600.0
MAX_LOOP_LAG_S: Final = 0.1  # Event loop lag that is worth a note.
_REMEDIES: Final = {
    "slow": "check what else uses its cores or memory",
    "blocked": "check what it waits for; it continues by itself as soon as that is available",
    "silent": "check its machine and the network to it; it joins again by itself",
    "hung": "its log shows where; a supervisor (swarm up, systemd) restarts it, or add another one with swarmctl join",
    "dead": "its log shows why; a supervisor (swarm up, systemd) restarts it, or add another one with swarmctl join",
    "failed": "its log shows what its device raised; it comes back after a test, once that is repaired",
    "differs": "it comes back by itself without what it held; if it differs again, restart it: its log has the reason",
    "lied": "test its machine's memory: its results were wrong, and none of them are used any more",
}


def check_workers(nodes: Row, *, with_held_back: bool = True) -> Iterator[Finding]:
    """Yield findings for the present workers, then for missing ones whose names have not come back.

    ``with_held_back``: report workers that an operator holds back, which no other finding does.
    """
    rows = read_rows(nodes.get("workers"))
    here = [row for row in rows if is_present(row)]
    if not here:
        yield Finding(
            "workers", "trouble", "there are none", "swarmctl join, or swarm worker --join on another machine"
        )
    for row in here:
        findings = list(_check_worker(row, here, with_held_back=with_held_back))
        yield from findings or [Finding(str(row.get("name")), "ok", _describe_healthy(row))]
    back = {row.get("name") for row in here}
    last_lives = {str(row.get("name")): row for row in rows if row.get("name") not in back}  # The latest come last.
    replaced = _find_replacements(list(last_lives.values()), here)
    for name, row in last_lives.items():
        yield _check_missing(name, row, replaced.get(name, ""))


def _find_replacements(gone: list[Row], here: list[Row]) -> dict[str, str]:
    """Return for each lost worker a worker that has joined since, as far as there are enough."""
    lost = sorted((row for row in gone if row.get("state") == "out"), key=lambda row: -get_number(row, "verdict_for_s"))
    joined = sorted((row for row in here if row.get("here_for_s")), key=lambda row: -get_number(row, "here_for_s"))
    replacements = {}
    for row in lost:
        since = [each for each in joined if get_number(each, "here_for_s") < get_number(row, "verdict_for_s")]
        if since:
            joined.remove(since[0])
            replacements[str(row.get("name"))] = str(since[0].get("name"))
    return replacements


def _check_missing(name: str, row: Row, replaced_by: str) -> Finding:
    """Return the finding for a missing worker.

    A worker that was asked to leave is not a problem. A worker that is out is one if it had layers and no other worker
    has joined since, or if it sent wrong results.
    """
    why = f": {row['reason']}" if row.get("reason") else ""
    if row.get("state") == "left":
        return Finding(
            name, "note", f"has left{why}", "if it is needed: start it again, or add another one with swarmctl join"
        )
    verdict, had = str(row.get("verdict")), row.get("last_layers")
    level: Level = "trouble" if verdict in ("lied", "failed", "differs") else "note"
    text = "is out"
    if isinstance(row.get("layers"), list | tuple):
        level, text = "trouble", f"is out, and {_describe_layers(row)} wait for another worker"
    elif replaced_by:
        text = f"is out, and {replaced_by} has joined since"
    elif isinstance(had, list | tuple) and not row.get("steered"):
        level, text = (
            "trouble",
            f"is out, others have its layers ({format_layers(had)}), and no worker has joined in its place",
        )
    return Finding(name, level, text + why, _REMEDIES.get(verdict, _REMEDIES["dead"]))


def _check_worker(row: Row, here: list[Row], *, with_held_back: bool) -> Iterator[Finding]:
    name = str(row.get("name"))
    yield from _check_health(name, row, here)
    yield from _check_placement(name, row, with_held_back=with_held_back)
    if row.get("lies") and row.get("verdict") != "lied":
        yield Finding(name, "trouble", f"its results were proven wrong {row['lies']} times", _REMEDIES["lied"])
    if row.get("faults") and row.get("verdict") != "failed":
        text = f"its steps failed, or a test of its device, {row['faults']} times of late; it has passed one since"
        yield Finding(name, "note", text, _REMEDIES["failed"])
    if row.get("unreachable"):
        remedy = "let these machines reach its data port (a firewall?); until then the plan goes around it"
        yield Finding(name, "note", str(row["unreachable"]), remedy)
    if "inexact" in str(row.get("kernels")):
        remedy = "worker.bits = portable, or a device whose kernels are exact"
        yield Finding(name, "note", f"not the same bits everywhere: {row['kernels']}", remedy)
    if get_number(row, "loop_lag_s") > MAX_LOOP_LAG_S:
        text = f"its event loop lags by {get_number(row, 'loop_lag_s') * 1000:.0f} ms"
        yield Finding(name, "note", text, "something else uses its cores, or its memory is swapped out")
    measured = get_number(row, "round_trip_s"), get_number(row, "bytes_per_s")
    if remedy := connection_remedy(*measured):
        yield Finding(name, "note", f"its connection to the broker: {describe_connection(*measured)}", remedy)


def _check_health(name: str, row: Row, here: list[Row]) -> Iterator[Finding]:
    verdict = str(row.get("verdict"))
    remedy = _slow_remedy(row, here) if is_slow(row) else _REMEDIES.get(verdict, "see swarmctl nodes")
    if verdict not in ("well", "loading"):
        level: Level = "note" if verdict in ("slow", "blocked") else "trouble"
        yield Finding(name, level, f"{verdict}: {row.get('evidence') or verdict}", remedy)
    elif is_slow(row):
        text = f"its steps take {get_number(row, 'pace'):.1f} times as long as it measured at its start"
        yield Finding(name, "note", text, remedy)


def is_slow(row: Row) -> bool:
    verdict = row.get("verdict")
    return verdict == "slow" or (verdict in ("well", "loading") and get_number(row, "pace") > SLOW_FACTOR)


def _slow_remedy(row: Row, here: list[Row]) -> str:
    """Return the remedy for a slow worker. Draining it helps only if it has layers and others are faster."""
    others = [each for each in here if each is not row and may_have_layers(each)]
    if not others or not row.get("layers"):
        return _REMEDIES["slow"]
    if all(is_slow(each) for each in others):
        return f"all are equally slow: {_REMEDIES['slow']}, or of their machine"
    return f"{_REMEDIES['slow']}; swarmctl drain {row.get('name')} lets it go"


def _check_placement(name: str, row: Row, *, with_held_back: bool) -> Iterator[Finding]:
    """Yield findings that explain why a present worker gets no layers."""
    if with_held_back and (by_hand := row.get("steered")):
        new = "new " if by_hand == "cordoned" else ""
        whole = " (back to the settings as a whole)" if by_hand == "excluded" else ""
        remedy = f"{release_commands([row])} allows it to get layers again{whole}"
        yield Finding(
            name, "note", f"{by_hand} by hand: it gets no {new}layers, and has {_describe_layers(row)}", remedy
        )
    if row.get("state") == "refused":
        remedy = "see its log; the broker tries it again after a while"
        yield Finding(name, "note", f"it could not load its layers: {row.get('reason')}", remedy)
    elif row.get("state") == "leaving":
        yield Finding(
            name, "note", f"it is leaving, and has {_describe_layers(row)}", "it goes as soon as others have its layers"
        )


def check_spare_workers(nodes: Row) -> Iterator[Finding]:
    """Yield a finding if the loss of one worker would stop the swarm because all others are cordoned or excluded."""
    here = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    held = describe_held_back(here)
    if held and any(row.get("layers") for row in here) and not any(map(may_have_layers, here)):
        text = f"if a worker with layers dies, no other may take them: {held}"
        yield Finding("spare", "trouble", text, f"{release_commands(here)} allows them to get layers again")


def check_refused(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each process that was refused recently, unless a worker with its name has joined since."""
    here = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    for row in read_rows(nodes.get("refused")):
        name, ago_s = str(row.get("name")), get_number(row, "ago_s")
        of_name = [each for each in here if each.get("name") == name]
        if ago_s > RECENT_S or any(
            each.get("here_for_s") and get_number(each, "here_for_s") < ago_s for each in of_name
        ):
            continue
        often = f", {row.get('times')} times by now" if get_number(row, "times") > 1 else ""
        text = f"a process ({row.get('pid')} on {row.get('host')}) was refused {ago_s:.0f} s ago{often}"
        why, _, remedy = str(row.get("reason")).partition("; ")  # Many reasons include a remedy.
        yield Finding(name, "note", f"{text}: {why}", remedy or "fix that on its machine, and start it again there")


def _describe_layers(row: Row) -> str:
    layers = row.get("layers")
    return format_layers(layers) if isinstance(layers, list | tuple) else "no layers"


def _describe_healthy(row: Row) -> str:
    measured = get_number(row, "round_trip_s"), get_number(row, "bytes_per_s")
    far = f"; its connection to the broker: {describe_connection(*measured)}" if measured[0] else ""
    verdict = "loading" if row.get("verdict") == "loading" else "well"
    by_hand = f", {row['steered']} by hand" if row.get("steered") else ""
    return f"{verdict}, with {_describe_layers(row)}{by_hand}{far}"
