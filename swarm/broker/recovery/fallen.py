"""The plan that fell: how its sequences go on soonest, and who holds them until then."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.proposals import Wanted, come_back
from swarm.broker.planner.recover import Replays
from swarm.broker.state import Plan, State
from swarm.broker.state.recoveries import Predicted


@dataclass(slots=True)
class Fallen:
    """Reads ``state.book.fallen``. ``chunk``: positions that are replayed at a time."""

    state: State
    wanted: Wanted
    chunk: int

    def holders(self, coming: Plan | None) -> tuple[str, ...]:
        """Whom a broker that starts again should wait for: until the plan to come serves, the sequences are with the
        members of the one in force, or with those that are left of the one that fell."""
        before = self.state.book.current or self.state.book.fallen
        members = set() if before is None else before.members
        left = [w.name for w in self.state.workers.values() if w.incarnation in members and not w.is_gone]
        named = () if coming is None else (stage.name for stage in coming.stages)
        return tuple(dict.fromkeys([*named, *left]))

    def way_back(self) -> Proposal | None:
        """If a plan fell while requests were under way: how they go on soonest."""
        fallen = self.state.book.fallen
        if fallen is None or not (self.state.running or len(self.state.waiting)):
            return None
        replays = Replays.of((sequence.kv for sequence in self.state.running), self.chunk)
        return come_back(self.state, self.wanted.rules, fallen, replays)

    def note_way_back(self, found: Proposal, epoch: int, now: float) -> None:
        """For the record of the recovery: which way was taken, and how long it should take."""
        back = found.back
        choice = "a plan from scratch" if back is None else back.choice
        predicted = None if back is None else Predicted(back.load_s, back.replay_s, back.is_warm)
        self.state.recoveries.planned(epoch, choice, predicted, now)
