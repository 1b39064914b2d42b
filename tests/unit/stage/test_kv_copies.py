"""Copies of keys and values: what a stage sends, accepts, drops and takes over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.stage import actions as act
from swarm.wire.messages import (
    Activated,
    HeldSequence,
    LayerRange,
    RangePosition,
    Row,
)
from tests.unit.stage.bench import StageBench, opened, step_of
from tests.unit.stage.kv_bench import LAYERS, KvPipe, activate, held_by, keep_warm, tick

MakeStage = Callable[..., StageBench]


@pytest.fixture
def pipe(make_stage: MakeStage) -> KvPipe:
    """The first stage of two, and the second, which keeps the first one's layers warm and is to hold copies."""
    sender, receiver = make_stage(0, 3), make_stage(3, 6)
    activate(sender)
    activate(receiver)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver)
    pipe.order()
    return pipe


def run_both(pipe: KvPipe, number: int, start: int, count: int, sequence: int = 1, **fields: object) -> None:
    """A step goes through both stages."""
    step = step_of(number, Row(sequence, start, count, False), **fields)
    out = pipe.sender.run(step)
    (sent,) = [a for a in out if isinstance(a, act.SendStep)]
    pipe.receiver.step(step, sent.hidden)
    pipe.receiver.compute()


def copied(stage: StageBench, sequence: int = 1) -> dict[int, int]:
    copy = stage.core.store.copies.sequences.get(sequence)
    return {} if copy is None else copy.positions


def test_finished_blocks_are_copied_and_taken_over(pipe: KvPipe) -> None:
    """The survivor begins where the copies end, and computes what the lost worker would have."""
    run_both(pipe, 1, 0, 70, open=(opened(1, limit=128),))
    pipe.copy_all()
    assert copied(pipe.receiver) == {0: 64, 1: 64, 2: 64}
    assert pipe.receiver.executor.read_kv(1, LAYERS, 0, 64).numbers.tobytes() == (
        pipe.sender.executor.read_kv(1, LAYERS, 0, 64).numbers.tobytes()
    )
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert report.held == (HeldSequence(1, (RangePosition(LAYERS, 64),)),)
    assert report.num_bytes == 3 * 64 * 8

    pipe.receiver.first = 0
    (told,) = [
        a.message
        for a in activate(pipe.receiver, 2, s1=70)
        if isinstance(a, act.SendToBroker) and isinstance(a.message, Activated)
    ]
    assert told.held == (HeldSequence(1, (RangePosition(LAYERS, 64), RangePosition(LayerRange(3, 6), 70))),)
    assert told.copies == ()
