"""The processes beside this gateway: those that the same ``swarm up`` has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from swarm.gateway.errors import Problem
from swarm.govern.rows import Row, is_here, rows_of
from swarm.wire.messages import Json


@dataclass(frozen=True, slots=True)
class Household:
    """What ``swarm up`` tells its gateway. ``is_demo``: all is on this machine alone, and may be broken for show.
    ``logs``: the folder of the logs of all processes."""

    logs: Path | None = None
    is_demo: bool = False


_NOBODY: Final = (1 << 31) - 1  # larger than any process's number
STRANGERS = Household()  # a gateway that was started by itself knows nobody


def names_of(commands: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Who is who, by the command lines of children: workers by their names, others by what they are."""
    found = {}
    for pid, command in commands.items():
        words = " ".join(command).split()
        if "--name" in words[:-1] and "worker" in words:
            found[words[words.index("--name") + 1]] = pid
        for what in ("broker", "gateway", "nursery"):
            if what in words:
                found[what] = pid
    return found


def children() -> dict[int, list[str]]:
    """Command lines of our parent's children, by their numbers. Takes a while: not for the loop."""
    found = {}
    try:
        siblings = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return {}
    for child in siblings:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = child.cmdline()
        except psutil.Error:
            continue  # gone meanwhile
    return found


def victim(worker: str, nodes: Json, host: str, beside: Mapping[str, int]) -> int:
    """The process to kill: a worker that the broker knows by this name or incarnation, on this machine, and one of
    those that were started beside us under that very name. Raises Problem for any other."""
    row = _row_of(worker, nodes)
    if row is None:
        known = ", ".join(sorted(str(r.get("name")) for r in rows_of(nodes.get("workers")) if is_here(r)))
        raise Problem(404, f"no worker {worker[:80]!r}: the workers are {known or 'none'}", code="not_found")
    pid = row.get("pid")
    is_ours = row.get("host") == host and isinstance(pid, int) and beside.get(str(row.get("name"))) == pid
    if not is_ours or not isinstance(pid, int):
        text = f"{row.get('name')} was not started by the swarm up of this gateway: it is killed where it runs"
        raise Problem(409, text, code="not_ours")
    return pid


def _row_of(worker: str, nodes: Json) -> Row | None:
    for row in rows_of(nodes.get("workers")):
        if is_here(row) and worker in (row.get("name"), row.get("incarnation")):
            return row
    return None


def kill(worker: str, nodes: Json) -> int:
    """End a worker at once, as a crash would. Returns its process. Raises Problem. Takes a while: not for the loop.

    The process is known by its number and its beginning before it is looked at, so that no other one that comes to have
    its number is ended."""
    row = _row_of(worker, nodes)
    try:
        held = psutil.Process(_pid_of(row))
    except psutil.NoSuchProcess:
        held = None
    found = victim(worker, nodes, socket.gethostname(), names_of(children()))
    try:
        if held is None:
            raise psutil.NoSuchProcess(found)
        held.kill()  # not if another one has the number by now
    except psutil.NoSuchProcess:
        raise Problem(409, f"the process {found} of {worker} has ended already", code="gone") from None
    return found


def _pid_of(row: Row | None) -> int:
    """Of a worker, as it has told; one that nobody has, if it told none."""
    pid = None if row is None else row.get("pid")
    return pid if isinstance(pid, int) and pid > 0 else _NOBODY
