"""Checks of a swarm's workers, from the broker's report, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from swarm.cli.doctor.checks import Finding, Level, slow_way, way
from swarm.govern.rows import (
    Row,
    held_back,
    is_here,
    layers_in_words,
    lets_them,
    may_have_layers,
    number,
    rows_of,
)

SLOW: Final = 1.5  # Step time relative to the worker's measurement at its start.
# Refusals older than this are ignored, because no one reports that the process is not wanted any more.
OF_LATE_S: Final = 3600.0
LATE_S: Final = 0.1  # Event loop lag that is worth a note.
_REMEDIES: Final = {
    "slow": "check what else uses its cores or memory",
    "blocked": "check what it waits for; it continues by itself as soon as that is available",
    "silent": "check its machine and the network to it; it joins again by itself",
    "hung": "its log shows where; a supervisor (swarm up, systemd) restarts it, or add another one with swarmctl join",
    "dead": "its log shows why; a supervisor (swarm up, systemd) restarts it, or add another one with swarmctl join",
    "failed": "its log shows what its device raised; it comes back after a test, once that is repaired",
    "lied": "test its machine's memory: its results were wrong, and none of them are used any more",
}


def of_workers(nodes: Row) -> Iterator[Finding]:
    """Yield findings for the present workers, then for missing ones whose names have not come back."""
    rows = rows_of(nodes.get("workers"))
    here = [row for row in rows if is_here(row)]
    if not here:
        yield Finding(
            "workers", "trouble", "there are none", "swarmctl join, or swarm worker --join on another machine"
        )
    for row in here:
        found = list(_worker(row, here))
        yield from found or [Finding(str(row.get("name")), "ok", _well(row))]
    back = {row.get("name") for row in here}
    last_lives = {str(row.get("name")): row for row in rows if row.get("name") not in back}  # The latest come last.
    replaced = _replaced(list(last_lives.values()), here)
    for name, row in last_lives.items():
        yield _gone(name, row, replaced.get(name, ""))


def _replaced(gone: list[Row], here: list[Row]) -> dict[str, str]:
    """Return for each lost worker a worker that has joined since, as far as there are enough."""
    lost = sorted((row for row in gone if row.get("state") == "out"), key=lambda row: -number(row, "verdict_for_s"))
    come = sorted((row for row in here if row.get("here_for_s")), key=lambda row: -number(row, "here_for_s"))
    found = {}
    for row in lost:
        since = [each for each in come if number(each, "here_for_s") < number(row, "verdict_for_s")]
        if since:
            come.remove(since[0])
            found[str(row.get("name"))] = str(since[0].get("name"))
    return found


def _gone(name: str, row: Row, replaced_by: str) -> Finding:
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
    level: Level = "trouble" if verdict in ("lied", "failed") else "note"
    text = "is out"
    if isinstance(row.get("layers"), list | tuple):
        level, text = "trouble", f"is out, and {_held(row)} wait for another worker"
    elif replaced_by:
        text = f"is out, and {replaced_by} has joined since"
    elif isinstance(had, list | tuple) and not row.get("steered"):
        level, text = (
            "trouble",
            f"is out, others have its layers ({layers_in_words(had)}), and no worker has joined in its place",
        )
    return Finding(name, level, text + why, _REMEDIES.get(verdict, _REMEDIES["dead"]))


def _worker(row: Row, here: list[Row]) -> Iterator[Finding]:
    name = str(row.get("name"))
    yield from _health(name, row, here)
    yield from _standing(name, row)
    if row.get("lies"):
        yield Finding(name, "trouble", f"its results were proven wrong {row['lies']} times", _REMEDIES["lied"])
    if row.get("faults"):
        text = f"its steps failed, or a test of its device, {row['faults']} times of late; it has passed one since"
        yield Finding(name, "note", text, _REMEDIES["failed"])
    if row.get("unreachable"):
        remedy = "let these machines reach its data port (a firewall?); until then the plan goes around it"
        yield Finding(name, "note", str(row["unreachable"]), remedy)
    if "inexact" in str(row.get("kernels")):
        remedy = "worker.bits = portable, or a device whose kernels are exact"
        yield Finding(name, "note", f"not the same bits everywhere: {row['kernels']}", remedy)
    if number(row, "loop_lag_s") > LATE_S:
        text = f"its event loop lags by {number(row, 'loop_lag_s') * 1000:.0f} ms"
        yield Finding(name, "note", text, "something else uses its cores, or its memory is swapped out")
    measured = number(row, "round_trip_s"), number(row, "bytes_per_s")
    for remedy in slow_way(*measured):
        yield Finding(name, "note", f"its connection to the broker: {way(*measured)}", remedy)


def _health(name: str, row: Row, here: list[Row]) -> Iterator[Finding]:
    verdict = str(row.get("verdict"))
    remedy = _of_slow(row, here) if _is_slow(row) else _REMEDIES.get(verdict, "see swarmctl nodes")
    if verdict not in ("well", "loading"):
        level: Level = "note" if verdict in ("slow", "blocked") else "trouble"
        yield Finding(name, level, f"{verdict}: {row.get('evidence') or verdict}", remedy)
    elif _is_slow(row):
        text = f"its steps take {number(row, 'pace'):.1f} times as long as it measured at its start"
        yield Finding(name, "note", text, remedy)


def _is_slow(row: Row) -> bool:
    verdict = row.get("verdict")
    return verdict == "slow" or (verdict in ("well", "loading") and number(row, "pace") > SLOW)


def _of_slow(row: Row, here: list[Row]) -> str:
    """Return the remedy for a slow worker. Draining it helps only if it has layers and others are faster."""
    others = [each for each in here if each is not row and may_have_layers(each)]
    if not others or not row.get("layers"):
        return _REMEDIES["slow"]
    if all(_is_slow(each) for each in others):
        return f"all are equally slow: {_REMEDIES['slow']}, or of their machine"
    return f"{_REMEDIES['slow']}; swarmctl drain {row.get('name')} lets it go"


def _standing(name: str, row: Row) -> Iterator[Finding]:
    """Yield findings that explain why a present worker gets no layers."""
    if by_hand := row.get("steered"):
        new = "new " if by_hand == "cordoned" else ""
        whole = " (back to the settings as a whole)" if by_hand == "excluded" else ""
        remedy = f"{lets_them([row])} allows it to get layers again{whole}"
        yield Finding(name, "note", f"{by_hand} by hand: it gets no {new}layers, and has {_held(row)}", remedy)
    if row.get("state") == "refused":
        remedy = "see its log; the broker tries it again after a while"
        yield Finding(name, "note", f"it could not load its layers: {row.get('reason')}", remedy)
    elif row.get("state") == "leaving":
        yield Finding(name, "note", f"it is leaving, and has {_held(row)}", "it goes as soon as others have its layers")


def of_held_back(nodes: Row) -> Iterator[Finding]:
    """Yield a finding if the loss of one worker would stop the swarm because all others are cordoned or excluded."""
    here = [row for row in rows_of(nodes.get("workers")) if is_here(row)]
    held = held_back(here)
    if held and any(row.get("layers") for row in here) and not any(map(may_have_layers, here)):
        text = f"if a worker with layers dies, no other may take them: {held}"
        yield Finding("spare", "trouble", text, f"{lets_them(here)} allows them to get layers again")


def of_refused(nodes: Row) -> Iterator[Finding]:
    """Yield a finding for each process that was refused recently, unless a worker with its name has joined since."""
    here = [row for row in rows_of(nodes.get("workers")) if is_here(row)]
    for row in rows_of(nodes.get("refused")):
        name, ago_s = str(row.get("name")), number(row, "ago_s")
        of_name = [each for each in here if each.get("name") == name]
        if ago_s > OF_LATE_S or any(each.get("here_for_s") and number(each, "here_for_s") < ago_s for each in of_name):
            continue
        often = f", {row.get('times')} times by now" if number(row, "times") > 1 else ""
        text = f"a process ({row.get('pid')} on {row.get('host')}) was refused {ago_s:.0f} s ago{often}"
        why, _, remedy = str(row.get("reason")).partition("; ")  # Many reasons include a remedy.
        yield Finding(name, "note", f"{text}: {why}", remedy or "fix that on its machine, and start it again there")


def _held(row: Row) -> str:
    layers = row.get("layers")
    return layers_in_words(layers) if isinstance(layers, list | tuple) else "no layers"


def _well(row: Row) -> str:
    measured = number(row, "round_trip_s"), number(row, "bytes_per_s")
    far = f"; its connection to the broker: {way(*measured)}" if measured[0] else ""
    verdict = "loading" if row.get("verdict") == "loading" else "well"
    return f"{verdict}, with {_held(row)}{far}"
