"""What a stage does when a step raises: it drops what it can spare, tells the broker, and tests its device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.stage import actions as act
from swarm.stage.events import BrokerConnected, DeviceTested, KvOverfull, StageTick, StandbyLoaded
from swarm.stage.executor import Batch, SampleJob, is_device_lost, is_out_of_memory
from swarm.stage.faults import MAX_FAILED_TESTS, TEST_RETRY_S
from swarm.stage.membership import HELLO_RETRY_S
from swarm.stage.shell.pieces import PIECE_POSITIONS, forward_in_pieces, split_batch
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire.messages import (
    DataPathError,
    KeepWarm,
    KeptWarm,
    LayerRange,
    Rejoin,
    Replay,
    Row,
    SelfTested,
    SequencePosition,
    StepFailure,
)
from tests.unit.stage.bench import StageBench, opened, step_of

BOOM = "RuntimeError: device-side assert triggered"
FULL = "OutOfMemoryError: CUDA out of memory"
FIRST = LayerRange(0, 3)


def begin(stage: StageBench) -> None:
    """A step with two rows is under way."""
    stage.step(step_of(1, Row(1, 0, 3, True), Row(2, 0, 2, True), open=(opened(1), opened(2))))


def told(actions: list[act.Action], kind: type) -> list[object]:
    return [a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, kind)]


# --- what the broker is told -----------------------------------------------------------------------------------------


def test_the_broker_is_told_which_layers_and_rows_failed(stage: StageBench) -> None:
    begin(stage)
    (trouble,) = told(stage.fail(BOOM), DataPathError)
    assert isinstance(trouble, DataPathError)
    assert (trouble.epoch, trouble.damaged, trouble.not_finite) == (1, False, None)
    rows = (SequencePosition(1, 3), SequencePosition(2, 2))
    assert trouble.failed == StepFailure(FIRST, rows, is_memory=False)


def test_of_a_replay_only_the_layers_that_were_computed(stage: StageBench) -> None:
    """A chunk goes through some of the layers."""
    begin(stage)
    stage.compute()
    stage.order(Replay(epoch=1, sequence=1, boundary=3, start=0, stop=2, through=LayerRange(3, 6)))
    chunk = step_of(0, Row(1, 0, 2, False), replay=True, through=LayerRange(1, 3), open=(), tokens=(1, 2), alone=True)
    stage.step(chunk, np.ones((2, 2), np.float32))
    (trouble,) = told(stage.fail(BOOM), DataPathError)
    assert isinstance(trouble, DataPathError)
    assert trouble.failed == StepFailure(LayerRange(1, 3), (SequencePosition(1, 2),), is_memory=False)


def test_sequences_that_found_no_memory_are_dropped_and_no_step_is_to_blame(stage: StageBench) -> None:
    """The broker counts less than the stage holds: the next plan counts anew, and computes the sequence again."""
    begin(stage)
    actions = stage.feed(KvOverfull("no mapping", (2,)))
    (trouble,) = told(actions, DataPathError)
    assert isinstance(trouble, DataPathError)
    assert (trouble.epoch, trouble.kv_overfull, trouble.failed, trouble.reason) == (1, True, None, "no mapping")
    assert list(stage.core.sequences) == [1]
    assert act.ReleaseSequence(2) in actions
    assert not stage.core.faults.is_in_doubt


# --- memory ----------------------------------------------------------------------------------------------------------


def test_short_of_memory_it_drops_what_it_can_spare_and_tries_again(stage: StageBench) -> None:
    """The layers kept for others go, the broker is told so, and the same step is computed in pieces, once. If that goes
    well, nothing else is told."""
    stage.order(KeepWarm(epoch=1, layers=(LayerRange(4, 6),)))
    stage.executor.keep((LayerRange(4, 6),), lambda a, b: None, lambda _: False)
    stage.feed(StandbyLoaded((LayerRange(4, 6),), 0.1))
    begin(stage)
    before = stage.computing
    assert before is not None
    actions = stage.fail(FULL, is_memory=True)
    assert [type(a) for a in actions] == [act.WriteStageLog, act.FreeSpareMemory, act.SendToBroker, act.Compute]
    (kept,) = told(actions, KeptWarm)
    assert kept == KeptWarm(epoch=1, incarnation="w0.1", layers=(), wanted=(LayerRange(4, 6),), load_s=0.0)
    assert stage.executor.kept == frozenset()
    assert actions[-1] == act.Compute(1, 1, before.batch, before.cause, in_pieces=True)
    assert [type(a) for a in stage.compute()] == [act.SendStep]
    assert not stage.core.faults.is_in_doubt


def test_the_second_time_it_is_a_failure(stage: StageBench) -> None:
    begin(stage)
    stage.fail(FULL, is_memory=True)
    (trouble,) = told(stage.fail(FULL, is_memory=True), DataPathError)
    assert isinstance(trouble, DataPathError)
    assert trouble.failed is not None
    assert trouble.failed.is_memory
    assert stage.computing is None


def test_loading_for_others_stops(stage: StageBench) -> None:
    """It would take the memory that was just freed."""
    stage.order(KeepWarm(epoch=1, layers=(LayerRange(4, 6),)))
    begin(stage)
    assert act.StopStandby() in stage.fail(FULL, is_memory=True)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"), True),
        (RuntimeError("not enough memory: you tried to allocate 64 bytes"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_memory_is_told_from_other_errors(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB"), False),
        (RuntimeError("expected all tensors to be on the same device"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_a_lost_device_is_told_from_other_errors(error: Exception, is_lost: bool) -> None:
    assert is_device_lost(error) is is_lost


def test_pieces_give_what_the_whole_gives() -> None:
    """A chunk longer than a piece, and a token: the same hidden states, the same draws in the same order."""
    sizes = {1: 2 * PIECE_POSITIONS + 5, 2: 1}

    def ready(stop: int) -> FakeExecutor:
        executor = FakeExecutor(fake_manifest(6))
        executor.prepare(LayerRange(0, stop), (), 4, lambda a, b: None)
        executor.activate(LayerRange(0, stop))
        for sequence in sizes:
            executor.open(sequence, 128)
        return executor

    rows = tuple(Row(sequence, 0, count, True) for sequence, count in sizes.items())
    tokens = np.arange(sum(sizes.values()), dtype=np.int64)
    params = opened(1).params
    jobs = tuple(SampleJob(n, params, 5, list(range(row.count)), row.count) for n, row in enumerate(rows))
    for stop, samples in ((3, ()), (6, jobs)):
        batch = Batch(rows, tokens, None, samples)
        whole = ready(stop).forward(batch, lambda: False, lambda: None)
        pieces = forward_in_pieces(ready(stop), batch, lambda: False, lambda: None)
        assert pieces.sampled == whole.sampled
        if whole.hidden is None:
            assert pieces.hidden is None
        else:
            assert np.array_equal(whole.hidden, pieces.hidden)
    assert [piece.rows[0].count for piece in split_batch(batch)] == [PIECE_POSITIONS, PIECE_POSITIONS, 5, 1]
    assert all(piece.is_piece for piece in split_batch(batch))


# --- doubt -----------------------------------------------------------------------------------------------------------


def test_in_doubt_it_says_no_hello_before_a_test(stage: StageBench) -> None:
    """Called back, it tests its device first; then the broker is told, and gets its Hello."""
    begin(stage)
    stage.fail(BOOM)
    for event in (BrokerConnected(), StageTick()):
        assert act.SendHello() not in stage.feed(event)
    assert stage.core.faults.is_testing
    assert act.TestDevice() not in stage.order(Rejoin(reason="its steps failed"))  # it is under way
    stage.now += HELLO_RETRY_S + 0.1
    assert act.SendHello() not in stage.feed(StageTick())
    actions = [a for a in stage.feed(DeviceTested()) if not isinstance(a, act.WriteStageLog)]
    assert actions == [act.SendToBroker(SelfTested(epoch=0, incarnation="w0.1")), act.SendHello()]
    assert act.SendHello() in stage.order(Rejoin(reason="once more"))


def test_a_failed_test_is_told_and_repeated_after_a_pause(stage: StageBench) -> None:
    """No Hello, however often it is called. After the third failure in a row the process ends, for somebody to start
    another one."""
    begin(stage)
    stage.fail(BOOM)
    assert act.TestDevice() in stage.order(Rejoin(reason="its steps failed"))
    for number in range(1, MAX_FAILED_TESTS + 1):
        actions = stage.feed(DeviceTested(BOOM))
        assert act.TestDevice() not in stage.order(Rejoin(reason="its steps failed"))
        stage.now += TEST_RETRY_S * number - 0.1
        assert act.TestDevice() not in stage.feed(StageTick())
        stage.now += 0.1
        assert act.TestDevice() in stage.feed(StageTick())
        assert told(actions, SelfTested) == [SelfTested(epoch=0, incarnation="w0.1", problem=BOOM)]
        assert act.SendHello() not in actions
        ends = [a for a in actions if isinstance(a, act.Exit)]
        assert [a.code for a in ends] == ([1] if number == MAX_FAILED_TESTS else [])
    assert BOOM in ends[0].reason


def test_a_step_that_is_computed_ends_the_doubt(stage: StageBench) -> None:
    """Under another plan: the steps behind the failed one are never finished, so the broker learns nothing from them
    (simulated seed 20831)."""
    begin(stage)
    stage.fail(BOOM)
    stage.run(step_of(2, Row(3, 0, 3, True), open=(opened(3),)))
    assert act.TestDevice() in stage.feed(BrokerConnected())
    stage.feed(DeviceTested(BOOM))
    stage.activate(epoch=2, first_step=2)
    stage.run(step_of(2, Row(3, 0, 3, True), epoch=2, open=(opened(3),)))
    assert act.SendHello() in stage.feed(BrokerConnected())
