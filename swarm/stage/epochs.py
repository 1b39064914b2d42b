"""The epoch in force at a stage, and the keys whose steps it accepts.

* *Lineage.* Epochs and step numbers belong to one lineage: that of the broker that welcomed this worker last. When a
  broker with another lineage welcomes the worker, the worker adopts its epochs. If the journal is another one, too,
  the stored sequences belong to no broker any more and are dropped.
* *Epochs.* ``fence`` is the highest epoch received; messages with an older one are dropped and counted. ``active`` is
  the epoch in force: ``Activate`` starts it and a higher ``Fence`` ends it.
* *Keys* (``AllowedSenders``). Where listeners check keys, a stage accepts connections from the upstream stage of the
  plan in force, from the upstream stage of the plan in preparation (whose first steps may arrive as soon as the other
  stages are activated), and from workers announced for a recheck. If one of these plans uses a relay, the stage also
  accepts connections through the relay. A fence ends the plan in force before it. The plan in preparation stays,
  because it is the one that the fence makes way for. A blocked key (``BlockKey``) is not accepted by any plan that
  names it, and nothing is sent to it from that moment on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.stage.actions import Action, AllowSenders, DisconnectKey, OpenEdge, SendToBroker, UseLayers
from swarm.stage.kv_exchange import KvExchange
from swarm.stage.membership import LogWriter
from swarm.stage.pending_plan import PendingPlan
from swarm.stage.recheck import RecheckQueue
from swarm.stage.replay import ReplayQueue
from swarm.stage.sequences import SequenceStore
from swarm.stage.step_order import StepOrder, StepRunner
from swarm.wire.messages import (
    NO_LINEAGE,
    Activate,
    Activated,
    AllowKey,
    BlockKey,
    Fence,
    GetDigest,
    KeepWarm,
    LayerRange,
    Lineage,
    Order,
    Prepare,
    ReceiveKv,
    Recheck,
    Replay,
    RestoreKv,
    SendKv,
    SpillKv,
    Unassign,
    Welcome,
    layers_of,
)
from swarm.wire.transport.keys import address_and_key, public_key_in

MAX_BLOCKED = 64  # keys; later plans do not name them
MAX_RECHECK_KEYS = 64  # keys; rechecks run one after the other, and each needs at most one key here


@dataclass(slots=True)
class AllowedSenders:
    """Keys whose connections and steps are accepted.

    As long as no order names a key, listeners do not check keys, and nothing is published.
    """

    upstream_key: str | None = None  # key of the upstream stage in the plan in force
    relay: str = ""  # relay of the plan in force; empty: none
    # keys announced for rechecks, each with the epoch of its order
    recheck_keys: dict[str, int] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()  # blocked keys, the latest last
    published: AllowSenders | None = None  # the action published last

    def activate_plan(self, plan: Prepare) -> None:
        """Accept the upstream stage of a plan that is now in force."""
        self.upstream_key, self.relay = plan.before, plan.relay
        self.drop_before(plan.epoch)

    def deactivate_plan(self) -> None:
        """Stop accepting the upstream stage: no plan is in force any more."""
        self.upstream_key, self.relay = None, ""

    def may_send_steps(self, key: str) -> bool:
        """Return whether the sender with this key may send steps of the plan in force.

        That is the plan's upstream stage, or any sender (an empty key) where listeners check no keys. Other accepted
        keys send rechecks, or steps of a plan that is not in force yet.
        """
        return not key or key == self.upstream_key

    def allow(self, key: str, epoch: int) -> None:
        self.recheck_keys.pop(key, None)
        self.recheck_keys[key] = epoch
        if len(self.recheck_keys) > MAX_RECHECK_KEYS:
            del self.recheck_keys[next(iter(self.recheck_keys))]

    def block(self, key: str) -> None:
        self.blocked = (*self.blocked, key)[-MAX_BLOCKED:]

    def drop_before(self, epoch: int) -> None:
        """Drop the recheck keys announced before this epoch. (The same fence may arrive twice.)"""
        self.recheck_keys = {key: since for key, since in self.recheck_keys.items() if since >= epoch}

    def reset(self) -> None:
        """Drop all keys of plans: another broker's plans begin."""
        self.deactivate_plan()
        self.recheck_keys = {}

    def build_update(self, prepared: Prepare | None) -> AllowSenders | None:
        """Return an action that publishes the accepted keys and the relay, or None if they have not changed.

        ``prepared`` is the plan in preparation.
        """
        upstream_key, relay = (None, "") if prepared is None else (prepared.before, prepared.relay)
        named = (upstream_key, self.upstream_key, *self.recheck_keys)
        keys = frozenset(key for key in named if key is not None and key not in self.blocked)
        update = AllowSenders(keys, relay or self.relay)
        if update == (self.published or AllowSenders(frozenset())):
            return None
        self.published = update
        return update


