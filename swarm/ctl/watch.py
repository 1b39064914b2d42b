"""``swarmctl stats --watch``: display the same report repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Group
from rich.text import Text

from swarm.cli.output import make_console, print_json_line
from swarm.client.blocking import Client
from swarm.ctl.render_stats import describe_rates, stats
from swarm.wire.messages import Json


def watch_stats(client: Client, every_s: float, *, as_json: bool, pause: Callable[[float], None] = time.sleep) -> None:
    """Display statistics until an interrupt, which is the normal way to end it. Closes the client."""
    try:
        with client:
            _watch(client, every_s, as_json, pause)
    except KeyboardInterrupt:
        return


def _watch(client: Client, every_s: float, as_json: bool, pause: Callable[[float], None]) -> None:
    before: Json = {}
    asked_at = time.monotonic()
    screen = make_console()
    while True:
        body = client.query("stats")
        now = time.monotonic()
        if as_json:
            print_json_line(body)
        else:
            screen.clear()  # No effect if it isn't a terminal.
            screen.print(Group(Text(_describe_rates(before, body, now - asked_at)), stats(body)))
        before, asked_at = body, now
        pause(every_s)


def _describe_rates(before: Json, body: Json, seconds: float) -> str:
    first, last = before.get("pipeline"), body.get("pipeline")
    if not isinstance(first, Mapping) or not isinstance(last, Mapping):
        return "counters are totals since the start; from the next refresh on, this line shows rates per second"
    return f"since the last refresh: {describe_rates(first, last, seconds) or 'no data'}"
