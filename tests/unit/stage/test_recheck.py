"""Computing again for a comparison: apart from all that is held, when there is time, and with the same result."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.events import Idle, RecheckComputed, RecheckFailed, StepArrived
from swarm.stage.recheck import CHUNK, compute_digest
from swarm.testing import fake_continuation, fake_manifest
from swarm.wire.messages import (
    Edge,
    Fence,
    GetDigest,
    LayerRange,
    LogDigest,
    Open,
    Recheck,
    Rechecked,
    RecheckHop,
    RecheckRoute,
    Row,
    Step,
)
from tests.unit.stage.bench import NUM_LAYERS, StageBench, hidden_of, opened, step_of

MakeStage = Callable[..., StageBench]

PROMPT = [1 + i % 90 for i in range(70)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8)
TOKENS = (*PROMPT, *fake_continuation(PROMPT, PARAMS, 5, fake_manifest(NUM_LAYERS))[:6])
OPEN = Open(7, PARAMS, 5, len(PROMPT), 100, TOKENS)
STOP = len(TOKENS) - 1


def leg(name: str, first: int, stop: int) -> RecheckHop:
    return RecheckHop(Edge(f"{name}.1", f"tcp://{name}"), LayerRange(first, stop))


def recheck(boundary: int, *legs: RecheckHop, drawn: int = 0) -> Recheck:
    return Recheck(epoch=1, boundary=boundary, stop=STOP, open=OPEN, trial=RecheckRoute(9, legs, drawn))


def told(actions: list[act.Action]) -> list[Rechecked | LogDigest]:
    return [
        a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, Rechecked | LogDigest)
    ]


def chunks(stage: StageBench) -> list[act.Action]:
    """Leisure until there is nothing left to compute; what comes out, and how long the chunks were."""
    out: list[act.Action] = []
    while stage.core.has_idle_work:
        (action,) = stage.feed(Idle())
        assert isinstance(action, act.ComputeRecheck)
        assert len(action.batch.tokens) <= CHUNK
        forwarded = stage.executor.recheck(action.batch, action.limit, lambda: False, lambda: None)
        out += stage.feed(RecheckComputed(action.ticket, forwarded))
    return out


def aside(actions: list[act.Action]) -> act.SendRecheck:
    (found,) = [a for a in actions if isinstance(a, act.SendRecheck)]
    return found


@pytest.fixture
def first(make_stage: MakeStage) -> StageBench:
    """Layers 0–2; it has computed the sequence."""
    stage = make_stage()
    stage.activate()
    stage.run(step_of(1, Row(7, 0, STOP, False), open=(OPEN,), tokens=TOKENS[:STOP]))
    return stage


def test_the_same_comes_out(first: StageBench, make_stage: MakeStage) -> None:
    """Whoever has the layers gets, from the tokens and in chunks, the very bits that the stage's log holds."""
    checker = make_stage(3, 6)
    checker.activate()
    checker.executor.kept = frozenset(range(3))
    assert checker.order(recheck(0, leg("w1", 0, 3))) == []
    (found,) = told(chunks(checker))
    (expected,) = told(first.order(GetDigest(epoch=1, ticket=9, sequence=7, boundary=3, stop=STOP)))
    assert isinstance(found, Rechecked)
    assert isinstance(expected, LogDigest)
    assert found.digest == expected.digest != ""
    assert checker.core.sequences == {}
    assert checker.executor.chains == {}
    assert list(checker.core.log.ranges()) == []
    assert checker.core.counters["rechecked_positions"] == STOP


def test_a_part_each(first: StageBench, make_stage: MakeStage) -> None:
    """From the log of the stage before, through two workers that have a part of the layers each, to the tokens that
    the last stage must have drawn."""
    one, two = make_stage(0, 3), make_stage(0, 3)
    for checker, kept in ((one, range(3, 5)), (two, range(5, 6))):
        checker.activate()
        checker.executor.kept = frozenset(kept)
    sent = aside(first.order(recheck(3, leg("w1", 3, 5), leg("w2", 5, 6), drawn=5)))
    assert sent.edge == Edge("w1.1", "tcp://w1")
    one.feed(StepArrived(sent.step, sent.hidden, 7))
    passed = aside(chunks(one))
    assert passed.edge == Edge("w2.1", "tcp://w2")
    two.feed(StepArrived(passed.step, passed.hidden, 7))
    (found,) = told(chunks(two))
    assert isinstance(found, Rechecked)
    assert found.tokens == TOKENS[STOP - 4 :]


