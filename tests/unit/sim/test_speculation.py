"""Proposals in the simulation: they come in half of all schedules, right and wrong; a last stage lies about them; and
what breaks a rule about them is noticed."""

from __future__ import annotations

from random import Random

import msgspec

from swarm.broker.state import Request, Sequence
from swarm.params import SamplingParams
from swarm.sim.actors.guesses import SimProposer
from swarm.sim.actors.misreports import Misreporter
from swarm.sim.schedules.schedule import Guess, Misreport, SpeculationConditions
from swarm.sim.schedules.variations import GUESSES, MISREPORTS, make_full_schedule
from swarm.testing import fake_continuation, fake_manifest
from swarm.wire.messages import MAX_PROPOSED, ProposedTail, Row, Sampled, SequencePosition, Step, StepDone, Submit

MANIFEST = fake_manifest()
PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
ANSWER = fake_continuation(PROMPT, PARAMS, 3, MANIFEST)


def sequence(num_generated: int = 0) -> Sequence:
    request = Request(Submit(request_id="r", prompt=PROMPT, params=PARAMS, seed=3), None, 0.0, None)
    return Sequence(1, request, 0, 3, [*PROMPT, *ANSWER[:num_generated]], 200)


def proposals(guess: Guess, num_generated: int = 0, most: int = 8, count: int = 40) -> list[tuple[int, ...]]:
    proposer = SimProposer(SpeculationConditions((guess,)), MANIFEST, Random(1))
    return [proposer.propose(sequence(num_generated), most) for _ in range(count)]


def test_right_proposals_are_the_undisturbed_answer() -> None:
    for tokens in proposals("right", num_generated=4):
        assert tokens
        assert list(tokens) == ANSWER[4 : 4 + len(tokens)]


def test_right_proposals_go_on_behind_the_end() -> None:
    """So that the last stage also verifies tokens that no client gets."""
    assert max(map(len, proposals("right", num_generated=38))) > 2


def test_wrong_proposals_have_no_right_token() -> None:
    for tokens in proposals("wrong"):
        assert tokens
        assert all(token != right for token, right in zip(tokens, ANSWER, strict=False))


def test_partly_right_proposals_are_wrong_from_some_token_on() -> None:
    accepted = set()
    for tokens in proposals("partly"):
        equal = [token == right for token, right in zip(tokens, ANSWER, strict=False)]
        assert equal == sorted(equal, reverse=True)
        assert not equal[-1]
        accepted.add(sum(equal))
    assert len(accepted) > 3


def test_foreign_and_too_long_proposals_break_the_interface() -> None:
    assert all(any(token >= MANIFEST.vocab_size for token in tokens) for tokens in proposals("foreign"))
    assert all(len(tokens) > MAX_PROPOSED for tokens in proposals("too_long"))
    assert set(proposals("nothing")) == {()}


STEP = Step(
    epoch=1,
    step=9,
    rows=(Row(1, 20, 4, True), Row(2, 7, 1, True)),
    tokens=(1, 2, 3, 4, 5),
    proposed=(ProposedTail(1, 3),),
)
DONE = StepDone(
    epoch=1,
    step=9,
    kv=(SequencePosition(1, 22), SequencePosition(2, 8)),
    sampled=(Sampled(1, 21, 2, ()), Sampled(1, 22, 11, ()), Sampled(2, 8, 12, ())),
    failed=(),
    hops=(),
)


def misreported(kind: Misreport, share: float = 1.0) -> StepDone:
    reporter = Misreporter(SpeculationConditions(("right",), (kind,), share), 97, Random(1))
    reporter.on_step(STEP)
    return reporter.report(DONE)


def test_a_last_stage_accepts_behind_a_refusal() -> None:
    done = misreported("accepts")
    assert done.sampled[:2] == DONE.sampled[:2]
    assert [(item.sequence, item.position) for item in done.sampled[2:]] == [(1, 23), (1, 24), (2, 8)]
    assert done.kv == DONE.kv


def test_a_last_stage_counts_refused_positions() -> None:
    assert misreported("counts").kv == (SequencePosition(1, 24), SequencePosition(2, 8))


def test_a_last_stage_repeats_and_forces_tokens() -> None:
    assert len(misreported("repeats").sampled) == 6
    forced = misreported("forces").forced
    assert forced is not msgspec.UNSET
    assert [item.sequence for item in forced] == [1]


def test_steps_without_proposals_are_reported_truly() -> None:
    reporter = Misreporter(SpeculationConditions(("right",), ("repeats",), 1.0), 97, Random(1))
    reporter.on_step(msgspec.structs.replace(STEP, proposed=msgspec.UNSET))
    assert reporter.report(DONE) is DONE
    assert misreported("repeats", share=0.0) is DONE


def test_half_of_all_schedules_propose_tokens() -> None:
    conditions = [make_full_schedule(seed).speculation for seed in range(200)]
    speculating = [item for item in conditions if item is not None]
    assert 70 < len(speculating) < 130
    assert {item.guesses for item in speculating} == set(GUESSES)
    assert {kind for item in speculating for kind in item.misreports} == set(MISREPORTS)
    assert not any(
        item.misreports for item in (make_full_schedule(s, faults=False).speculation for s in range(99)) if item
    )
