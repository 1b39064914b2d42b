"""Proposer of the simulation: it proposes the tokens of an undisturbed run, or others.

The fake model's tokens follow no pattern, so that the proposers of the product would find nothing. This one computes
what an undisturbed run draws, also beyond its end, and spoils it as the schedule demands.
"""

from __future__ import annotations

from random import Random

import msgspec

from swarm.broker.speculation.proposer import ProposerName
from swarm.broker.state import Sequence
from swarm.sim.schedules.schedule import Guess, SpeculationConditions
from swarm.testing import fake_continuation
from swarm.wire.messages import MAX_PROPOSED, Manifest

BEYOND = 8  # tokens of an undisturbed run behind its end
FOREIGN = (0, 1, 1 << 20)  # how far a token lies outside of the vocabulary


class SimProposer:
    """Proposer whose guesses are as right as the schedule demands."""

    def __init__(self, conditions: SpeculationConditions, manifest: Manifest, chance: Random) -> None:
        self._conditions = conditions
        self._manifest = manifest
        self._chance = chance
        self._answers: dict[tuple[str, int], list[int]] = {}  # tokens of undisturbed runs, by request and index

    @property
    def name(self) -> ProposerName:
        return "suffix"

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return tokens, right or not; perhaps more than ``most``, and of any value."""
        answer = self._answer(sequence)
        right = answer[sequence.num_generated : sequence.num_generated + MAX_PROPOSED]
        guess: Guess = self._chance.choice(self._conditions.guesses)
        if guess == "too_long":
            return tuple(right + [self._chance.randrange(self._manifest.vocab_size) for _ in range(2 * MAX_PROPOSED)])
        tokens = right[: self._chance.randint(1, max(1, most))]
        match guess:
            case "nothing":
                return ()
            case "wrong":
                return tuple(map(self._other, tokens))
            case "partly":
                first_wrong = self._chance.randrange(max(1, len(tokens)))
                return (*tokens[:first_wrong], *map(self._other, tokens[first_wrong:]))
            case "foreign":
                place = self._chance.randrange(max(1, len(tokens)))
                outside = self._manifest.vocab_size + self._chance.choice(FOREIGN)
                return (*tokens[:place], outside, *tokens[place:])
            case _:
                return tuple(tokens)

    def forget(self, sequence: int) -> None:
        """Keep everything: the same sequence may run again."""

    def _other(self, token: int) -> int:
        """Return another token of the vocabulary."""
        return (token + self._chance.randint(1, self._manifest.vocab_size - 1)) % self._manifest.vocab_size

    def _answer(self, sequence: Sequence) -> list[int]:
        key = sequence.request.id, sequence.index
        answer = self._answers.get(key)
        if answer is None:
            params = sequence.request.submit.params
            longer = msgspec.structs.replace(
                params, max_tokens=params.max_tokens + BEYOND, ignore_eos=True, stop_token_ids=()
            )
            answer = fake_continuation(sequence.request.submit.prompt, longer, sequence.seed, self._manifest)
            self._answers[key] = answer
        return answer
