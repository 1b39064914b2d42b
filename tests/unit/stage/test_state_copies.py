"""Copies of layers that keep states: where their parts end, and from where another worker goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import Span
from swarm.stage.events import KvPartsTaken
from swarm.stage.kv_sender import MAX_PAUSE_S
from swarm.wire.messages import REPLAY_STEP, Edge, HeldSequence, KvTarget, LayerRange, RangePosition, Row, SendKv
from swarm.wire.state_positions import positions_after_part
from tests.unit.stage.bench import StageBench, opened, step_of
from tests.unit.stage.kv_bench import IDLE, LAYERS, KvPipe, activate, held_by, keep_warm, parts_in, positions, tick

MakeStage = Callable[..., StageBench]
STRIDE = 64
LIMIT = 512


@pytest.fixture
def pipe(make_stage: MakeStage) -> KvPipe:
    """The first stage of two, and a worker without a part in the plan, which keeps its layers warm."""
    sender, receiver = make_stage(0, 3, state_stride=STRIDE), make_stage(0, 3, state_stride=STRIDE)
    activate(sender)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver, block_s=1e-6)  # a turn has time for everything
    pipe.order()
    return pipe


def run(stage: StageBench, number: int, start: int, count: int, epoch: int = 1, **fields: object) -> None:
    """A step; its tokens are those of ``opened``."""
    item = opened(1, tokens=tuple(range(10, 10 + LIMIT)), limit=LIMIT)
    stage.run(step_of(number, Row(1, start, count, False), epoch=epoch, open=(item,) if start == 0 else (), **fields))


def ends(pipe: KvPipe) -> list[tuple[int, int]]:
    """First and last position of each part of the next turn, which arrives."""
    parts = pipe.turn()
    pipe.deliver()
    return [(part.start, part.start + len(part.tokens)) for part in parts]


def copied(pipe: KvPipe) -> int:
    copy = pipe.receiver.core.store.copies.sequences.get(1)
    return 0 if copy is None else copy.min_position(LAYERS)


def take_over(pipe: KvPipe, live: int) -> int:
    """The receiver gets the sender's layers. Return from where it can go on."""
    activate(pipe.receiver, 2, s1=live)
    held = pipe.receiver.core.sequences.get(1)
    return 0 if held is None else held.position() or 0


def test_parts_end_where_states_are_held(pipe: KvPipe) -> None:
    run(pipe.sender, 1, 0, 150)
    assert [span for _ in range(9) for span in ends(pipe)] == [(0, 64), (64, 128), (128, 150)]
    run(pipe.sender, 2, 150, 5)
    assert ends(pipe) == []  # no block was finished
    run(pipe.sender, 3, 155, 10)
    assert ends(pipe) == [(128, 165)]
    assert copied(pipe) == 165
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert report.held == (HeldSequence(1, (RangePosition(LAYERS, 165),)),)


def test_a_change_of_plan_gets_the_exact_position(pipe: KvPipe) -> None:
    run(pipe.sender, 1, 0, 150)
    run(pipe.sender, 2, 150, 1)
    pipe.send(until=positions(s1=151))
    pipe.copy_all()
    assert copied(pipe) == 151
    assert take_over(pipe, 151) == 151
    run(pipe.receiver, 1, 151, 9, epoch=2)
    run(pipe.sender, 3, 151, 9)
    assert pipe.receiver.executor.chains[1] == pipe.sender.executor.chains[1]


@pytest.mark.parametrize(("live", "expected"), [(170, 165), (165, 165), (164, 150), (149, 128), (127, 64), (63, 0)])
def test_a_copy_goes_on_from_its_last_states_that_count(pipe: KvPipe, live: int, expected: int) -> None:
    """The sender may be some steps ahead of what the broker counts."""
    run(pipe.sender, 1, 0, 150)
    pipe.copy_all()
    run(pipe.sender, 2, 150, 15)
    pipe.copy_all()
    assert take_over(pipe, live) == expected
    if expected < live:
        step = step_of(REPLAY_STEP, Row(1, expected, 3, False), epoch=2, replay=True, through=LAYERS)
        pipe.receiver.run(step)  # the executor refuses to go on where it has no state


