"""Numbers that can't be true and messages that were damaged: refused where they arrive, never used, and told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swarm.stage import actions as act
from swarm.stage.events import StepRefused
from swarm.wire.messages import DataPathError, Hop, LayerRange, NotFinite, Replay, ReplayMissing, Row, SequencePosition
from swarm.wire.tensors import find_not_finite
from tests.unit.stage.bench import StageBench, hidden_of, opened, step_of

MakeStage = Callable[..., StageBench]

BEFORE = (Hop("w9", LayerRange(0, 3), 0.0, 0.1, 0.0, 0.0, 3),)


def told(actions: list[act.Action]) -> list[DataPathError]:
    return [a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "minus inf"])
def test_hidden_states_that_are_not_finite_are_refused(last: StageBench, bad: float) -> None:
    """One such number among all rows: nothing of the step is computed or held, and the broker hears who sent it, out of
    which layers, in which sequence and from which position on; the other row's sequence is not named."""
    last.step(step_of(1, Row(1, 0, 3, True), Row(2, 0, 4, True), open=(opened(1), opened(2)), hops=BEFORE))
    last.compute()
    hidden = hidden_of(4)
    hidden[2, 1] = bad
    (trouble,) = told(last.step(step_of(2, Row(1, 3, 1, True), Row(2, 4, 3, True), hops=BEFORE), hidden))
    assert trouble.not_finite == NotFinite("w9", LayerRange(0, 3), (SequencePosition(2, 5),))
    assert not trouble.damaged
    assert "sequence 2 from position 5 on, from w9, layers 0–2" in trouble.reason
    assert last.computing is None
    assert last.core.sequences[2].position() == 4
    assert last.core.counters["not_finite_refused"] == 1
    # The bench goes on when the same step comes with numbers.
    last.step(step_of(2, Row(1, 3, 1, True), Row(2, 4, 3, True), hops=BEFORE))
    assert last.computing is not None


def test_large_and_tiny_numbers_pass(last: StageBench) -> None:
    """The largest float32, the smallest, and zeros of both signs are numbers like others."""
    hidden = np.array([[3.4e38, -3.4e38], [1e-45, -1e-45], [0.0, -0.0]], np.float32)
    assert told(last.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),), hops=BEFORE), hidden)) == []
    assert last.computing is not None


def test_every_sequence_concerned_is_named() -> None:
    """Each with the first position that is not finite, in the order of the rows; the others not at all."""
    step = step_of(1, Row(1, 0, 2, False), Row(2, 7, 3, True), Row(3, 5, 1, True))
    hidden = hidden_of(6)
    hidden[1, 0] = hidden[5, 1] = np.nan
    assert find_not_finite(step, hidden) == (SequencePosition(1, 1), SequencePosition(3, 5))
    assert find_not_finite(step, hidden_of(6)) == ()
    assert find_not_finite(step, None) == ()


def test_a_replay_is_checked_like_a_step(last: StageBench) -> None:
    """What comes from a log is no better than what was computed: the log's holder is named."""
    step = step_of(0, Row(1, 0, 3, False), replay=True, through=LayerRange(3, 6), open=(opened(1),), hops=BEFORE)
    (trouble,) = told(last.step(step, hidden_of(3, np.nan)))
    assert trouble.not_finite == NotFinite("w9", LayerRange(0, 3), (SequencePosition(1, 0),))
    assert last.computing is None
    assert not last.core.replays.waiting


def test_a_log_that_is_not_finite_serves_nobody(stage: StageBench) -> None:
    """What a replay put out was logged unseen. Its holder says that the log is missing, instead of using it."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.core.log.append(1, 3, 1, hidden_of(2, np.nan))
    order = Replay(epoch=1, sequence=1, boundary=3, start=0, stop=3, through=LayerRange(3, 6))
    (missing,) = [a.message for a in stage.order(order) if isinstance(a, act.SendToBroker)]
    assert isinstance(missing, ReplayMissing)
    assert stage.core.log.read(1, 3, 0, 1) is None


def test_who_sends_a_replay_stands_in_it(stage: StageBench, make_stage: MakeStage) -> None:
    """The log's holder names itself, and so does every stage that passes a chunk on."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    order = Replay(epoch=1, sequence=1, boundary=3, start=0, stop=3, through=LayerRange(3, 6))
    (sent,) = [a for a in stage.order(order) if isinstance(a, act.SendStep)]
    assert [(hop.worker, hop.layers) for hop in sent.step.hops] == [("w0", LayerRange(0, 3))]
    middle = make_stage(3, 5)
    middle.activate()
    middle.step(sent.step, sent.hidden)
    (passed,) = [a for a in middle.compute() if isinstance(a, act.SendStep)]
    assert [hop.layers for hop in passed.step.hops] == [LayerRange(0, 3), LayerRange(3, 5)]


def test_hidden_states_from_nobody_accuse_nobody(last: StageBench) -> None:
    """A step with hidden states comes from a stage, and names it. One that doesn't is some stranger's."""
    (trouble,) = told(last.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)), hidden_of(3, np.nan)))
    assert trouble.not_finite is None
    assert trouble.damaged
    assert last.computing is None


def test_what_is_not_finite_of_an_older_epoch_is_just_old(last: StageBench) -> None:
    """The fence comes first: nobody is accused of what counts no more."""
    last.activate(epoch=2)
    assert told(last.step(step_of(1, Row(1, 0, 3, True), epoch=1, hops=BEFORE), hidden_of(3, np.nan))) == []
    assert last.core.counters["stale_steps"] == 1


def test_a_damaged_message_is_told_at_once(stage: StageBench) -> None:
    """It may have been the only step in flight: the broker hears of it without waiting for a gap, with the reason, and
    that it is nobody's fault. The stage goes on."""
    (trouble,) = told(stage.feed(StepRefused("step: the checksum does not fit the 64 bytes that came")))
    assert trouble.damaged
    assert trouble.epoch == 1
    assert trouble.reason.endswith("the checksum does not fit the 64 bytes that came")
    assert stage.core.counters["refused_frames"] == 1
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert stage.computing is not None


def test_a_damaged_message_between_plans_is_only_counted(make_stage: MakeStage) -> None:
    """A stage that is in no plan waits for no step: nobody needs to hear of it."""
    stage = make_stage()
    assert stage.feed(StepRefused("garbage")) == []
    assert stage.core.counters["refused_frames"] == 1
