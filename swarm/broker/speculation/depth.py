"""Depth of speculation: how many tokens to propose for each sequence of a step.

A proposed token is worth the probability that it is accepted, which takes that all before it are. It costs the time
that one more position adds to the step. The control chooses the tokens for which the step yields the most tokens per
second: it takes them by falling probability as long as the expected rate of the whole step grows. Where positions cost
nothing, as on a slow link, it takes all; where a step is full, it takes nearly certain tokens only. Proposals of the
grammar and of a draft model are made whole: the former are certain, and the latter end where the next token is not
worth the draft model's time.

*Probabilities* are moving averages by proposer and strength, an integer that separates a proposer's certain guesses
from doubtful ones. Each accepted token raises the strength of the next one, as it lengthens the match. A sequence
begins with the averages of all and moves to its own.

*Loss* is bounded where nothing can be guessed. A sequence for which no proposal pays rests: it is only looked up every
few steps, and only rarely a short probe shows whether it can be guessed now; after each probe that fails, the next one
comes later. The times that are compared stay fresh, because a step without proposals is measured now and then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from swarm.broker.speculation.step_times import StepTimes
from swarm.wire.messages import MAX_PROPOSED

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from swarm.broker.speculation.proposer import Proposal

WHOLE: Final = ("grammar", "draft")  # proposers that limit their proposals themselves
PROBE_TOKENS: Final = 2
MIN_PROBE_STEPS: Final = 32  # steps without a proposal before the first probe
MAX_PROBE_STEPS: Final = 512  # before later ones, each twice as late as the one before
MIN_STEPS_BETWEEN_PROBES: Final = 8  # of all sequences together
IDLE_LOOKUPS: Final = 8  # lookups without a proposal that pays, after which a sequence is looked up more rarely
IDLE_LOOKUP_EVERY: Final = 4  # steps
MEASURE_EVERY: Final = 128  # steps in which one without proposals is measured
NUM_STRENGTHS: Final = 12  # strengths are 0 to 11; larger ones count as 11
MIN_GAIN: Final = 1.02  # expected gain of a step's rate for which proposals are made at all
MIN_TIME_S: Final = 1e-6  # of a step
_MIN_PROBABILITY: Final = 0.01  # of being reached and accepted; less is never worth a position
_MAX_PROBABILITY: Final = 0.995
_FIRST_OUTCOMES: Final = 4.0  # outcomes as which the first estimate counts
_SHARED_MEMORY: Final = 64.0  # outcomes that the averages of all sequences remember
_MEMORY: Final = 16.0  # outcomes that a sequence's own average remembers
_PRIOR: Final = 4.0  # outcomes as which the average of all sequences counts in a sequence's own
_FIRST: Final[dict[str, float]] = {"suffix": 0.5, "draft": 0.6, "grammar": 0.98}  # probability before any outcome


class Offer(NamedTuple):
    """A proposal that could be made for a sequence."""

    sequence: int
    proposal: Proposal


@dataclass(slots=True)
class _Average:
    """Accepted tokens among the outcomes, old ones fading away. ``outcomes`` may be a sum of expected values, too."""

    accepted: float = 0.0
    outcomes: float = 0.0

    def record(self, *, accepted: bool, expected: float = 1.0) -> None:
        keep = 1 - 1 / _MEMORY
        self.outcomes = keep * self.outcomes + expected
        self.accepted = keep * self.accepted + accepted

    def estimate(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.outcomes + _PRIOR)


class _Shared:
    """Probabilities of a proposer's tokens by strength, over all sequences."""

    def __init__(self, proposer: str) -> None:
        self.values = [_first_estimate(proposer, strength) for strength in range(NUM_STRENGTHS)]
        self._outcomes = [_FIRST_OUTCOMES] * NUM_STRENGTHS

    def record(self, strength: int, *, accepted: bool) -> None:
        self._outcomes[strength] = min(_SHARED_MEMORY, self._outcomes[strength] + 1)
        self.values[strength] += (accepted - self.values[strength]) / self._outcomes[strength]


@dataclass(slots=True)
class _Control:
    """Acceptance and rest of one sequence."""

    averages: dict[tuple[str, int], _Average] = field(default_factory=dict)  # by proposer and strength
    usual: _Average = field(default_factory=_Average)  # accepted tokens against those of all sequences on average
    rested: int = 0  # steps since its last proposal
    probe_after: int = MIN_PROBE_STEPS  # steps without a proposal after which the next probe is due
    num_idle: int = 0  # lookups in a row that led to no proposal
    strength: int = 0  # of the proposal in flight