@pytest.mark.parametrize(
    ("is_urgent", "expected"),
    [(False, [(0, 64), (64, 128)]), (True, [(0, 64), (64, 70), (64, 100), (96, 128), (128, 130), (128, 160)])],
)
def test_beyond_loopback_states_leave_once_per_stride(
    pipe: KvPipe, is_urgent: bool, expected: list[tuple[int, int]]
) -> None:
    """Unless a change of plan waits for them."""
    stage, far = pipe.sender, Edge("w0.1", "tcp://192.0.2.7:4000")
    stage.order(SendKv(epoch=1, targets=(KvTarget(far, LAYERS, is_urgent=is_urgent),)))
    stage.core.exchange.sender._position_s = 1e-9  # a turn has time for everything
    run(stage, 1, 0, 60)
    sent = []
    for number in range(11):
        run(stage, 2 + number, 60 + 10 * number, 10)
        stage.now += MAX_PAUSE_S
        parts = parts_in(stage.feed(IDLE))
        sent += [(part.start, part.start + len(part.tokens)) for part in parts]
        if parts:
            stage.feed(KvPartsTaken(far.to, 1, 1e-9))
    assert sent == expected


def test_states_of_survivors_are_not_those_of_layers_taken_over(make_stage: MakeStage) -> None:
    """The survivor's layers could go on from the start of their last step; copied ones can't."""
    sender, receiver = make_stage(0, 3, state_stride=STRIDE), make_stage(3, 6, state_stride=STRIDE)
    activate(sender)
    activate(receiver)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver, block_s=1e-6)
    pipe.order()
    for stage in (sender, receiver):
        run(stage, 1, 0, 70)
        run(stage, 2, 70, 30)
    pipe.copy_all()
    receiver.first = 0
    activate(receiver, 2, s1=100)
    activate(receiver, 3, s1=80)
    held = receiver.core.sequences[1]
    assert [(r.layers, r.position) for r in held.kv] == [(LayerRange(0, 6), 64)]
    run(receiver, 1, 64, 5, epoch=3)


def test_a_copy_that_is_cut_before_its_first_state_is_dropped(make_stage: MakeStage) -> None:
    """Beside copies of other layers, which stay."""
    sender, receiver = make_stage(0, 3, state_stride=STRIDE), make_stage(3, 6, state_stride=STRIDE)
    activate(sender)
    activate(receiver)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver, block_s=1e-6)
    pipe.order()
    run(sender, 1, 0, 50)
    pipe.copy_all()
    assert copied(pipe) == 50
    activate(receiver, 2, kept=(LAYERS,), s1=40)
    assert copied(pipe) == 0
    assert receiver.executor.kv_copy_bytes() == 0


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "stop", "expected"),
    [
        ((), 64, {64}),
        ({64}, 100, {64, 100}),
        ({64, 100}, 110, {64, 100, 110}),
        ({64, 100, 110}, 128, {64, 110, 128}),
        ({64, 128, 150}, 40, {64, 128, 150}),  # whole blocks behind the part stay, and it adds nothing
        ({64, 100, 110}, 98, {64, 98}),  # the same block: what lay behind is lost
    ],
)
def test_a_copy_holds_the_states_of_its_last_two_parts(held: set[int], stop: int, expected: set[int]) -> None:
    assert positions_after_part(held, stop, STRIDE) == expected


def test_states_of_copies_are_counted_and_dropped_apart() -> None:
    arena = KvArena(torch.device("cpu"), STRIDE)
    arena.open(1, LIMIT)
    states, numbers = arena.states, torch.arange(10.0)
    states.segments([Span(1, 0, 0, 70, ())], 0, 10)
    for layer in (1, 2):
        states.write(1, layer, 70, numbers, is_copy=True)
    assert states.copied_bytes == 2 * 40
    assert torch.equal(states.read(1, 2, 70), numbers)
    with pytest.raises(IllegalMove, match="layer 2 has no state of sequence 1 at 64"):
        states.read(1, 2, 64)
    arena.fork(2, 1, 64, LIMIT)
    assert states.positions(2, 0) == [64]
    assert states.positions(2, 1) == []  # a fork has none of the copies
    arena.keep_layers(LayerRange(1, 2), {2})
    assert [states.positions(1, layer) for layer in range(3)] == [[], [70], [70]]
    assert states.copied_bytes == 40
    arena.keep_layers(LayerRange(1, 2))
    assert [states.positions(1, layer) for layer in range(3)] == [[], [70], []]
    states.write(1, 2, 70, numbers, is_copy=True)
    arena.drop_copies(1, LayerRange(0, 3))
    assert [states.positions(1, layer) for layer in range(3)] == [[], [70], []]
    arena.release(1)
    assert (states.copied_bytes, states.num_bytes) == (0, 40 * len(states.positions(2, 0)))
