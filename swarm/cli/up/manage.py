"""``swarm ps``, ``swarm logs`` and ``swarm down``: the ``swarm up`` processes of this user on this machine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.cli.options import JsonOption
from swarm.cli.output import print_json, print_json_line, print_table
from swarm.errors import ClientError, SwarmError

if TYPE_CHECKING:
    from swarm.cli.up.runs import RecordedSwarm, Run
    from swarm.wire.messages import Json

_ASK_S = 2.0  # for a broker on this machine
_STOP_S = 15.0  # longer than a supervisor's own limits
_FOLLOW_S = 0.2
_SHOWN = ("name", "state", "workers", "url")

NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="Its model, port or process number, if several run.", show_default=False),
]


def ps(as_json: JsonOption = False) -> None:
    """List the swarms that swarm up runs on this machine for this user, with their state."""
    from swarm.cli.up.runs import read_runs

    rows = asyncio.run(_describe_all([run for run in read_runs() if run.is_alive]))
    if as_json:
        print_json(rows)
        return
    if not rows:
        print("no swarm up runs; start one with: swarm up --detach", file=sys.stderr)
        return
    texts = [[*(str(row[key]) for key in _SHOWN), str(row["http"] or "–"), _format_time(row["since"])] for row in rows]
    print_table((*_SHOWN, "http", "since"), texts, optional=("since", "url"))


def _format_time(since: float) -> str:
    """Return the time of a start; the date if it was not today."""
    start = time.localtime(since)
    return time.strftime("%H:%M" if start[:3] == time.localtime()[:3] else "%Y-%m-%d", start)


async def _describe_all(runs: list[Run]) -> list[dict[str, Any]]:
    pairs = [(run, swarm) for run in runs for swarm in run.swarms]
    return list(await asyncio.gather(*(_describe(run, swarm) for run, swarm in pairs)))


async def _describe(run: Run, swarm: RecordedSwarm) -> dict[str, Any]:
    state, num_workers = await _ask(swarm.url)
    return {
        "name": swarm.model,
        "state": state,
        "workers": num_workers,
        "url": swarm.url,
        "http": run.http,
        "console": run.console,
        "since": run.since,
        "pid": run.pid,
        "state_dir": run.state_dir,
    }


async def _ask(url: str) -> tuple[str, int]:
    """Return the broker's state and its number of workers."""
    from swarm.client.client import AsyncClient

    try:
        async with asyncio.timeout(_ASK_S), AsyncClient(url, connect_timeout_s=_ASK_S) as client:
            status, nodes = await asyncio.gather(client.query("status"), client.query("nodes"))
    except (ClientError, TimeoutError):
        return "no answer", 0
    workers: list[Json] = nodes.get("workers") or []  # type: ignore[assignment]
    return str(status.get("state")), sum(worker.get("state") not in ("out", "left") for worker in workers)


def logs(
    name: NameArgument = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends, or until Ctrl-C.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last lines. [default: all]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a swarm up has reported: one that runs, or else the last one.

    The broker, the workers and the gateway have logs of their own, in the directory that the first line names; swarm up
    --verbose copies them into this one.
    """
    from swarm.cli.up.runs import log_path, read_runs, select_run

    runs = [run for run in read_runs() if name is None or name in run.names]
    alive = [run for run in runs if run.is_alive]
    run = select_run(alive, name) if alive else runs[-1] if runs else None
    if run is None:
        raise SwarmError(f"no swarm {name} has run here" if name else "no swarm up has run here for this user")
    for line in _read_lines(log_path(run.pid), tail, run if follow else None):
        if as_json:
            print_json_line({"text": line})
        else:
            print(line, flush=True)


def _read_lines(path: Path, tail: int | None, followed: Run | None) -> Iterator[str]:
    """Yield the log's lines; with ``followed``, until this process ends."""
    from swarm.cli.up.processes import LogFile

    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in deque(file, tail))
            size = file.tell()
    except OSError as error:
        raise SwarmError(f"the log {path} can't be read ({error.strerror})") from None
    log = LogFile(path, shown_offset=size)
    while followed is not None:
        is_alive = followed.is_alive  # before the last look, so that its last lines are not missed
        yield from log.new_lines()
        if not is_alive:
            return
        time.sleep(_FOLLOW_S)


def down(name: NameArgument = None, *, as_json: JsonOption = False) -> None:
    """End a swarm up with its broker, workers and gateway, as Ctrl-C does, and wait for the end."""
    from swarm.cli.up.runs import read_runs, select_run, stop_run

    run = select_run([run for run in read_runs() if run.is_alive], name)
    if not stop_run(run, _STOP_S):
        raise SwarmError(f"{run.describe()} has not ended within {_STOP_S:.0f} s; kill -9 {run.pid} ends it at once")
    if as_json:
        print_json({"stopped": [swarm.model for swarm in run.swarms], "pid": run.pid})
    else:
        print(f"stopped {run.describe()}")