def test_a_worker_without_a_part_in_the_plan_can_do_it(make_stage: MakeStage, first: StageBench) -> None:
    """A spare has the layers, but no epoch is active there."""
    spare = make_stage(3, 6)
    spare.order(Fence(epoch=1))
    spare.executor.kept = frozenset(range(3, 6))
    sent = aside(first.order(recheck(3, leg("w1", 3, 6), drawn=2)))
    spare.feed(StepArrived(sent.step, sent.hidden, 7))
    (found,) = told(chunks(spare))
    assert isinstance(found, Rechecked)
    assert found.tokens == TOKENS[STOP - 1 :]


def test_steps_go_first(make_stage: MakeStage) -> None:
    """Nothing is computed again before there is time, and never two chunks in a row without asking."""
    stage = make_stage()
    stage.activate()
    stage.order(recheck(0, leg("w0", 0, 3)))
    assert stage.core.has_idle_work
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert stage.feed(Idle()) == []  # a step is on the device
    stage.compute()
    (chunk,) = stage.feed(Idle())
    assert isinstance(chunk, act.ComputeRecheck)
    forwarded = stage.executor.recheck(chunk.batch, chunk.limit, lambda: False, lambda: None)
    assert not stage.core.has_idle_work
    assert stage.feed(RecheckComputed(9, forwarded)) == []
    assert [type(a) for a in stage.step(step_of(2, Row(1, 3, 1, True)))] == [act.Compute]


def test_what_can_not_be_done_is_said(make_stage: MakeStage, first: StageBench) -> None:
    """A log that has gone, layers that are not here, inputs that can't be right, too many at once."""
    other = msgspec.structs.replace(recheck(3, leg("w1", 3, 6)), open=msgspec.structs.replace(OPEN, sequence=8))
    assert "has gone" in told(first.order(other))[0].problem  # type: ignore[union-attr]
    assert told(first.order(GetDigest(epoch=1, ticket=9, sequence=8, boundary=3, stop=2)))[0].digest == ""  # type: ignore[union-attr]
    checker = make_stage(0, 3)
    checker.activate()
    trial = RecheckRoute(9, (leg("w1", 3, 6),))
    step = Step(epoch=1, step=0, rows=(Row(7, 0, 2, False),), tokens=(1, 2), open=(OPEN,), trial=trial)
    for hidden, says in ((None, "can't begin with that"), (hidden_of(2, float("nan")), "not finite")):
        (answer,) = told(checker.feed(StepArrived(step, hidden, 7)))
        assert isinstance(answer, Rechecked)
        assert says in answer.problem
    for _ in range(2):
        assert checker.feed(StepArrived(step, hidden_of(2), 7)) == []
    assert "no time" in told(checker.feed(StepArrived(step, hidden_of(2), 7)))[0].problem  # type: ignore[union-attr]
    checker.feed(Idle())
    (answer,) = told(checker.feed(RecheckFailed(9, "IllegalMove: layers 3–5 are not loaded here")))
    assert isinstance(answer, Rechecked)
    assert "not loaded here" in answer.problem


def test_a_fence_ends_it(make_stage: MakeStage) -> None:
    """What was asked for in an older epoch is forgotten, also while a chunk of it is on the device."""
    stage = make_stage()
    stage.activate()
    stage.order(recheck(0, leg("w0", 0, 3)))
    (chunk,) = stage.feed(Idle())
    assert isinstance(chunk, act.ComputeRecheck)
    stage.order(Fence(epoch=2))
    assert not stage.core.has_idle_work
    assert stage.feed(RecheckFailed(9, "Fenced: ")) == []
    stage.order(recheck(0, leg("w0", 0, 3)))
    assert stage.core.counters["stale_orders"] == 1
    assert not stage.core.has_idle_work


def test_a_digest_knows_every_bit() -> None:
    """Zeros of two signs are equal, and not the same."""
    assert compute_digest(hidden_of(2, 0.0)) != compute_digest(hidden_of(2, -0.0))
    assert compute_digest(hidden_of(2)) == compute_digest(hidden_of(2))
