"""Whose steps a stage takes, where doors go by keys: the stage before it in the plan in force, and in the plan that is
prepared (its first steps may come as soon as the others are told to begin); and who was announced for a recheck. And
where it waits for them beside its own door, if one of these plans has them come by relay.

A fence ends what was in force before it. What is prepared stays, for it is what the fence makes room for. Who is out
for good (``shun``) is heard by no plan that knew it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.stage.actions import Admit
from swarm.wire.messages import Prepare

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
        """All who are heard now, and where, if that is not what was told; ``prepared``: the plan in preparation."""
        before, relay = (None, "") if prepared is None else (prepared.before, prepared.relay)
        named = (before, self.before, *self.expected)
        keys = frozenset(key for key in named if key is not None and key not in self.shunned)
        heard = Admit(keys, relay or self.relay)
        if heard == (self.told or Admit(frozenset())):
            return None
        self.told = heard
        return heard
