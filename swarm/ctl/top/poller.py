"""Background thread that polls the broker and sends it commands, so that keys work while the broker is unreachable."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from swarm.errors import RequestTimeout, SwarmError, Unavailable

if TYPE_CHECKING:
    from swarm.client.blocking import Client
    from swarm.ctl.top.keys import TopCommand
    from swarm.ctl.top.view import TopData

AWAY_S: Final = 1.0  # Seconds without an answer after which the broker is shown as away.
_ORDERS: Final = 8  # Maximum number of commands in the queue.


def query_data(client: Client) -> TopData:
    from swarm.ctl.top.view import TopData

    return TopData(client.query("status"), client.query("nodes"), client.query("stats"), client.query("requests"))


class TopPoller:
    """Background thread that refreshes the data at an interval and sends commands.

    ``data`` is the latest data; ``take_result`` returns the result of the last command, once.
    """

    def __init__(self, client: Client, known: TopData, every_s: float) -> None:
        self.data = known
        self.problem: SwarmError | None = None  # An error that ends the screen.
        self._client, self._every_s = client, every_s
        self._commands: queue.Queue[TopCommand | None] = queue.Queue(_ORDERS)  # None stops the thread.
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()  # One text per executed command.
        self._thread = threading.Thread(target=self._run, name="swarmctl top", daemon=True)

    def __enter__(self) -> TopPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._thread.is_alive():
            try:
                self._commands.put_nowait(None)
            except queue.Full:
                self._commands.get_nowait()  # The user quits, so pending commands are dropped.
                continue
            break
        self._thread.join(AWAY_S)  # A query in progress ends when the client closes.

    def submit(self, order: TopCommand) -> str:
        """Queue a command. Return the text for the status line."""
        try:
            self._commands.put_nowait(order)
        except queue.Full:
            return "too many commands wait for the broker"
        return f"{order.verb} {order.item.name} …"

    def take_result(self) -> str | None:
        try:
            return self._results.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        answered_at = time.monotonic()
        while True:
            try:
                command = self._commands.get(timeout=self._every_s)
                if command is None:
                    return
                self._results.put(self._execute(command))
            except queue.Empty:
                pass
            try:
                self.data, answered_at = query_data(self._client), time.monotonic()
            except (Unavailable, RequestTimeout):
                self.data = replace(self.data, away_s=time.monotonic() - answered_at)
            except SwarmError as error:  # Not temporary: the screen ends with this error.
                self.problem = error
                return

    def _execute(self, order: TopCommand) -> str:
        from swarm.ctl.plan_options import worker_command

        name = order.item.name
        try:
            if order.verb == "cancel":
                self._client.cancel(name)
            else:
                self._client.steer(worker_command("drain" if order.verb == "drain" else "uncordon", name))
        except SwarmError as error:
            return f"{order.verb} {name}: {error}"
        return f"{order.verb} {name}: done"
