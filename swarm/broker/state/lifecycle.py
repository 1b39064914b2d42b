"""Lifecycle of a sequence: its states, the transitions, and the states in which each operation is allowed.

``Rebuild`` describes layers of a running sequence that lag behind the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.wire.messages import LayerRange


class SequenceState(enum.Enum):
    """Whether a sequence waits for KV blocks, runs, or has ended."""

    WAITING = "waiting"  # holds no KV blocks in the stages: not admitted yet, or preempted
    RUNNING = "running"  # holds KV blocks in the stages
    ENDED = "ended"


TRANSITIONS = {
    SequenceState.WAITING: (SequenceState.RUNNING, SequenceState.ENDED),
    SequenceState.RUNNING: (SequenceState.WAITING, SequenceState.ENDED),
    SequenceState.ENDED: (),
}

# States in which operations that change no state are allowed. Other operations are allowed at any time: clients read
# and the journal writes after the end too, and a worker may die with a step of a sequence that has ended meanwhile.
_WAITING, _RUNNING = (SequenceState.WAITING,), (SequenceState.RUNNING,)
ALLOWED_STATES = {
    **dict.fromkeys(
        ("start_counting_overtakes", "count_overtake", "mark_fitting", "add_unfit_time", "lower_limit"), _WAITING
    ),
    **dict.fromkeys(
        (
            "start",
            "dispatch",
            "acknowledge",
            "drop_kv",
            "drop_unscored",
            "redraw_last",
            "truncate_to",
            "refuse_proposals",
        ),
        _RUNNING,
    ),
    **dict.fromkeys(("recompute_from", "start_rebuild", "finish_rebuild", "start_restore", "finish_restore"), _RUNNING),
    # Steps that were in flight at a preemption still count.
    **dict.fromkeys(
        (
            "append_token",
            "set_vector",
            "add_prompt_logprobs",
            "record_not_finite",
            "expect_stop",
            "truncate_answer",
        ),
        (*_RUNNING, *_WAITING),
    ),
    **dict.fromkeys(("mark_end_sent", "mark_end_written"), (SequenceState.ENDED,)),
}


@dataclass(slots=True)
class Rebuild:
    """Layers of one sequence that lag behind and must be computed from position ``done`` up to ``stop``."""

    # incarnation whose log holds the inputs of ``through``; None: compute from the tokens, starting at layer 0
    source: str | None
    through: LayerRange  # layers to compute: the lagging ones and those between them and the log
    num_lost: int  # number of these layers that really lag
    stop: int
    start: int  # position at which the rebuild began
    done: int  # positions computed so far
    ordered: int = 0  # position up to which computing is ordered
    group: int = 0  # number of the replay step that computes it, with those of other sequences

    @property
    def cost(self) -> int:
        """Layers times positions that are still to be computed."""
        return (self.stop - self.done) * len(self.through)

    @property
    def least(self) -> int:
        """The part of ``cost`` that no other plan could have avoided."""
        return (self.stop - self.done) * self.num_lost
