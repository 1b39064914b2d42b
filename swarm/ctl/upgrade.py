"""``swarmctl upgrade``: restart workers one after the other, while answers continue.

A worker hands over its layers, exits, is restarted by its supervisor (``swarm up``, systemd) with the version that is
installed there now, and must be back with layers before the next one is restarted. So at most one worker is missing at
any time, and answers continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from swarm.cli.confirm import YesOption, confirm_or_exit
from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.cli.output import json_line
from swarm.errors import SwarmError, Unavailable

if TYPE_CHECKING:
    from swarm.admin.report_rows import Row
    from swarm.client.blocking import Client
    from swarm.wire.messages import Json

BACK_S: Final = 120.0  # Timeout for a worker to come back: it loads its model's files first.
LAYERS_S: Final = 15.0  # Additional timeout for a plan that gives it layers; there may be none.
_POLL_S: Final = 0.2
_PRESENT_STATES: Final = ("member", "leaving", "refused")  # States of a running process.
_OUT: Final = "out"


def upgrade(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    workers: Annotated[
        list[str] | None, typer.Argument(help="Names of workers. [default: all]", show_default=False)
    ] = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="Restart one worker after the other. Required: there is no other mode.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Even workers that the swarm can't serve without: answers wait until they are back."
        ),
    ] = False,
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restart workers with the version that is installed on their machines, while the swarm serves.

    Install the new version first. Each worker hands over its layers, exits, and is restarted by swarm up or systemd;
    the command waits until it is back, and ends with exit code 1 at the first one that does not come back. A worker
    that is out is reported and skipped; that is exit code 1, too, if it was named. Restart broker and gateways where
    they run; nothing is lost.
    """
    if not rolling:
        raise typer.BadParameter("add --rolling: workers are restarted (swarmctl version shows their builds)")
    outer = context.obj
    confirm_or_exit(f"Restart {', '.join(workers) if workers else 'all workers'}, one after the other?", yes=yes)
    is_json = as_json or outer.as_json
    with open_client(context, url or outer.url) as client:
        all_done = []
        for done in RollingRestart(client, force=force).run(workers or ()):
            all_done.append(done)
            print(json_line(done) if is_json else describe_result(done), flush=True)
        if not is_json:
            print(describe_total(all_done))
        check_named(workers or (), all_done)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker's process, as reported by the broker."""

    name: str
    incarnation: str  # Changes with each start of the process.
    build: str
    is_member: bool
    has_layers: bool
    absence: str = ""  # Reason for which it can't be restarted.


class RollingRestart:
    """Rolling restart of workers. ``clock`` and ``pause`` are replaced in tests."""

    def __init__(
        self,
        client: Client,
        *,
        force: bool = False,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._force = client, force
        self._clock, self._pause = clock, pause

    def list_workers(self) -> list[WorkerProcess]:
        return [
            WorkerProcess(
                str(row["name"]),
                str(row["incarnation"]),
                str(row["build"] or "0.1.0"),
                is_member=row["state"] == "member",
                has_layers=row["layers"] is not None,
                absence="" if row["state"] in _PRESENT_STATES else str(row.get("reason") or "no reason given"),
            )
            for row in self._rows()
            if row["state"] in (*_PRESENT_STATES, _OUT)
        ]

    def _rows(self) -> list[Row]:
        from swarm.admin.report_rows import read_rows

        return read_rows(self._client.query("nodes").get("workers"))

    def run(self, names: Sequence[str]) -> Iterator[Json]:
        """Restart these workers (none: all) one after the other, and yield each one's result.

        Raises SwarmError at the first one that can't leave or does not come back; the rest is skipped.
        """
        there = {each.name: each for each in sorted(self.list_workers(), key=lambda each: not each.absence)}
        if unknown := [name for name in names if name not in there]:
            raise Unavailable("; ".join(self._describe_unknown(unknown, sorted(there))))
        if all(each.absence for each in there.values()):
            raise Unavailable("there is no worker to restart: swarmctl nodes shows which are out, and why")
        for name in names or sorted(there):
            worker = there[name]
            yield {"worker": name, "out": worker.absence} if worker.absence else self._restart(worker)

    def _describe_unknown(self, names: Sequence[str], here: Sequence[str]) -> list[str]:
        """Describe the workers that can't be restarted: those that have left, and unknown names."""
        left = {str(row["name"]): row for row in self._rows() if row["state"] == "left"}
        lines = [
            f"{name} has left: {row.get('reason') or 'no reason given'}; start it again where it ran (process "
            f"{row.get('pid')} on {row.get('host')})"
            for name, row in left.items()
            if name in names
        ]
        unknown = [name for name in names if name not in left]
        nobody = f"no worker {', '.join(unknown)}: the workers are {', '.join(here) or 'none'}"
        return [*lines, *([nobody] if unknown else [])]

    def _restart(self, before: WorkerProcess) -> Json:
        began = self._clock()
        self._client.stop_worker(before.name, force=self._force, again=True)
        after = self._wait_until_back(before)
        back_s = round(self._clock() - began, 2)
        is_used = not before.has_layers or self._wait_for_layers(after)
        return {
            "worker": before.name,
            "was": before.build,
            "is": after.build,
            "back_s": back_s,
            "has_layers": is_used and before.has_layers,
        }

    def _wait_until_back(self, before: WorkerProcess) -> WorkerProcess:
        until = self._clock() + BACK_S
        while True:
            for worker in self._list_workers_or_none():
                if worker.name == before.name and worker.incarnation != before.incarnation and worker.is_member:
                    return worker
            if self._clock() >= until:
                raise Unavailable(
                    f"{before.name} left and did not come back within {BACK_S:g} s: it has no supervisor, or it "
                    "can't start (see its log); the others were not restarted"
                )
            self._pause(_POLL_S)

    def _wait_for_layers(self, worker: WorkerProcess) -> bool:
        until = self._clock() + LAYERS_S
        while self._clock() < until:
            if any(each.incarnation == worker.incarnation and each.has_layers for each in self._list_workers_or_none()):
                return True
            self._pause(_POLL_S)
        return False

    def _list_workers_or_none(self) -> list[WorkerProcess]:
        """Return the current workers; none while the broker is unreachable."""
        try:
            return self.list_workers()
        except SwarmError:
            return []


def describe_result(done: Json) -> str:
    """Describe a worker that is back or was skipped, in one line."""
    if "out" in done:
        return f"{done['worker']} is out and was skipped: {done['out']}"
    builds = f"swarm {done['is']}" if done["is"] == done["was"] else f"swarm {done['is']}, was {done['was']}"
    layers = "" if done["has_layers"] else "; it has no layers"
    return f"{done['worker']} is back after {done['back_s']} s ({builds}){layers}"


def describe_total(done: Sequence[Json]) -> str:
    num_out = sum("out" in each for each in done)
    return f"{len(done) - num_out} upgraded" + (f", {num_out} out and skipped" if num_out else "")


def check_named(names: Sequence[str], done: Sequence[Json]) -> None:
    """Raise Unavailable if a worker that was named was skipped."""
    left = [str(each["worker"]) for each in done if "out" in each and each["worker"] in names]
    if left:
        raise Unavailable(f"{', '.join(left)} could not be restarted: swarmctl nodes shows why")
