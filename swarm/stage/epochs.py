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

from swarm.stage.actions import Action, Admit, CutOff, OpenEdge, Tell, UseLayers
from swarm.stage.membership import Notes
from swarm.stage.order import StepOrder, Turn
from swarm.stage.preparation import Preparation
from swarm.stage.recheck import Rechecks
from swarm.stage.replay import Replays
from swarm.stage.sequences import Holdings
from swarm.wire.door.keys import address_and_key, public_key_in
from swarm.wire.messages import NOBODYS, Activate, Activated, Expect, LayerRange, Lineage, Prepare, Shun, Welcome

MAX_SHUNNED = 64  # keys; later plans do not name them
MAX_EXPECTED = 64  # keys; rechecks run one after the other, and each needs at most one key here


@dataclass(slots=True)
class Heard:
    """Keys whose connections and steps are accepted.

    As long as no order names a key, listeners do not check keys, and nothing is published.
    """

    before: str | None = None  # key of the upstream stage in the plan in force
    relay: str = ""  # relay of the plan in force; empty: none
    # keys announced for rechecks, each with the epoch of its order
    expected: dict[str, int] = field(default_factory=dict)
    shunned: tuple[str, ...] = ()  # blocked keys, the latest last
    told: Admit | None = None  # the action published last

    def begin(self, plan: Prepare) -> None:
        """Accept the upstream stage of a plan that is now in force."""
        self.before, self.relay = plan.before, plan.relay
        self.fence(plan.epoch)

    def leave(self) -> None:
        """Stop accepting the upstream stage: no plan is in force any more."""
        self.before, self.relay = None, ""

    def sends_steps(self, key: str) -> bool:
        """Return whether the sender with this key may send steps of the plan in force.

        That is the plan's upstream stage, or any sender (an empty key) where listeners check no keys. Other accepted
        keys send rechecks, or steps of a plan that is not in force yet.
        """
        return not key or key == self.before

    def expect(self, key: str, epoch: int) -> None:
        self.expected.pop(key, None)
        self.expected[key] = epoch
        if len(self.expected) > MAX_EXPECTED:
            del self.expected[next(iter(self.expected))]

    def shun(self, key: str) -> None:
        self.shunned = (*self.shunned, key)[-MAX_SHUNNED:]

    def fence(self, epoch: int) -> None:
        """Drop the recheck keys announced before this epoch. (The same fence may arrive twice.)"""
        self.expected = {key: since for key, since in self.expected.items() if since >= epoch}

    def forget(self) -> None:
        """Drop all keys of plans: another broker's plans begin."""
        self.leave()
        self.expected = {}

    def change(self, prepared: Prepare | None) -> Admit | None:
        """Return an action that publishes the accepted keys and the relay, or None if they have not changed.

        ``prepared`` is the plan in preparation.
        """
        before, relay = (None, "") if prepared is None else (prepared.before, prepared.relay)
        named = (before, self.before, *self.expected)
        keys = frozenset(key for key in named if key is not None and key not in self.shunned)
        heard = Admit(keys, relay or self.relay)
        if heard == (self.told or Admit(frozenset())):
            return None
        self.told = heard
        return heard


