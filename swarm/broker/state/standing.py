"""How a sequence can stand: its states, which may follow which, which of its verbs belong in each; and which layers of
one that runs may lag behind the others."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.wire.messages import LayerRange


class SequenceState(enum.Enum):
    WAITING = "waiting"  # no room in the stages yet, or none any more
    RUNNING = "running"  # holds room in the stages
    ENDED = "ended"


MOVES = {
    SequenceState.WAITING: (SequenceState.RUNNING, SequenceState.ENDED),
    SequenceState.RUNNING: (SequenceState.WAITING, SequenceState.ENDED),
    SequenceState.ENDED: (),
}

# Where verbs that move nothing belong. Others may be used at any time: clients read, and the journal writes, after the
# end too; and a worker may die with a step of a sequence that has ended meanwhile.
_WAITING, _RUNNING = (SequenceState.WAITING,), (SequenceState.RUNNING,)
VERBS = {
    **dict.fromkeys(("be_first_to_wait", "be_passed", "fit", "not_fit", "bound"), _WAITING),
    **dict.fromkeys(("start", "dispatch", "acknowledge", "drop_kv", "draw_again", "cut_to"), _RUNNING),
    **dict.fromkeys(("compute_from", "lag", "level"), _RUNNING),
    # What was under way when it gave its room back still counts.
    **dict.fromkeys(("grow", "be_not_finite", "expect_stop", "cut_answer"), (*_RUNNING, *_WAITING)),
    **dict.fromkeys(("tell_end", "end_is_written"), (SequenceState.ENDED,)),
}


@dataclass(slots=True)
class Rebuild:
    """Layers of one sequence that lag behind: to be brought from ``done`` to ``stop`` positions.

    ``source`` has the log of what ``through`` begins with; None: the tokens, at layer 0. ``num_lost`` of these layers
    really lag, the others lie between them and the log.
    """

    source: str | None
    through: LayerRange
    num_lost: int
    stop: int
    start: int
    done: int

    @property
    def cost(self) -> int:
        """Layers times positions to be computed."""
        return (self.stop - self.done) * len(self.through)
