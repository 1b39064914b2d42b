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
    from swarm.ctl.top.keys import Order
    from swarm.ctl.top.view import Known

AWAY_S: Final = 1.0  # Without an answer, until the broker is reported as away.
_ORDERS: Final = 8


def look(client: Client) -> Known:
    from swarm.ctl.top.view import Known

    return Known(client.query("status"), client.query("nodes"), client.query("stats"), client.query("requests"))


class Asking:
    """Poller: refreshes the data at an interval and sends commands, in its thread. ``data`` is the latest data;
    ``take_result`` returns the result of the last command, once."""

    def __init__(self, client: Client, known: Known, every_s: float) -> None:
        self.known = known
        self.problem: SwarmError | None = None  # An error that ends the screen.
        self._client, self._every_s = client, every_s
        self._orders: queue.Queue[Order | None] = queue.Queue(_ORDERS)  # None stops the thread.
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # One text per executed command.
        self._thread = threading.Thread(target=self._run, name="swarmctl top", daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._thread.is_alive():
            try:
                self._orders.put_nowait(None)
            except queue.Full:
                self._orders.get_nowait()  # The user quits, so pending commands are dropped.
                continue
            break
        self._thread.join(AWAY_S)  # A query in progress ends when the client closes.

    def order(self, order: Order) -> str:
        """Queue a command. Return the text for the status line."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return "too many commands wait for the broker"
        return f"{order.verb} {order.item.name} …"

    def take_said(self) -> str | None:
        try:
            return self._said.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        heard_at = time.monotonic()
        while True:
            try:
                order = self._orders.get(timeout=self._every_s)
                if order is None:
                    return
                self._said.put(self._carried_out(order))
            except queue.Empty:
                pass
            try:
                self.known, heard_at = look(self._client), time.monotonic()
            except (Unavailable, RequestTimeout):
                self.known = replace(self.known, away_s=time.monotonic() - heard_at)
            except SwarmError as error:  # Not temporary: the screen ends with this error.
                self.problem = error
                return

    def _carried_out(self, order: Order) -> str:
        from swarm.ctl.steering import of_worker

        name = order.item.name
        try:
            if order.verb == "cancel":
                self._client.cancel(name)
            else:
                self._client.steer(of_worker("drain" if order.verb == "drain" else "uncordon", name))
        except SwarmError as error:
            return f"{order.verb} {name}: {error}"
        return f"{order.verb} {name}: done"
