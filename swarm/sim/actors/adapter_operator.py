"""An operator, who loads and drops adapters at run time."""

from __future__ import annotations

from itertools import count

from swarm.client import events as client_event
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.environment import Environment
from swarm.sim.schedules.schedule import UNLIKE_SOURCE, AdapterOrder
from swarm.wire.messages import AdapterCommand

ANSWER_TIMEOUT_S = 20.0
MIN_UNLIKE = 2  # workers that notice that their files differ; one alone would keep all others out
NO_WORKER_S = 0.3  # until a load is tried again, while no worker has joined yet


class AdapterOperator(ClientNode):
    """Client that gives orders about adapters. ``AdapterCheck`` sees its orders, and their answers."""

    def __init__(self, cluster: Environment, name: str) -> None:
        self._keys = count(1)
        self._orders: dict[int, AdapterOrder] = {}
        super().__init__(cluster, name, (0.0, 0.0))

    def give(self, order: AdapterOrder) -> None:
        if order.verb == "load" and self._cluster.broker.core.state.manifest is None:
            self._world.schedule(NO_WORKER_S, lambda: self.give(order))
            return
        key = next(self._keys)
        self._orders[key] = order
        source = order.source
        if source == UNLIKE_SOURCE and len(self._cluster.broker.core.state.present_workers) < MIN_UNLIKE:
            source = f"/{order.name}-alone"
        command = AdapterCommand(verb=order.verb, name=order.name, source=source)
        self.feed(client_event.AskQuestion(key, command, ANSWER_TIMEOUT_S))

    def _perform(self, action: client_event.SessionAction) -> None:
        """Repeat a drop without an answer: it may keep workers out that have other files."""
        super()._perform(action)
        match action:
            case client_event.ReturnError(key) if self._orders[key].verb == "drop":
                self.give(self._orders[key])
            case _:
                pass
