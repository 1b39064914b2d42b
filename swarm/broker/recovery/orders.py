"""Orders to stages: a fence for everybody, and what all stages of a plan must obey before it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.broker.actions import OrderWorker, Outbox
from swarm.broker.state import State
from swarm.wire.messages import Fence, Order

ORDER_AGAIN_S = 1.0  # until an order that everybody waits for is said again to who has not answered it


@dataclass(slots=True)
class Orders:
    state: State
    out: Outbox
    given: dict[str, Order] = field(default_factory=dict)  # to those who are awaited, to be said again
    again_at: float = 0.0

    def fence(self, epoch: int) -> None:
        """Tell every worker to believe nothing older."""
        for worker in self.state.workers.values():
            if not worker.is_gone:
                self.out.append(OrderWorker(worker.peer, Fence(epoch=epoch)))

    def give(self, orders: Mapping[str, Order], now: float) -> None:
        """Tell all of them, each of whom answers."""
        self.given = dict(orders)
        self.again_at = now + ORDER_AGAIN_S
        for incarnation, order in orders.items():
            self.tell(incarnation, order)

    def tick(self, now: float) -> None:
        """Say it again: the order or its answer may have been lost. Who has heard it answers again, or goes on."""
        if now < self.again_at:
            return
        self.again_at = now + ORDER_AGAIN_S
        for incarnation in sorted(self.state.book.awaited):
            self.tell(incarnation, self.given[incarnation])

    def tell(self, incarnation: str, order: Order) -> None:
        self.out.append(OrderWorker(self.state.workers[incarnation].peer, order))
