"""The fake executor's keys and values in transfer: exact where all is right, and spoilt by anything foreign."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swarm.errors import IllegalMove
from swarm.stage.executor import Batch, KvData
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire.messages import LayerRange, Row

LAYERS, KEPT = LayerRange(0, 2), LayerRange(2, 4)


def computed(first_token: int = 10, position: int = 80) -> FakeExecutor:
    """A worker with the first two of four layers, and a sequence."""
    executor = FakeExecutor(fake_manifest(4))
    executor.prepare(LAYERS, (), 4, lambda done, total: None)
    executor.activate(LAYERS)
    executor.open(1, 128)
    extend(executor, 0, position, first_token)
    return executor


def extend(executor: FakeExecutor, start: int, stop: int, first_token: int = 10) -> bytes:
    tokens = np.arange(first_token + start, first_token + stop)
    batch = Batch((Row(1, start, stop - start, False),), tokens, None, ())
    hidden = executor.forward(batch, lambda: False, lambda: None).hidden
    assert hidden is not None
    return hidden.tobytes()


def taking_over(*parts: KvData) -> FakeExecutor:
    """A worker that has these parts, and computes their layers from now on."""
    executor = FakeExecutor(fake_manifest(4))
    for part in parts:
        executor.write_kv(1, 128, part)
    executor.prepare(LAYERS, (), 4, lambda done, total: None)
    executor.activate(LAYERS)
    return executor


def test_the_states_are_the_same_bit_for_bit() -> None:
    source = computed()
    taken = taking_over(source.read_kv(1, LAYERS, 0, 32), source.read_kv(1, LAYERS, 32, 80))
    assert taken.chains == source.chains
    assert taken.limits == source.limits
    assert extend(taken, 80, 90) == extend(source, 80, 90)


@pytest.mark.parametrize("num_wrong", [0, 1, 2])
def test_a_foreign_part_changes_every_later_token(num_wrong: int) -> None:
    """Also one in the middle: a real model reads all positions, and the right ones behind it hide nothing."""
    source, other = computed(), computed(first_token=11)
    parts = [source.read_kv(1, LAYERS, start, start + 16) for start in (0, 16, 32, 48, 64)]
    foreign = other.read_kv(1, LAYERS, 16 * num_wrong, 16 * num_wrong + 16)
    parts[num_wrong] = foreign
    taken = taking_over(*parts)
    assert extend(taken, 80, 90) != extend(source, 80, 90)


def test_a_part_at_another_layer_changes_later_tokens() -> None:
    source = computed()
    part = source.read_kv(1, LAYERS, 0, 80)
    swapped = replace(part, numbers=np.ascontiguousarray(part.numbers[::-1]))
    assert extend(taking_over(swapped), 80, 90) != extend(source, 80, 90)


def test_missing_positions_are_refused() -> None:
    """They can't be written around, read, or computed upon."""
    source, taken = computed(), FakeExecutor(fake_manifest(4))
    with pytest.raises(IllegalMove, match="32 is written, 0 are held"):
        taken.write_kv(1, 128, source.read_kv(1, LAYERS, 32, 64))
    with pytest.raises(IllegalMove, match="are to be read"):
        source.read_kv(1, LAYERS, 64, 81)
    with pytest.raises(IllegalMove, match="position 80, held 32"):
        extend(taking_over(source.read_kv(1, LAYERS, 0, 32)), 80, 90)


def test_a_part_of_another_size_or_beyond_the_limit_is_refused() -> None:
    part = computed().read_kv(1, LAYERS, 0, 80)
    for wrong in (
        replace(part, stop=79),
        replace(part, layers=LayerRange(0, 3)),
        replace(part, layers=LayerRange(3, 5)),
        replace(part, dtype="bfloat16"),
    ):
        with pytest.raises(IllegalMove, match="are no states"):
            FakeExecutor(fake_manifest(4)).write_kv(1, 128, wrong)
    with pytest.raises(IllegalMove, match="outgrows"):
        FakeExecutor(fake_manifest(4)).write_kv(1, 64, part)


def test_written_positions_cost_those_behind_them_in_their_block() -> None:
    """As in a cache that is written in units."""
    source = computed()
    taken = FakeExecutor(fake_manifest(4))
    taken.write_kv(1, 128, source.read_kv(1, LAYERS, 0, 80))
    taken.write_kv(1, 128, source.read_kv(1, LAYERS, 0, 40))
    assert [len(chain) for chain in taken.chains[1].values()] == [80, 80]
    taken.write_kv(1, 128, source.read_kv(1, LAYERS, 64, 70))
    assert [len(chain) for chain in taken.chains[1].values()] == [70, 70]


def test_copies_are_counted_apart_and_dropped_with_their_layers() -> None:
    """Of its own former layers a worker keeps nothing; copies of layers that stay warm stay."""
    source = computed()
    layers = LayerRange(2, 3)
    free = source.kv_free_bytes()
    source.write_kv(1, 128, replace(source.read_kv(1, LayerRange(0, 1), 0, 64), layers=layers))
    assert source.kv_copy_bytes() == 64 * 8
    assert source.kv_free_bytes() == free - 64 * 8
    assert source.kv_used() == 96
    source.keep((KEPT,), lambda done, total: None, lambda warm: False)
    source.prepare(LayerRange(1, 2), (), 4, lambda done, total: None)
    source.activate(LayerRange(1, 2), (LayerRange(0, 1), KEPT))
    assert source.chains[1].keys() == {1, 2}
    source.drop_kv(1, KEPT)
    assert source.chains[1].keys() == {1}
    assert source.kv_copy_bytes() == 0