@dataclass(slots=True)
class EpochManager:
    """Epoch in force, and the plan that belongs to it.

    Handles the orders that begin and end a plan, and appends actions to ``actions``.
    """

    incarnation: str
    pending_plan: PendingPlan
    store: SequenceStore
    steps: StepOrder
    runner: StepRunner
    replays: ReplayQueue
    rechecks: RecheckQueue
    exchange: KvExchange
    actions: list[Action]  # output list, shared with the core
    write_log: LogWriter
    count: Callable[[str], None]
    lineage: Lineage = NO_LINEAGE  # of the broker that welcomed this worker last
    fence: int = 0  # highest epoch received
    active: int | None = None  # epoch in force; None: none
    # key of the listener to which the steps of the epoch in force go, where listeners check keys
    downstream_key: str | None = None
    layers: LayerRange | None = None  # layers of the last active plan
    allowed: AllowedSenders = field(default_factory=AllowedSenders)

    def on_welcome(self, order: Welcome) -> None:
        """Adopt the epoch of the broker that welcomes this worker, and its lineage if it is another one."""
        if order.lineage != self.lineage:
            self._switch_lineage(order)
        self.exchange.on_welcome()
        self.fence = max(self.fence, order.epoch)

    def _switch_lineage(self, order: Welcome) -> None:
        """Adopt another lineage and its epochs.

        If the journal is the same, the broker has compared the stored sequences with its own and states with the next
        plan which ones stay. If it is another journal, they are dropped.
        """
        self._deactivate()
        self.allowed.reset()
        self.pending_plan.forget_plans()
        if order.lineage.journal != self.lineage.journal and self.store.sequences:
            self.write_log(
                "holdings_dropped", "warning", sequences=len(self.store.sequences), reason="another journal's"
            )
            self.store.clear()
        self.store.drop_unverified()
        self.exchange.on_lineage_switched()
        self.lineage, self.fence = order.lineage, order.epoch

    def handle_order(self, order: Order, now: float) -> bool:
        """Handle an order of the current lineage; return False if it is none that a stage follows."""
        match order:
            case Prepare():
                self.prepare(order)
            case KeepWarm():
                self.actions.extend(self.pending_plan.load_standby(order))
            case AllowKey() | BlockKey():
                self.update_allowed(order)
            case Fence(epoch=epoch):
                self.raise_fence(epoch)
            case Activate():
                self.activate(order, now)
            case Unassign(epoch=epoch):
                self.unassign(epoch, now)
            case Replay():
                self._replay(order)
            case Recheck() | GetDigest():
                self._recheck(order)
            case SendKv() | ReceiveKv() | SpillKv() | RestoreKv():
                if not self.exchange.follow(order, self.active, self.layers, now):
                    self.count("stale_orders")
            case _:
                return False
        return True

    def _replay(self, order: Replay) -> None:
        if order.epoch != self.active or self.layers is None:
            self.count("stale_orders")
        else:
            self.actions.extend(self.replays.send_logged(order, self.layers))

    def _recheck(self, order: Recheck | GetDigest) -> None:
        if order.epoch < self.fence:
            self.count("stale_orders")
        else:
            self.actions.extend(self.rechecks.handle_order(order))

    def prepare(self, order: Prepare) -> None:
        if order.epoch < self.fence or self.pending_plan.has_newer_than(order.epoch):
            self.count("stale_orders")
        else:
            # Where a plan is still in force, the broker asks for the next one before it raises the fence: a higher
            # epoch here means that another plan serves meanwhile.
            self.actions.extend(self.pending_plan.prepare(order, in_background=order.epoch > self.fence))

    def raise_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            self.count("stale_orders")
            return
        self.fence = epoch
        self.allowed.drop_before(epoch)
        self.exchange.on_fence(epoch)
        if self.active is not None and self.active < epoch:
            self._deactivate()

    def update_allowed(self, order: AllowKey | BlockKey) -> None:
        if isinstance(order, BlockKey):
            self._block_key(order.key)
        elif order.epoch < self.fence:
            self.count("stale_orders")
        else:
            self.allowed.allow(order.key, order.epoch)

    def _block_key(self, key: str) -> None:
        """Block a key. A plan in which it is a neighbour has failed."""
        if key in (self.allowed.upstream_key, self.downstream_key):
            self._deactivate()
        self.rechecks.clear()  # a recheck's route may lead to the blocked worker
        self.allowed.block(key)
        self.exchange.block_key(key, self.allowed.blocked)
        self.actions.append(DisconnectKey(key))

    def publish_allowed(self) -> None:
        """Publish the accepted keys if they have changed.

        The action goes to the front of the list: a newly accepted peer may connect as soon as the other actions are
        done.
        """
        prepared = self.pending_plan.wanted
        admit = self.allowed.build_update(prepared)
        if admit is not None:
            self.actions.insert(0, admit)

    def activate(self, order: Activate, now: float) -> None:
        # a repeated order: the broker has not received our answer
        if order.epoch == self.active and order.epoch == self.fence:
            self._report_activated(order.epoch)
            return
        prepared = None if order.epoch < self.fence else self.pending_plan.take_ready(order.epoch, self.layers)
        if prepared is None:
            self.count("stale_orders")
            return
        self._deactivate()
        self.fence = self.active = order.epoch
        self.allowed.activate_plan(prepared)
        self.steps.start_epoch(order.first_step)
        self.runner.idle_since = now
        before, self.layers = self.layers, prepared.layers
        self.exchange.on_fence(order.epoch)
        self.store.keep_only(order.live)  # before the layers, which take memory for the positions in use
        self.actions.append(UseLayers(prepared.layers, self.pending_plan.standby, order.share_unit))
        # of layers that were the stage's own, nothing is kept as a copy
        kept = layers_of(self.pending_plan.standby) - layers_of(() if before is None else (before,))
        self.store.adopt_layers(order.live, prepared.layers, kept)
        self.store.prefixes.start_plan(order.shared, prepared.layers)
        self.exchange.on_activated()
        self.actions.append(OpenEdge(order.epoch, prepared.edge))
        self.downstream_key = public_key_in(address_and_key(prepared.edge.endpoint)[1])
        self.write_log(
            "plan_activated", epoch=order.epoch, layers=str(prepared.layers), sequences=len(self.store.sequences)
        )
        self._report_activated(order.epoch)

    def share_prefixes(self) -> None:
        """Share the prefixes of the plan in force that can be shared by now."""
        if self.active is not None and self.layers is not None:
            self.store.prefixes.apply_all(self.layers)

    def _report_activated(self, epoch: int) -> None:
        activated = Activated(
            epoch=epoch,
            incarnation=self.incarnation,
            held=self.store.inventory(),
            logs=tuple(self.store.log.ranges()),
            kept=self.pending_plan.standby,
            copies=self.store.copies.inventory(),
        )
        self.actions.append(SendToBroker(activated))

    def unassign(self, epoch: int, now: float) -> None:
        if epoch < self.fence:
            self.count("stale_orders")
            return
        self.fence = epoch
        self.allowed.drop_before(epoch)
        self._deactivate()
        self.store.clear(keeps_unopened=True)
        self.exchange.on_unassigned(epoch, now)

    def _deactivate(self) -> None:
        self.active = self.downstream_key = None
        self.allowed.deactivate_plan()
        self.steps.clear()
        self.replays.clear()
        self.rechecks.clear()
        self.exchange.on_deactivated()
