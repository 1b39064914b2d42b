"""A thread that asks the broker and gives it orders, so that keys are heard while it is away."""

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

AWAY_S: Final = 1.0  # without an answer, until it is told that the broker is away
_ORDERS: Final = 8


def look(client: Client) -> Known:
    from swarm.ctl.top.view import Known

    return Known(client.query("status"), client.query("nodes"), client.query("stats"), client.query("requests"))


class Asking:
    """Looks every so often, and carries orders out, in its thread. ``known`` is the last look; ``take_said`` what came
    of the last order, once."""

    def __init__(self, client: Client, known: Known, every_s: float) -> None:
        self.known = known
        self.problem: SwarmError | None = None
        self._client, self._every_s = client, every_s
        self._orders: queue.Queue[Order | None] = queue.Queue(_ORDERS)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="swarmctl top", daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._thread.is_alive():
            try:
                self._orders.put_nowait(None)
            except queue.Full:
                self._orders.get_nowait()  # whoever leaves wants none of them
                continue
            break
        self._thread.join(AWAY_S)  # a question under way is left to the client's end

    def order(self, order: Order) -> str:
        """Have it carried out; what is to be said meanwhile."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return "too many orders wait for the broker"
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
            except SwarmError as error:  # asking again would not help: the screen ends with it
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
