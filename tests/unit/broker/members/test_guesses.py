"""Failures of steps with proposed tokens: a guess is no fault of the request, nor of the worker."""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass

import pytest

from swarm.broker.members.blame import GUILTY_AFTER
from swarm.broker.speculation.proposer import ProposerName
from swarm.broker.state import Sequence
from swarm.wire.messages import DataPathError, NotFinite, SequencePosition, Step, StepFailure
from tests.unit.broker.bench import Bench, ranges, row, submit

ANSWER = list(range(40, 60))


@dataclass
class Oracle:
    """Proposes these tokens by position in the answer."""

    script: TokenSequence[int]
    name: ProposerName = "suffix"

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return tuple(self.script[sequence.num_generated :][: min(3, most)])

    def forget(self, sequence: int) -> None:
        pass


@pytest.fixture
def decoding(make_bench) -> Bench:
    """Two workers; the first step of the answer, with three proposals, is in flight."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(2)
    bench.say(submit("r", max_tokens=20))
    bench.verify({1: ANSWER})
    assert row(bench.pipe[0]) == [(1, 3, 4)]
    return bench


def fail(bench: Bench, step: Step) -> None:
    """The step raises at the first worker."""
    rows = tuple(SequencePosition(r.sequence, r.start + r.count) for r in step.rows)
    failed = StepFailure(ranges(bench)["w0"], rows, is_memory=False)
    report(bench, "w0", failed=failed)


def report(bench: Bench, name: str, **fields: object) -> None:
    worker = bench.workers[name]
    bench.tell(
        name,
        DataPathError(epoch=bench.epoch, incarnation=worker.incarnation, reason="boom", **fields),  # type: ignore[arg-type]
    )
    for _ in range(20):
        if bench.pipe:
            return
        bench.tick()
    raise AssertionError("it never goes on")


def test_a_step_that_failed_is_repeated_without_proposals(decoding: Bench) -> None:
    fail(decoding, decoding.pipe[0])
    assert row(decoding.pipe[0]) == [(1, 3, 1)]
    assert decoding.state.evidence.failures_of_request("r") == []
    decoding.verify({1: ANSWER})
    assert row(decoding.pipe[0]) == [(1, 4, 1)]
    assert not decoding.state.evidence.suspects


def test_a_request_that_fails_without_proposals_too_is_to_blame(decoding: Bench) -> None:
    """Then the failure with proposals counts as well."""
    fail(decoding, decoding.pipe[0])
    fail(decoding, decoding.pipe[0])
    assert len(decoding.state.evidence.failures_of_request("r")) == 2 < GUILTY_AFTER


def test_hidden_states_of_a_guess_that_are_not_finite_cost_nobody_anything(decoding: Bench) -> None:
    """The position is that of the first proposal."""
    problem = NotFinite("w0", ranges(decoding)["w0"], (SequencePosition(1, 4),))
    report(decoding, "w1", not_finite=problem)
    assert sorted(ranges(decoding)) == ["w0", "w1"]
    assert row(decoding.pipe[0]) == [(1, 3, 1)]
    assert decoding.sequence().not_finite == []


def test_hidden_states_of_a_known_token_that_are_not_finite_count_without_guesses(decoding: Bench) -> None:
    """A row with proposals is no evidence: they may have spoiled all of it."""
    problem = NotFinite("w0", ranges(decoding)["w0"], (SequencePosition(1, 3),))
    report(decoding, "w1", not_finite=problem)
    assert sorted(ranges(decoding)) == ["w0", "w1"]
    assert row(decoding.pipe[0]) == [(1, 3, 1)]
    assert decoding.sequence().not_finite == []
    report(decoding, "w1", not_finite=problem)
    assert decoding.sequence().not_finite == ["w0"]


def test_nothing_is_proposed_after_the_second_death(make_bench) -> None:
    """The third would quarantine the request."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(4)
    bench.say(submit("r", max_tokens=20))
    bench.verify({1: ANSWER})
    counts = []
    for _ in range(2):
        counts.append(bench.pipe[0].rows[0].count)
        bench.lose(next(iter(ranges(bench))))
        while not bench.pipe:
            bench.tick()
    assert counts == [4, 4]
    assert row(bench.pipe[0]) == [(1, 3, 1)]
