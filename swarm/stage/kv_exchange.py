"""Both directions of the copies of keys and values in a stage: what it sends (``kv_sender``) and what it accepts
(``kv_arrivals``), and how plans begin and end them.

An order belongs to the plan of its epoch. A fence ends it, and the copies stay: the plan that follows takes them over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.stage.actions import Action
from swarm.stage.kv_arrivals import KvArrivals
from swarm.stage.kv_sender import KvSender
from swarm.wire.messages import LayerRange, ReceiveKv, Row, SendKv, Step


@dataclass(slots=True)
class KvExchange:
    """Sender and receiver of copies. Appends actions to ``actions``."""

    sender: KvSender
    arrivals: KvArrivals
    actions: list[Action]

    def follow(self, order: SendKv | ReceiveKv, active: int | None, layers: LayerRange | None, now: float) -> bool:
        """Follow an order; return False if it belongs to another plan.

        Only a stage of the plan in force sends. A worker without a part in it may receive.
        """
        if isinstance(order, SendKv):
            if layers is None or order.epoch != active:
                return False
            self.actions.extend(self.sender.follow(order, layers))
            return True
        if active is not None and order.epoch != active:
            return False
        self.arrivals.follow(order, now)
        return True

    def on_step_started(self, step: Step) -> None:
        """Record the sequences that a step releases and opens."""
        self.arrivals.on_released(step.release)
        self.arrivals.on_opened(step.open)
        self.sender.add_opened(step.open)

    def on_computed(self, rows: Iterable[Row]) -> None:
        self.sender.add_positions(rows)

    # --- plans -------------------------------------------------------------------------------------------------------

    def on_fence(self, epoch: int) -> None:
        self.arrivals.on_fence(epoch)

    def on_activated(self) -> None:
        self.arrivals.on_activated()

    def on_deactivated(self) -> None:
        self.actions.extend(self.sender.stop())

    def on_unassigned(self, epoch: int, now: float) -> None:
        """Keep copies for a while: the plan does not use this worker, but perhaps it is to hold copies."""
        self.arrivals.on_fence(epoch)
        self.arrivals.await_order(now)

    def on_welcome(self) -> None:
        """Begin with a broker, perhaps again. It has no record of sequences that consist of copies only, and with
        another lineage their numbers may stand for others."""
        self.arrivals.copies.drop_unopened()
        self.arrivals.report_again()

    def on_lineage_switched(self) -> None:
        self.arrivals.stop()

    def block_key(self, key: str, blocked: Iterable[str]) -> None:
        self.actions.extend(self.sender.block_key(key))
        self.arrivals.block_keys(blocked)
