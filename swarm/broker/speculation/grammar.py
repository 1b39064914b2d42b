"""Grammar: tokens that are certain to follow, because a request's grammar leaves only one text.

The last stage finds them after a draw, and returns them with the step's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from swarm.broker.speculation.proposer import ProposerName
    from swarm.broker.state import Sequence


class _Forced(NamedTuple):
    """Forced tokens, and the position of the first one."""

    position: int
    tokens: tuple[int, ...]


class GrammarProposer:
    """Proposes the tokens that the last stage has returned as forced, or what is left of them after a step that had
    another proposal, or only their beginning."""

    name: ProposerName = "grammar"

    def __init__(self) -> None:
        self._forced: dict[int, _Forced] = {}  # by sequence

    def store(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Keep the tokens that are certain to follow the sequence's newest token."""
        self._forced[sequence.id] = _Forced(sequence.sampled, tokens)

    def has_tokens(self, sequence: Sequence) -> bool:
        """Whether forced tokens follow the sequence's newest one."""
        return bool(self.propose(sequence, 1))

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return the forced tokens that follow the sequence's newest token. They are dropped when the sequence has gone
        on otherwise: it was cut, or its grammar has changed."""
        forced = self._forced.get(sequence.id)
        if forced is None:
            return ()
        num_drawn = sequence.sampled - forced.position
        if 0 <= num_drawn < len(forced.tokens):
            drawn = tuple(sequence.tokens[forced.position :])
            if drawn == forced.tokens[:num_drawn]:
                return forced.tokens[num_drawn : num_drawn + most]
        del self._forced[sequence.id]
        return ()

    def forget(self, sequence: int) -> None:
        """Drop the sequence's forced tokens."""
        self._forced.pop(sequence, None)