@dataclass(slots=True)
class Epochs:
    """Epoch in force, and the plan that belongs to it.

    Handles the orders that begin and end a plan, and appends actions to ``actions``.
    """

    incarnation: str
    preparation: Preparation
    holdings: Holdings
    steps: StepOrder
    turn: Turn
    replays: Replays
    rechecks: Rechecks
    out: list[Action]  # output list, shared with the core
    note: Notes
    count: Callable[[str], None]
    lineage: Lineage = NOBODYS  # of the broker that welcomed this worker last
    fence: int = 0  # highest epoch received
    active: int | None = None  # epoch in force; None: none
    # key of the listener to which the steps of the epoch in force go, where listeners check keys
    after: str | None = None
    layers: LayerRange | None = None  # layers of the last active plan
    heard: Heard = field(default_factory=Heard)

    def welcome(self, order: Welcome) -> None:
        """Adopt the epoch of the broker that welcomes this worker, and its lineage if it is another one."""
        if order.lineage != self.lineage:
            self._begin_anew(order)
        self.fence = max(self.fence, order.epoch)

    def _begin_anew(self, order: Welcome) -> None:
        """Adopt another lineage and its epochs.

        If the journal is the same, the broker has compared the stored sequences with its own and states with the next
        plan which ones stay. If it is another journal, they are dropped.
        """
        self._leave()
        self.heard.forget()
        self.preparation.forget_plans()
        if order.lineage.journal != self.lineage.journal and self.holdings.sequences:
            self.note("holdings_dropped", "warning", sequences=len(self.holdings.sequences), reason="another journal's")
            self.holdings.clear()
        self.lineage, self.fence = order.lineage, order.epoch

    def prepare(self, order: Prepare) -> None:
        if order.epoch < self.fence or self.preparation.is_newer_than(order.epoch):
            self.count("stale_orders")
        else:
            # Where a plan is still in force, the broker asks for the next one before it raises the fence: a higher
            # epoch here means that another plan serves meanwhile.
            self.out.extend(self.preparation.want(order, gently=order.epoch > self.fence))

    def raise_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            self.count("stale_orders")
            return
        self.fence = epoch
        self.heard.fence(epoch)
        if self.active is not None and self.active < epoch:
            self._leave()

    def whom_to_hear(self, order: Expect | Shun) -> None:
        if isinstance(order, Shun):
            self._shun(order.key)
        elif order.epoch < self.fence:
            self.count("stale_orders")
        else:
            self.heard.expect(order.key, order.epoch)

    def _shun(self, key: str) -> None:
        """Block a key. A plan in which it is a neighbour has failed."""
        if key in (self.heard.before, self.after):
            self._leave()
        self.rechecks.clear()  # a recheck's route may lead to the blocked worker
        self.heard.shun(key)
        self.out.append(CutOff(key))

    def tell_door(self) -> None:
        """Publish the accepted keys if they have changed.

        The action goes to the front of the list: a newly accepted peer may connect as soon as the other actions are
        done.
        """
        wanted = self.preparation.wanted
        admit = self.heard.change(wanted)
        if admit is not None:
            self.out.insert(0, admit)

    def activate(self, order: Activate, now: float) -> None:
        # a repeated order: the broker has not received our answer
        if order.epoch == self.active and order.epoch == self.fence:
            self._tell_activated(order.epoch)
            return
        prepared = None if order.epoch < self.fence else self.preparation.take(order.epoch, self.layers)
        if prepared is None:
            self.count("stale_orders")
            return
        self._leave()
        self.fence = self.active = order.epoch
        self.heard.begin(prepared)
        self.steps.begin(order.first_step)
        self.turn.idle_since = now
        self.layers = prepared.layers
        self.out.append(UseLayers(prepared.layers, self.preparation.kept))
        self.holdings.keep_only(order.live, prepared.layers)
        self.out.append(OpenEdge(order.epoch, prepared.edge))
        self.after = public_key_in(address_and_key(prepared.edge.endpoint)[1])
        self.note(
            "plan_activated", epoch=order.epoch, layers=str(prepared.layers), sequences=len(self.holdings.sequences)
        )
        self._tell_activated(order.epoch)

    def _tell_activated(self, epoch: int) -> None:
        activated = Activated(
            epoch=epoch,
            incarnation=self.incarnation,
            held=self.holdings.inventory(),
            logs=tuple(self.holdings.log.ranges()),
            kept=self.preparation.kept,
        )
        self.out.append(Tell(activated))

    def dismiss(self, epoch: int) -> None:
        if epoch < self.fence:
            self.count("stale_orders")
            return
        self.fence = epoch
        self.heard.fence(epoch)
        self._leave()
        self.holdings.clear()

    def _leave(self) -> None:
        self.active = self.after = None
        self.heard.leave()
        self.steps.clear()
        self.replays.clear()
        self.rechecks.clear()