class DepthControl:
    """Chooses how many tokens are proposed (see the module)."""

    def __init__(self, times: StepTimes | None = None) -> None:
        self._times = times or StepTimes()
        self._epoch = 0  # of the plan whose step times are measured
        self._sequences: dict[int, _Control] = {}
        self._shared_averages: dict[str, _Shared] = {}
        self._since_probe = 0  # steps

    def wants(self, sequence: int) -> bool:
        """Whether proposals should be looked up for a sequence in this step."""
        control = self._get(sequence)
        control.rested += 1
        return control.num_idle < IDLE_LOOKUPS or control.rested % IDLE_LOOKUP_EVERY == 0

    def expected(self, offer: Offer) -> float:
        """Return the expected number of accepted tokens of a proposal, if all of it is made."""
        return sum(self._probabilities(offer))

    def choose(self, offers: Many[Offer], num_decodes: int, num_positions: int) -> dict[int, int]:
        """Return how many tokens to propose, by sequence; sequences without proposals are left out.

        ``num_decodes``: sequences of the step that get a token without any proposal. ``num_positions``: positions of
        the step without proposals. At most one offer per sequence.
        """
        self._since_probe += 1
        whole = [offer for offer in offers if offer.proposal.proposer in WHOLE]
        depths = {offer.sequence: len(offer.proposal.tokens) for offer in whole}
        for offer in whole:
            self._get(offer.sequence).strength = min(offer.proposal.strength, NUM_STRENGTHS - 1)
        others = [offer for offer in offers if offer.proposal.proposer not in WHOLE]
        if not others:
            return depths
        num_positions += sum(depths.values())
        age = self._times.age(num_positions)
        if age is None or age >= MEASURE_EVERY:
            return depths
        expected = num_decodes + sum(map(self.expected, whole))
        best = self._best(others, expected, num_positions)
        for offer in others:
            control = self._get(offer.sequence)
            depth = best.get(offer.sequence, 0)
            if depth:
                control.num_idle = 0
            elif control.rested >= control.probe_after and self._since_probe >= MIN_STEPS_BETWEEN_PROBES:
                depth = min(PROBE_TOKENS, len(offer.proposal.tokens))
                self._since_probe = 0
                control.probe_after = min(MAX_PROBE_STEPS, 2 * control.probe_after)
            else:
                control.num_idle += 1
                continue
            depths[offer.sequence] = depth
            control.rested = 0
            control.strength = min(offer.proposal.strength, NUM_STRENGTHS - 1)
        return depths

    def record_step(self, epoch: int, positions: int, seconds: float) -> None:
        """Record the time of a completed step."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._times.clear()
        self._times.record(positions, seconds)

    def record(self, sequence: int, proposer: str, num_proposed: int, num_accepted: int) -> None:
        """Record how many tokens of a proposal were accepted."""
        control = self._sequences.get(sequence)
        if control is None or num_proposed <= 0:
            return
        if num_accepted:
            control.probe_after = MIN_PROBE_STEPS
        shared = self._shared(proposer)
        for index in range(min(num_accepted + 1, num_proposed)):
            at = _LATER[control.strength][index]
            accepted = index < num_accepted
            control.usual.record(accepted=accepted, expected=shared.values[at])
            shared.record(at, accepted=accepted)
            control.averages.setdefault((proposer, at), _Average()).record(accepted=accepted)

    def forget(self, sequence: int) -> None:
        """Drop what is known about a sequence."""
        self._sequences.pop(sequence, None)

    def _get(self, sequence: int) -> _Control:
        control = self._sequences.get(sequence)
        if control is None:
            control = self._sequences[sequence] = _Control()
        return control

    def _best(self, offers: Many[Offer], expected: float, num_positions: int) -> dict[int, int]:
        """Return the numbers of tokens with the highest expected rate; sequences with none are left out. ``expected``:
        tokens of the step without these proposals."""
        tokens = [(value, offer.sequence) for offer in offers for value in self._probabilities(offer)]
        tokens.sort(key=itemgetter(0), reverse=True)
        times = self._times.estimates(num_positions)
        best_rate, num_best = MIN_GAIN * expected / max(next(times), MIN_TIME_S), 0
        for number, ((value, _), seconds) in enumerate(zip(tokens, times, strict=False), 1):
            expected += value
            if expected > best_rate * seconds:
                best_rate, num_best = expected / max(seconds, MIN_TIME_S), number
        return Counter(sequence for _, sequence in tokens[:num_best])

    def _probabilities(self, offer: Offer) -> list[float]:
        """Return for each token of a proposal the probability that it is accepted, up to the first that is hardly ever
        reached."""
        proposer, strength = offer.proposal.proposer, min(offer.proposal.strength, NUM_STRENGTHS - 1)
        control, shared = self._get(offer.sequence), self._shared(proposer).values
        averages, factor = control.averages, control.usual.estimate(1.0)
        values: list[float] = []
        reached, value, before = 1.0, 0.0, -1
        for at in islice(_LATER[strength], len(offer.proposal.tokens)):
            if at != before:
                own, before = averages.get((proposer, at)), at
                value = min(_MAX_PROBABILITY, factor * shared[at])
                value = value if own is None else own.estimate(value)
            reached *= value
            if reached < _MIN_PROBABILITY:
                break
            values.append(reached)
        return values

    def _shared(self, proposer: str) -> _Shared:
        shared = self._shared_averages.get(proposer)
        if shared is None:
            shared = self._shared_averages[proposer] = _Shared(proposer)
        return shared


def _first_estimate(proposer: str, strength: int) -> float:
    """Return the assumed probability before any outcome. A match that is twice as long fails 0.6 times as often."""
    failure = (1 - _FIRST[proposer]) * 0.6 ** max(0, (strength + 2) // 2 - 2)
    return (1 - failure) * (0.8 if strength and strength % 2 == 0 else 1.0)


def _strengths_after(strength: int) -> tuple[int, ...]:
    """Return the strength of each token of a proposal: every accepted token lengthens the match by one."""
    length = 1 << (strength + 2) // 2 - 1
    later = [2 * (length + index).bit_length() - 1 for index in range(1, MAX_PROPOSED)]
    return (strength, *(min(NUM_STRENGTHS - 1, at) for at in later))


_LATER: Final = tuple(_strengths_after(strength) for strength in range(NUM_STRENGTHS))
