"""Records of copies: positions by layer, tokens, and what is left of them when a plan takes layers over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.stage.actions import Action
from swarm.stage.kv_copies import KvCopy, count_equal
from swarm.stage.log import ActivationLog
from swarm.stage.sequences import SequenceStore, StoredSequence
from swarm.wire.messages import KvTarget, LayerRange, RangePosition, Row, SendKv, SequencePosition
from tests.unit.stage.bench import StageBench, opened, step_of
from tests.unit.stage.kv_bench import HOLDER, IDLE, LAYERS, activate, parts_in, positions

ITEM = opened(1, limit=256)


def test_equal_tokens_are_equal_in_a_list_and_in_a_tuple() -> None:
    """Histories are lists, the tokens of messages are tuples (simulated seed 61)."""
    assert count_equal([1, 2, 3], (1, 2, 3)) == 3
    assert count_equal((1, 2), [1, 2, 3]) == 2
    assert count_equal([1, 2, 3], (1, 9, 3)) == 1
    assert count_equal([], ()) == 0


def test_a_copy_has_come_as_far_as_its_slowest_layer() -> None:
    copy = KvCopy(ITEM, positions={0: 64, 1: 32})
    assert copy.min_position(LayerRange(0, 2)) == 32
    assert copy.min_position(LayerRange(0, 1)) == 64
    assert copy.min_position(LayerRange(0, 3)) == 0


def test_a_part_costs_what_lies_behind_it_in_its_last_block() -> None:
    """A cache writes whole units. Further blocks stay."""
    copy = KvCopy(ITEM, tokens=list(range(64)), positions={0: 64, 1: 50, 2: 32})
    copy.extend(LayerRange(0, 3), 32, tuple(range(32, 40)))
    assert copy.positions == {0: 64, 1: 40, 2: 40}
    assert copy.tokens == list(range(64))


@pytest.mark.parametrize(("own", "copied", "left"), [(60, 64, 50), (60, 40, 60), (40, 64, 64)])
def test_layers_are_taken_over_as_far_as_their_tokens_are_the_sequence_s(own: int, copied: int, left: int) -> None:
    """The stage's history and the copy's differ from position 50 on. Neither is right for certain: what the history has
    and the copy lacks is the stage's own; where both go on, the rest is computed again."""
    actions: list[Action] = []
    store = SequenceStore(ActivationLog(1 << 20), actions)
    history, tokens = [*range(own)], [*range(50), *range(150, 150 + copied)][:copied]
    store.sequences[1] = StoredSequence(ITEM, history, [RangePosition(LayerRange(0, 2), own)])
    store.copies.sequences[1] = KvCopy(ITEM, tokens, {2: copied})
    store.keep_only((SequencePosition(1, 64),))
    store.adopt_layers((SequencePosition(1, 64),), LayerRange(0, 3), frozenset())
    held = store.sequences[1]
    assert max(part.position for part in held.kv) == left
    assert held.history[: min(own, left)] == [*range(min(own, left))]
    assert store.copies.sequences == {}


def test_the_beginning_of_an_ended_sequence_is_not_copied(make_stage: Callable[..., StageBench]) -> None:
    """It stays for sequences to come, whose parts are copied when they are computed."""
    stage = make_stage(0, 3)
    activate(stage)
    for number, sequence in enumerate((1, 2), start=1):
        item = opened(sequence, tokens=tuple(range(10, 266)), limit=256)
        stage.run(step_of(number, Row(sequence, 0, 70, False), open=(item,)))
    stage.run(step_of(3, Row(2, 70, 1, False), retire=positions(s1=64)))
    stage.order(SendKv(epoch=1, targets=(KvTarget(HOLDER, LAYERS),)))
    (part,) = parts_in(stage.feed(IDLE))
    assert part.sequence == 2
