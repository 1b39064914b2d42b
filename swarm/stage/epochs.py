"""Which epoch is in force at a stage, and whose steps are taken in it.

* *Lineage.* Epochs and numbers are of one life of a broker: the one that welcomed this worker last. Who is welcomed by
  another life begins anew with that one's epochs; if its journal is another one, what is held is nobody's any more.
* *Epochs.* ``fence`` is the highest epoch heard of; what is older is dropped and counted. ``active`` is the epoch in
  force, which an ``Activate`` starts and a higher ``Fence`` ends.
* *Doors* (``Heard``). Where they go by keys, a stage hears the stage before it in the plan in force, and in the plan
  that is prepared (its first steps may come as soon as the others are told to begin); and who was announced for a
  recheck. And it waits for them beside its own door, if one of these plans has them come by relay. A fence ends what
  was in force before it. What is prepared stays, for it is what the fence makes room for. Who is out for good
  (``shun``) is heard by no plan that knew it, nor sent anything from that moment on.
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

MAX_SHUNNED = 64  # keys: no plan that is made later names them
MAX_EXPECTED = 64  # keys: rechecks come one after the other, and one needs no more than one key here


@dataclass(slots=True)
class Heard:
    """``before``, ``relay``: of the plan in force. As long as no order names a key, doors don't go by them: nothing is
    told."""

    before: str | None = None
    relay: str = ""
    expected: dict[str, int] = field(default_factory=dict)  # with the epoch of who said so
    shunned: tuple[str, ...] = ()
    told: Admit | None = None

    def begin(self, plan: Prepare) -> None:
        """A plan is in force."""
        self.before, self.relay = plan.before, plan.relay
        self.fence(plan.epoch)

    def leave(self) -> None:
        """None is any more."""
        self.before, self.relay = None, ""

    def sends_steps(self, key: str) -> bool:
        """May who has shown this key send steps of the plan in force? Others are heard for rechecks, or too early."""
        return not key or key == self.before

    def expect(self, key: str, epoch: int) -> None:
        self.expected.pop(key, None)
        self.expected[key] = epoch
        if len(self.expected) > MAX_EXPECTED:
            del self.expected[next(iter(self.expected))]

    def shun(self, key: str) -> None:
        self.shunned = (*self.shunned, key)[-MAX_SHUNNED:]

    def fence(self, epoch: int) -> None:
        """Who was announced before this epoch has nothing to say in it. (The same fence may come twice.)"""
        self.expected = {key: since for key, since in self.expected.items() if since >= epoch}

    def forget(self) -> None:
        """Another broker's plans begin."""
        self.leave()
        self.expected = {}

    def change(self, prepared: Prepare | None) -> Admit | None:
        """Tell who is heard now, and where, if that is not what was told; ``prepared``: the plan in preparation."""
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
    """Takes the orders that a plan begins and ends with. Appends what is to be done to ``out``. ``after``: the key of
    the door that steps of the epoch in force go to, where doors go by keys."""

    incarnation: str
    preparation: Preparation
    holdings: Holdings
    steps: StepOrder
    turn: Turn
    replays: Replays
    rechecks: Rechecks
    out: list[Action]
    note: Notes
    count: Callable[[str], None]
    lineage: Lineage = NOBODYS
    fence: int = 0
    active: int | None = None
    after: str | None = None
    layers: LayerRange | None = None
    heard: Heard = field(default_factory=Heard)

    def welcome(self, order: Welcome) -> None:
        """A broker takes this worker in: perhaps another life of it."""
        if order.lineage != self.lineage:
            self._begin_anew(order)
        self.fence = max(self.fence, order.epoch)

    def _begin_anew(self, order: Welcome) -> None:
        """Take up the epochs of another life of the broker. Of the same journal, it has compared what is held here
        with its own, and says at the next plan what stays."""
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
            # The broker raises the fence before it asks for a plan only where none is in force any more.
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
        """Nothing comes of a plan that counts on it as a neighbour."""
        if key in (self.heard.before, self.after):
            self._leave()
        self.rechecks.clear()  # one of their ways may lead there
        self.heard.shun(key)
        self.out.append(CutOff(key))

    def tell_door(self) -> None:
        """Told first: who is to be heard may knock as soon as the rest is done."""
        wanted = self.preparation.wanted
        admit = self.heard.change(wanted)
        if admit is not None:
            self.out.insert(0, admit)

    def activate(self, order: Activate, now: float) -> None:
        if order.epoch == self.active and order.epoch == self.fence:  # the broker has not heard that it is
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
