"""Keys and values that leave a stage or come to it: copies that it sends (``kv_sender``) and accepts
(``kv_arrivals``), chunks that it writes to disk (``kv_spill``) and reads (``kv_restore``); and how plans begin and end
all this.

An order belongs to the plan of its epoch. A fence ends it, and the copies stay: the plan that follows takes them over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from swarm.stage.actions import Action
from swarm.stage.events import KvTurn
from swarm.stage.kv_arrivals import KvArrivals
from swarm.stage.kv_restore import KvRestorer
from swarm.stage.kv_sender import KvSender
from swarm.stage.kv_spill import KvSpiller
from swarm.wire.messages import LayerRange, ReceiveKv, RestoreKv, Row, SendKv, SpillKv, Step

KvOrder = SendKv | ReceiveKv | SpillKv | RestoreKv


@dataclass(slots=True)
class KvExchange:
    """Sender and receiver of copies, and what goes through the disk. Appends actions to ``actions``."""

    sender: KvSender
    arrivals: KvArrivals
    spiller: KvSpiller
    restorer: KvRestorer
    actions: list[Action]

    def follow(self, order: KvOrder, active: int | None, layers: LayerRange | None, now: float) -> bool:
        """Follow an order; return False if it belongs to another plan.

        A worker without a part in the plan in force may receive copies. All else is for its stages.
        """
        if isinstance(order, ReceiveKv):
            if active is not None and order.epoch != active:
                return False
            self.arrivals.follow(order, now)
            return True
        if layers is None or order.epoch != active:
            return False
        match order:
            case SendKv():
                self.actions.extend(self.sender.follow(order, layers))
            case SpillKv():
                self.spiller.follow(order, layers)
            case RestoreKv():
                self.restorer.follow(order, now)
        return True

    # --- turns and steps ---------------------------------------------------------------------------------------------

    @property
    def next_turn_at(self) -> float:
        """Return the earliest time at which a turn may lead to parts or a chunk."""
        return -inf if self.spiller.unwritten else self.sender.next_turn_at

    def wants_turn(self, turn: KvTurn, now: float) -> bool:
        """Return whether this turn would be used."""
        return self.sender.has_part(turn, now) or self.spiller.has_chunk(turn, now)

    def take_turn(self, turn: KvTurn, now: float) -> None:
        """Send a part of a copy; if there is none, have a chunk written."""
        self.actions.extend(self.sender.take_turn(turn, now) or self.spiller.take_turn(turn, now))

    def on_step_started(self, step: Step) -> None:
        """Record the sequences that a step changes, releases and opens, and the proposals that it verifies."""
        self.restorer.on_step_started(step)
        self.spiller.add_released(step.release)
        self.spiller.add_opened(step.open)
        self.arrivals.on_released(step.release)
        self.arrivals.on_opened(step.open)
        self.sender.add_opened(step.open)
        self.on_computed(self.sender.store.newly_verified(step))

    def on_computed(self, rows: Iterable[Row]) -> None:
        """Record positions that are computed and certain."""
        rows = tuple(rows)
        self.sender.add_positions(rows)
        self.spiller.add_positions(rows)

    # --- plans -------------------------------------------------------------------------------------------------------

    def on_fence(self, epoch: int) -> None:
        self.arrivals.on_fence(epoch)

    def on_activated(self) -> None:
        self.arrivals.on_activated()

    def on_deactivated(self) -> None:
        self.actions.extend(self.sender.stop())
        self.spiller.stop()
        self.restorer.stop()

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
