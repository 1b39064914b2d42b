"""Orders to workers: the fence for all workers; the orders that all stages must carry out before a plan serves; and,
while a plan serves and no answer is awaited, which layers to keep warm for others. Only layers that a worker has
reported count as warm, not those that it was ordered to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.planner.takeover import MIN_LOAD_S
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.measurements import LOAD_BYTES_PER_S
from swarm.broker.recovery.rebuild import live_positions
from swarm.broker.state import Plan, Sequence, State, Worker, WorkerState
from swarm.wire.messages import (
    Activate,
    Edge,
    Fence,
    KeepWarm,
    KeptWarm,
    LayerRange,
    Order,
    Prepare,
    Unassign,
    layers_of,
)

MIN_BYTES = 1 << 20  # a smaller load gives no estimate of a worker's load speed
ASSUMED_BYTES = 32 << 20  # weight of the assumed rate in an estimate
MIN_RATED = 0.25  # least fraction of a load's time that counts for its rate
RESEND_S = 1.0  # interval at which an order is resent to workers that have not answered it


BROKER_NAME = "broker"  # name under which the last stage addresses the broker


class BrokerPeer(NamedTuple):
    """The broker as a neighbour of the first and the last stage: the address to which the last stage sends results, and
    the key that the first stage accepts."""

    endpoint: str
    key: str | None


@dataclass(slots=True)
class WorkerOrders:
    """Sends orders to workers, and resends them until they are answered."""

    state: State
    out: Outbox

    def fence(self, epoch: int) -> None:
        """Have every worker ignore epochs older than this one."""
        for worker in self.state.workers.values():
            if not worker.is_gone:
                self.out.append(SendToWorker(worker.peer, Fence(epoch=epoch)))

    def prepare(self, plan: Plan, broker: BrokerPeer, max_sequences: int, now: float) -> None:
        """Have every stage of a plan load the layers that it lacks."""
        prepares = {
            stage.incarnation: Prepare(
                epoch=plan.epoch,
                layers=stage.layers,
                standby=plan.standby_of(stage.incarnation),
                edge=_next_edge(plan, index, broker),
                max_sequences=max_sequences,
                before=plan.stages[index - 1].key if index else broker.key,
                relay=stage.relay,
            )
            for index, stage in enumerate(plan.stages)
        }
        self.send_all(prepares, now)

    def activate(self, plan: Plan, sequences: list[Sequence], now: float) -> None:
        """Have every stage start with the plan. The stages keep these ``sequences`` and drop all others."""
        activates = {
            stage.incarnation: Activate(
                epoch=plan.epoch,
                first_step=self.state.next_step,
                live=live_positions(self.state.workers[stage.incarnation], sequences),
                share_unit=self.state.shared.unit,
                shared=tuple(self.state.prefixes.links.values()),
            )
            for stage in plan.stages
        }
        self.send_all(activates, now)

    def unassign_others(self, plan: Plan) -> None:
        """Have workers without a part in this plan drop what they hold of sequences."""
        for worker in self.state.workers.values():
            if not worker.is_gone and worker.incarnation not in plan.members:
                self.send(worker.incarnation, Unassign(epoch=self.state.plans.journaled_epoch))

    def release_leaving(self, now: float) -> None:
        """Release workers that want to leave and that the active plan does not need."""
        current = self.state.plans.current
        for worker in self.state.workers.values():
            if worker.state is WorkerState.LEAVING and (current is None or worker.incarnation not in current.members):
                self.release(worker, "it was asked to leave, and no plan needs it", now)

    def release(self, worker: Worker, reason: str, now: float) -> None:
        """Release a worker gracefully."""
        worker.leave(reason)
        self.send(worker.incarnation, worker.build_release(self.state.plans.journaled_epoch))
        worker.record_call(now)
        self.out.note("worker_released", worker=worker.name, reason=reason)

    def send_all(self, orders: Mapping[str, Order], now: float) -> None:
        """Send each worker its order; all of them must answer."""
        self.state.plans.pending_orders = dict(orders)
        self.state.plans.repeat_orders_at = now + RESEND_S
        for incarnation, order in orders.items():
            self.send(incarnation, order)

    def tick(self, now: float) -> None:
        """Resend unanswered orders, because an order or its answer may have been lost. A worker that has the order
        already answers again, or continues its work on it."""
        if now < self.state.plans.repeat_orders_at:
            return
        self.state.plans.repeat_orders_at = now + RESEND_S
        for incarnation in sorted(self.state.plans.awaited):
            self.send(incarnation, self.state.plans.pending_orders[incarnation])

    def send(self, incarnation: str, order: Order) -> None:
        self.out.append(SendToWorker(self.state.workers[incarnation].peer, order))


def _next_edge(plan: Plan, index: int, broker: BrokerPeer) -> Edge:
    """Return the destination of a stage's output."""
    if index + 1 < len(plan.stages):
        after = plan.stages[index + 1]
        return Edge(after.incarnation, after.endpoint)
    return Edge(BROKER_NAME, broker.endpoint)


