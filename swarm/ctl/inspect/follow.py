"""``swarmctl events``: events of a swarm, one line each; ``--follow`` until Ctrl-C, or until the output's reader is
gone."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from swarm.cli.options import JsonOption, UrlOption, open_client
from swarm.cli.output import json_line

if TYPE_CHECKING:
    from swarm.admin.events import SwarmEvent, SwarmSnapshot
    from swarm.client.blocking import Client

AWAY_S: Final = 1.0  # Without an answer, until the broker is reported as away.


def events(
    context: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until Ctrl-C, even across a restart of the broker.")
    ] = False,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", min=0.1, max=3600, help="Polling interval, with --follow."),
    ] = 0.5,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show events: workers that joined, left or are unhealthy, recoveries, plans, problems; one line each.

    Polls every half second and prints changes. Earlier events that the broker still has come first, without a time.
    With --json, each line is an object with event, text, time (null: before the first poll), and details.
    """
    outer = context.obj
    with open_client(context, url or outer.url, away_s=AWAY_S) as client:
        try:
            for event, at in poll_events(client, every if follow else None):
                print(format_event(event, at, as_json=as_json or outer.as_json), flush=True)
        except KeyboardInterrupt:
            return  # The normal way to end it.


def poll_events(
    client: Client, every_s: float | None, pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[SwarmEvent, float | None]]:
    """Yield the known events, then new ones, with the time of the poll; None for events of the first poll.

    An unreachable broker is an error at the first poll; later absences are waited out.
    """
    from swarm.admin.events import AWAY, NO_SNAPSHOT, carry_over, diff_events, events_after_absence
    from swarm.errors import RequestTimeout, Unavailable

    before = _query_snapshot(client)
    yield from ((event, None) for event in diff_events(NO_SNAPSHOT, before))
    is_away = False
    while every_s is not None:
        pause(every_s)
        _check_reader()
        try:
            after = _query_snapshot(client)
        except (Unavailable, RequestTimeout):
            if not is_away:
                yield AWAY, time.time()
            is_away = True
            continue
        new_events = diff_events(before, after)
        yield from ((event, time.time()) for event in (events_after_absence(new_events) if is_away else new_events))
        before, is_away = carry_over(before, after), False


def _query_snapshot(client: Client) -> SwarmSnapshot:
    from swarm.admin.events import SwarmSnapshot

    return SwarmSnapshot(client.query("status"), client.query("nodes"), client.query("recoveries"))


def format_event(event: SwarmEvent, at: float | None, *, as_json: bool) -> str:
    if as_json:
        when = None if at is None else datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
        return json_line({"time": when, "event": event.name, "text": event.text, **event.fields})
    clock = "before  " if at is None else f"{datetime.fromtimestamp(at):%H:%M:%S}"
    return f"{clock}  {event.name:<15} {' '.join(event.text.split())}"


def _check_reader() -> None:
    """Raise BrokenPipeError if the reader of our output is gone. Without this check a quiet swarm would hide that for
    hours."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        gone = any(seen & (select.POLLERR | select.POLLHUP) for _, seen in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # No descriptor, or a system without poll.
        return
    if gone:
        raise BrokenPipeError
