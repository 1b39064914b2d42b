"""Local swarm: the processes that the same ``swarm up`` started as this gateway."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from swarm.admin.report_rows import Row, is_present, read_rows
from swarm.gateway.errors import ApiError
from swarm.wire.messages import Json


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """Settings that ``swarm up`` passes to its gateway. ``is_demo``: everything runs on this machine alone, so workers
    may be killed for demonstrations. ``logs``: the folder with the logs of all processes."""

    logs: Path | None = None
    is_demo: bool = False


_NO_PID: Final = (1 << 31) - 1  # larger than any process id
NO_LOCAL_SWARM = LocalSwarm()  # a gateway that was not started by swarm up


def pids_by_name(commands: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return process ids by name, from command lines of children: workers by their names, other processes by their
    kinds."""
    pids = {}
    for pid, command in commands.items():
        words = " ".join(command).split()
        if "--name" in words[:-1] and "worker" in words:
            pids[words[words.index("--name") + 1]] = pid
        for what in ("broker", "gateway", "nursery"):
            if what in words:
                pids[what] = pid
    return pids


def sibling_commands() -> dict[int, list[str]]:
    """Return the command lines of our parent's children by process id. Slow: must not run on the event loop."""
    commands = {}
    try:
        siblings = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return {}
    for child in siblings:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                commands[child.pid] = child.cmdline()
        except psutil.Error:
            continue  # ended meanwhile
    return commands


def find_victim(worker: str, nodes: Json, host: str, siblings: Mapping[str, int]) -> int:
    """Return the process to kill: a worker that the broker lists under this name or incarnation, on this machine, and
    that our ``swarm up`` started under that very name. Raises ApiError for any other."""
    row = _row_of(worker, nodes)
    if row is None:
        known = ", ".join(sorted(str(r.get("name")) for r in read_rows(nodes.get("workers")) if is_present(r)))
        raise ApiError(404, f"no worker {worker[:80]!r}: the workers are {known or 'none'}", code="not_found")
    pid = row.get("pid")
    is_ours = row.get("host") == host and isinstance(pid, int) and siblings.get(str(row.get("name"))) == pid
    if not is_ours or not isinstance(pid, int):
        text = f"{row.get('name')} was not started by this gateway's swarm up: kill it where it runs"
        raise ApiError(409, text, code="not_ours")
    return pid


def _row_of(worker: str, nodes: Json) -> Row | None:
    for row in read_rows(nodes.get("workers")):
        if is_present(row) and worker in (row.get("name"), row.get("incarnation")):
            return row
    return None


def kill_worker(worker: str, nodes: Json) -> int:
    """Kill a worker immediately, as a crash would. Returns its process id. Raises ApiError. Slow: must not run on the
    event loop.

    The process is opened by its id before it is checked, so that another process that takes over the id meanwhile is
    not killed.
    """
    row = _row_of(worker, nodes)
    try:
        process = psutil.Process(_pid_of(row))
    except psutil.NoSuchProcess:
        process = None
    pid = find_victim(worker, nodes, socket.gethostname(), pids_by_name(sibling_commands()))
    try:
        if process is None:
            raise psutil.NoSuchProcess(pid)
        process.kill()  # raises if another process has the id by now
    except psutil.NoSuchProcess:
        raise ApiError(409, f"the process {pid} of {worker} has ended already", code="gone") from None
    return pid


def _pid_of(row: Row | None) -> int:
    """Return a worker's process id from its report; an impossible one if it has none."""
    pid = None if row is None else row.get("pid")
    return pid if isinstance(pid, int) and pid > 0 else _NO_PID