@dataclass(slots=True)
class StandbyOrders:
    """Keeps workers' warm layers up to date (``worker.kept``). Appends orders to ``out``."""

    state: State
    out: Outbox

    def order(self, target: Proposal | None) -> None:
        """Order workers to keep layers warm. A stage of the active plan keeps what that plan names, since it has
        reserved the memory. Other workers keep what ``target`` names, the plan that would be made now; and if that is
        to be made soon, its layers."""
        current = self.state.plans.current
        if current is None:
            return
        spares = {} if target is None else dict(target.standby) | {i: (layers,) for i, layers in target.shares}
        for worker in self.state.workers.values():
            if worker.is_gone:
                continue
            is_member = worker.incarnation in current.members
            layers = current.standby_of(worker.incarnation) if is_member else spares.get(worker.incarnation, ())
            present = worker.warm_layers if worker.ordered_warm_layers is None else worker.ordered_warm_layers
            if layers != present:
                worker.order_warm(layers, self.state.now)
                self.out.append(
                    SendToWorker(worker.peer, KeepWarm(epoch=self.state.plans.journaled_epoch, layers=layers))
                )

    def reset(self) -> None:
        """Drop the record of orders: with another plan, workers stop loading for others, and must be asked again."""
        for worker in self.state.workers.values():
            worker.ordered_warm_layers = None

    def on_report(self, worker: Worker, message: KeptWarm) -> None:
        """Record a worker's report of the layers that it keeps warm: all that it was asked for, or some so far."""
        new = layers_of(message.layers) - layers_of(worker.warm_layers)
        num_bytes = sum(self._bytes(layer) for layer in new)
        worker.record_warm(message.layers, num_bytes)
        worker.record_bits(message.bits)
        self.record_load(worker, num_bytes, message.load_s, is_alone=not self.state.running)
        missing = layers_of(message.wanted) - layers_of(message.layers)
        self.out.note(
            "standby_warm",
            "info" if message.wanted == worker.ordered_warm_layers else "debug",
            worker=worker.name,
            layers=[str(layers) for layers in message.layers],
            missing=sorted(missing),
            load_s=round(message.load_s, 3),
        )

    def record_load(self, worker: Worker, num_bytes: int, seconds: float, *, is_alone: bool) -> None:
        """Record how quickly bytes were loaded and warmed up, as the estimate for the next load.

        ``is_alone``: no steps ran meanwhile. Beside steps a worker loads more slowly than it can, so that such a load
        never lowers the estimate. The time that any load takes is not part of the rate, and a small load changes the
        estimate little: most of its time does not depend on its size.
        """
        if num_bytes < MIN_BYTES or seconds <= 0:
            return
        rated_s = max(seconds - MIN_LOAD_S, MIN_RATED * seconds)
        rate = (num_bytes + ASSUMED_BYTES) / (rated_s + ASSUMED_BYTES / LOAD_BYTES_PER_S)
        if is_alone or worker.load_bytes_per_s is None or rate > worker.load_bytes_per_s:
            worker.load_bytes_per_s = rate

    def _bytes(self, layer: int) -> int:
        assert self.state.manifest is not None
        return self.state.manifest.weight_bytes(LayerRange(layer, layer + 1))
