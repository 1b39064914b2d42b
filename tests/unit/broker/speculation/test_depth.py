"""Tests of ``broker.speculation.depth``: a simulation of steps whose times and acceptance are known."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from swarm.broker.speculation.depth import DepthControl, Offer
from swarm.broker.speculation.proposer import Proposal
from swarm.broker.speculation.step_times import StepTimes
from swarm.wire.messages import MAX_PROPOSED

# Milliseconds of a step by its positions, as measured on 2 cores of an Intel Xeon with AMX (27 November 2026, quiet
# machine): the embedded demo model with the 0.9 ms that the broker and the sockets add, and a llama of 200 million
# parameters. ``LINEAR`` is a machine on which every position costs as much as the first; ``LINK`` a slow link.
VILLAGE = ((1, 1.4), (8, 1.5), (16, 1.7), (32, 2.1), (64, 2.8), (128, 4.1), (256, 6.7), (1024, 20.0), (2048, 38.0))
LLAMA = (
    (1, 15.0),
    (8, 15.6),
    (16, 16.2),
    (32, 20.0),
    (64, 23.0),
    (128, 33.0),
    (256, 56.0),
    (1024, 200.0),
    (2048, 380.0),
)
LINEAR = ((1, 10.0), (2048, 20480.0))
LINK = ((1, 40.0), (2048, 42.0))
CURVES = {"village": VILLAGE, "llama": LLAMA, "linear": LINEAR, "link": LINK}


def step_s(curve: tuple[tuple[int, float], ...], positions: int) -> float:
    for (below, seconds), (above, more) in itertools.pairwise(curve):
        if positions <= above:
            return (seconds + (more - seconds) * (positions - below) / (above - below)) / 1000
    raise AssertionError(positions)


@dataclass
class Outcome:
    """Tokens and seconds of a simulated run."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    depths: list[int] | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulation:
    """Steps of ``num`` sequences for which proposals of ``offered`` tokens are always at hand."""

    def __init__(
        self, curve: str, num: int = 1, seed: int = 0, noise: float = 0.05, offered: int = MAX_PROPOSED
    ) -> None:
        self.curve, self.num, self.offered, self.noise = CURVES[curve], num, offered, noise
        self.times = StepTimes()
        self.control = DepthControl(self.times)
        self.chance = random.Random(seed)
        self.times.record(100, step_s(self.curve, 100))  # the prompt

    def run(self, acceptance: float, num_steps: int, strength: int | None = None) -> Outcome:
        """Run steps in which each proposed token is accepted with this probability, if those before it are."""
        outcome = Outcome(depths=[])
        for _ in range(num_steps):
            strengths = {s: self.chance.randrange(12) if strength is None else strength for s in range(self.num)}
            wanted = [sequence for sequence in range(self.num) if self.control.wants(sequence)]
            offers = [Offer(s, Proposal("suffix", tuple(range(self.offered)), strengths[s])) for s in wanted]
            depths = self.control.choose(offers, self.num, self.num)
            positions = self.num + sum(depths.values())
            seconds = step_s(self.curve, positions) * self.chance.uniform(1 - self.noise, 1 + self.noise)
            for sequence, depth in depths.items():
                accepted = 0
                while accepted < depth and self.chance.random() < acceptance:
                    accepted += 1
                self.control.record(sequence, "suffix", depth, accepted)
                outcome.tokens += accepted
                outcome.proposed += depth
                outcome.accepted += accepted
            self.times.record(positions, seconds)
            outcome.tokens += self.num
            outcome.seconds += seconds
            outcome.steps += 1
            assert outcome.depths is not None
            outcome.depths.append(sum(depths.values()))
        return outcome


def best_rate(curve: str, num: int, acceptance: float, offered: int = MAX_PROPOSED) -> float:
    """Return the tokens per second of the best fixed depth."""
    rates = []
    for depth in range(offered + 1):
        expected = sum(acceptance**index for index in range(depth + 1))
        rates.append(num * expected / step_s(CURVES[curve], num * (1 + depth)))
    return max(rates)


@pytest.mark.parametrize("num", [1, 4, 16])
@pytest.mark.parametrize("curve", CURVES)
def test_text_that_cannot_be_guessed_costs_at_most_three_percent(curve: str, num: int) -> None:
    outcome = Simulation(curve, num).run(0.0, 600)
    assert outcome.rate >= 0.97 * best_rate(curve, num, 0.0)


@pytest.mark.parametrize("num", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("curve", CURVES)
def test_the_depth_is_nearly_the_best_one(curve: str, acceptance: float, num: int) -> None:
    simulation = Simulation(curve, num)
    simulation.run(acceptance, 100)
    assert simulation.run(acceptance, 600).rate >= 0.93 * best_rate(curve, num, acceptance)


def test_a_jump_behind_sixteen_rows_is_not_smeared() -> None:
    """Kernels compute 16 rows together: the 17th costs as much as another 16."""
    times = StepTimes()
    for positions in (15, 16, 17, 18, 19, 20, 32, 33, 36):
        times.record(positions, 0.01 * -(-positions // 16))
    assert list(itertools.islice(times.estimates(16), 2)) == [pytest.approx(0.01), pytest.approx(0.02, rel=0.2)]
    assert list(itertools.islice(times.estimates(32), 2)) == [pytest.approx(0.02), pytest.approx(0.03, rel=0.3)]
