"""Lies of a last stage about proposals: it reports more than it accepted.

A lie about the drawn token itself is not among them, since no message can refute it; only a recheck can.
"""

from __future__ import annotations

from random import Random

import msgspec

from swarm.sim.schedules.schedule import Misreport, SpeculationConditions
from swarm.wire.messages import ForcedTokens, Sampled, SequencePosition, Step, StepDone

MAX_STEPS = 64  # steps with proposals that are remembered until their end; more are never in flight


class Misreporter:
    """Last stage's reports of steps with proposals, true or not. ``num_told``: false ones so far."""

    def __init__(self, conditions: SpeculationConditions | None, vocab_size: int, chance: Random) -> None:
        self._conditions = conditions
        self._vocab_size = vocab_size
        self._chance = chance
        self._steps: dict[tuple[int, int], Step] = {}  # steps with proposals, by epoch and number
        self.num_told = 0

    def heal(self) -> None:
        """Report the truth from now on."""
        self._conditions = None
        self._steps.clear()

    def on_step(self, step: Step) -> None:
        """Remember a step with proposals."""
        if step.proposed and self._conditions is not None and self._conditions.misreports:
            self._steps[step.epoch, step.step] = step
            if len(self._steps) > MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def report(self, done: StepDone) -> StepDone:
        """Return what the last stage reports instead."""
        step = self._steps.pop((done.epoch, done.step), None)
        conditions = self._conditions
        if step is None or conditions is None or self._chance.random() >= conditions.misreported_share:
            return done
        self.num_told += 1
        return self._falsify(done, step, self._chance.choice(conditions.misreports))

    def _falsify(self, done: StepDone, step: Step, misreport: Misreport) -> StepDone:
        match misreport:
            case "accepts":
                sampled = tuple(item for part in done.sampled for item in self._accept_more(part, done, step))
                return msgspec.structs.replace(done, sampled=sampled)
            case "counts":
                return msgspec.structs.replace(done, kv=_everything(step))
            case "repeats":
                return msgspec.structs.replace(done, sampled=tuple(item for item in done.sampled for _ in range(2)))
            case "forces":
                forced = tuple(ForcedTokens(tail.sequence, self._random_tokens(5)) for tail in step.proposed or ())
                return msgspec.structs.replace(done, forced=forced)

    def _accept_more(self, item: Sampled, done: StepDone, step: Step) -> tuple[Sampled, ...]:
        """Return a token, and behind the last one of a row all further proposals, or others."""
        row = next(row for row in step.rows if row.sequence == item.sequence)
        positions = [other.position for other in done.sampled if other.sequence == item.sequence]
        if item.position < max(positions):
            return (item,)
        more = range(item.position + 1, row.start + row.count + 1)
        return (item, *(Sampled(item.sequence, at, self._random_tokens(1)[0], item.logprobs) for at in more))

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(self._vocab_size) for _ in range(count))


def _everything(step: Step) -> tuple[SequencePosition, ...]:
    """Return the ends of all rows, with refused proposals."""
    return tuple(SequencePosition(row.sequence, row.start + row.count) for row in step.rows)
