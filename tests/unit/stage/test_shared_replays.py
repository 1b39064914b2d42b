"""Replays of several sequences in one step: from the log, through the layers, and the answer."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.stage import actions as act
from swarm.wire.messages import (
    REPLAY_STEP,
    LayerRange,
    LogRange,
    Replay,
    ReplayDone,
    ReplayMissing,
    Row,
    SequencePosition,
    SequenceRange,
    Step,
    WorkerMessage,
)
from tests.unit.stage.bench import StageBench, opened, step_of


@pytest.fixture
def stage() -> StageBench:
    """The first of two stages."""
    bench = StageBench()
    bench.activate()
    return bench


@pytest.fixture
def last() -> StageBench:
    bench = StageBench(3, 6)
    bench.activate()
    return bench


def told(actions: list[act.Action]) -> list[WorkerMessage]:
    return [action.message for action in actions if isinstance(action, act.SendToBroker)]


ALL, LAST = LayerRange(0, 6), LayerRange(3, 6)


def replay_of(*rows: Row, through: LayerRange = ALL, opens: tuple[int, ...] = ()) -> Step:
    return step_of(REPLAY_STEP, *rows, open=tuple(map(opened, opens)), replay=True, through=through)


def order() -> Replay:
    more = (SequenceRange(2, 0, 5), SequenceRange(9, 0, 4), SequenceRange(3, 2, 3))
    return Replay(epoch=1, sequence=1, boundary=3, start=1, stop=3, through=LAST, more=more)


def test_the_log_of_several_sequences_goes_out_in_one_step(stage: StageBench) -> None:
    """What is missing is named for each sequence; the others do not wait for it."""
    for number, (sequence, count) in enumerate(((1, 3), (2, 5), (3, 3)), 1):
        stage.run(step_of(number, Row(sequence, 0, count, True), open=(opened(sequence),)))
    *others, sent = stage.order(order())
    assert told(others) == [ReplayMissing(epoch=1, incarnation="w0.1", sequence=9, boundary=3, has_from=4)]
    assert isinstance(sent, act.SendStep)
    assert sent.step.rows == (Row(1, 1, 2, False), Row(2, 0, 5, False), Row(3, 2, 1, False))
    assert sent.step.tokens == (11, 12, 10, 11, 12, 13, 14, 12)
    assert [item.sequence for item in sent.step.open] == [2]
    log = stage.core.log
    inputs = [log.read(1, 3, 1, 3), log.read(2, 3, 0, 5), log.read(3, 3, 2, 3)]
    assert sent.hidden is not None
    np.testing.assert_array_equal(sent.hidden, np.concatenate([each for each in inputs if each is not None]))


def test_nothing_is_sent_if_all_is_missing(stage: StageBench) -> None:
    answers = told(stage.order(order()))
    assert [answer.sequence for answer in answers if isinstance(answer, ReplayMissing)] == [1, 2, 9, 3]
    assert len(answers) == 4


def test_one_answer_for_all_sequences_of_a_step(last: StageBench) -> None:
    """All of them can go on in the same step then."""
    (done,) = told(last.run(replay_of(Row(1, 0, 3, False), Row(2, 0, 5, False), opens=(1, 2))))
    assert done == ReplayDone(
        epoch=1, incarnation="w0.1", sequence=1, layers=LayerRange(0, 6), kv=3, more=(SequencePosition(2, 5),)
    )
    assert {s: held.position() for s, held in last.core.sequences.items()} == {1: 3, 2: 5}


def test_a_middle_stage_logs_each_sequence_and_passes_the_step_on(stage: StageBench) -> None:
    (out,) = stage.run(replay_of(Row(1, 0, 3, False), Row(2, 0, 5, False), opens=(1, 2)))[-1:]
    assert isinstance(out, act.SendStep)
    assert out.step.rows == (Row(1, 0, 3, False), Row(2, 0, 5, False))
    assert set(stage.core.log.ranges()) == {LogRange(1, 3, 0, 3), LogRange(2, 3, 0, 5)}
    assert out.hidden is not None
    logged = stage.core.log.read(2, 3, 0, 5)
    assert logged is not None
    np.testing.assert_array_equal(logged, out.hidden[3:])


def _numbered(count: int) -> NDArray[np.float32]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def test_only_what_is_needed_of_a_step_is_computed(last: StageBench) -> None:
    """One was computed before, one is gone, one was released while the step waited: the rest keeps its own inputs."""
    last.run(replay_of(Row(1, 0, 3, False), opens=(1,)))
    last.step(replay_of(Row(5, 0, 3, False), opens=(5,)))  # on the device meanwhile
    waiting = replay_of(
        Row(1, 0, 3, False), Row(4, 3, 2, False), Row(2, 0, 4, False), Row(6, 0, 2, False), opens=(2, 6)
    )
    last.step(waiting, _numbered(11))
    last.core.replays.drop_released([6])
    last.compute()
    assert last.computing is not None
    batch = last.computing.batch
    assert batch.rows == (Row(2, 0, 4, False),)
    assert batch.tokens.tolist() == [10, 11, 12, 13]
    assert batch.hidden is not None
    np.testing.assert_array_equal(batch.hidden, _numbered(11)[5:9])
    (done,) = told(last.compute())
    assert isinstance(done, ReplayDone)
    assert (done.sequence, done.kv, done.more) == (2, 4, ())
    assert last.core.counters["duplicate_replays"] == last.core.counters["late_replays"] == 1


def test_the_others_of_a_step_go_on_if_one_was_released(stage: StageBench) -> None:
    stage.run(step_of(1, Row(8, 0, 3, True), release=(1,), open=(opened(8),)))
    stage.step(replay_of(Row(1, 0, 3, False), Row(2, 0, 5, False), through=LayerRange(0, 3), opens=(1, 2)))
    assert stage.core.counters["stale_replays"] == 1
    assert stage.computing is not None
    assert stage.computing.batch.rows == (Row(2, 0, 5, False),)
    assert set(stage.core.sequences) == {2, 8}


def test_a_step_without_rows_is_nothing(stage: StageBench) -> None:
    assert stage.step(replay_of()) == []
    assert stage.computing is None
