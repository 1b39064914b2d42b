"""A stage belongs to the broker that welcomed it last: what is of another one's life has no effect."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.stage import actions as act
from swarm.stage.events import Loaded
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import (
    Activate,
    Fence,
    HeldSequence,
    LayerRange,
    Lineage,
    Order,
    Prepare,
    RangePosition,
    Row,
    SequencePosition,
    Unassign,
)
from tests.unit.stage.bench import CAPACITY, EDGE, WELCOME, StageBench, opened, step_of

OURS = Lineage("ours", 3)
LATER = Lineage("ours", 900)
OTHER = Lineage("another's", 3)


@pytest.fixture
def stage(make_stage: Callable[..., StageBench]) -> StageBench:
    """In epoch 9 of a broker's life, with three positions of sequence 1."""
    found = make_stage()
    found.order(of(OURS, WELCOME))
    found.order(of(OURS, Prepare(epoch=9, layers=found.layers, standby=(), edge=EDGE, max_sequences=4)))
    found.feed(Loaded(9, CAPACITY))
    found.order(of(OURS, Activate(epoch=9, first_step=1, live=())))
    found.run(step_of(1, Row(1, 0, 3, True), epoch=9, lineage=OURS, tokens=(1, 2, 3), open=(opened(1),)))
    return found


def of(lineage: Lineage, order: Order) -> Order:
    return msgspec.structs.replace(order, lineage=lineage)


def prepare(epoch: int, lineage: Lineage, stop: int = 3) -> Order:
    layers = LayerRange(0, stop)
    return Prepare(epoch=epoch, lineage=lineage, layers=layers, standby=(), edge=EDGE, max_sequences=4)


def test_what_is_held_is_told_with_digests_of_its_tokens(stage: StageBench) -> None:
    """In Hello; Activated follows an order that says what counts, and needs none."""
    kv = (RangePosition(LayerRange(0, 3), 3),)
    assert stage.core.hello_inventory() == (
        HeldSequence(1, kv, prefix_digests((1, 2, 3), 3), stage.core.sequences[1].open.limit),
    )
    assert stage.core.inventory() == (HeldSequence(1, kv),)


def test_digests_are_of_what_was_computed_and_no_more(stage: StageBench) -> None:
    """Tokens that were drawn since the sequence was opened are among them; those that the broker has told of, and that
    have not gone through the layers, are not."""
    stage.run(step_of(2, Row(1, 3, 1, True), epoch=9, lineage=OURS, tokens=(44,)))
    (held,) = stage.core.hello_inventory()
    assert held.digests == prefix_digests((1, 2, 3, 44), 4)
    stage.order(Fence(epoch=10, lineage=OURS))
    stage.order(prepare(10, OURS))
    stage.feed(Loaded(10, CAPACITY))
    stage.order(Activate(epoch=10, lineage=OURS, first_step=3, live=(SequencePosition(1, 2),)))
    again = opened(1, tokens=(1, 2, 3, 77))
    stage.step(step_of(3, epoch=10, lineage=OURS, open=(again,)))
    (held,) = stage.core.hello_inventory()
    assert held.digests == prefix_digests((1, 2), 2)


def test_another_journals_broker_finds_a_worker_that_holds_nothing(stage: StageBench) -> None:
    """The numbers that it knows are other sequences."""
    actions = stage.order(of(OTHER, WELCOME))
    assert act.ReleaseSequence(1) in actions
    assert stage.core.hello_inventory() == ()
    assert stage.core.log.num_bytes == 0


def test_the_same_journals_next_broker_says_what_stays(stage: StageBench) -> None:
    """Nothing is dropped before: it has compared what was told."""
    stage.order(of(LATER, WELCOME))
    assert 1 in stage.core.sequences
    stage.order(prepare(2, LATER))
    stage.feed(Loaded(2, CAPACITY))
    stage.order(Activate(epoch=2, lineage=LATER, first_step=1, live=(SequencePosition(1, 3),)))
    assert stage.core.active == 2
    assert stage.core.sequences[1].position() == 3


@pytest.mark.parametrize("lineage", [OTHER, LATER])
def test_epochs_begin_anew_with_another_life(stage: StageBench, lineage: Lineage) -> None:
    """Its epochs may be lower than those of before: a backup may have taken the journal's place, or another one."""
    stage.order(of(lineage, WELCOME))
    assert stage.core.active is None
    stage.order(prepare(1, lineage))
    (told,) = [a.message for a in stage.feed(Loaded(1, CAPACITY)) if isinstance(a, act.SendToBroker)]
    assert (told.epoch, told.lineage) == (1, lineage)
    stage.order(Activate(epoch=1, lineage=lineage, first_step=1, live=()))
    assert stage.core.active == 1


def test_a_dismissal_of_a_lower_epoch_counts(stage: StageBench) -> None:
    stage.order(of(LATER, WELCOME))
    assert act.ReleaseSequence(1) in stage.order(Unassign(epoch=1, lineage=LATER))


def test_being_welcomed_again_changes_nothing(stage: StageBench) -> None:
    """So a member is asked for files."""
    stage.order(of(OURS, msgspec.structs.replace(WELCOME, epoch=9)))
    assert stage.core.active == 9
    assert 1 in stage.core.sequences


@pytest.mark.parametrize(
    "order", [Fence(epoch=11), prepare(11, OTHER), Activate(epoch=11, first_step=1, live=()), Unassign(epoch=11)]
)
def test_orders_of_another_life_are_dropped(stage: StageBench, order: Order) -> None:
    assert stage.order(of(OTHER, order)) == []
    assert (stage.core.fence, stage.core.active) == (9, 9)
    assert stage.core.counters["stale_orders"] == 1


def test_steps_of_another_life_are_dropped(stage: StageBench) -> None:
    """Also those that have the right numbers."""
    step = step_of(2, Row(1, 3, 1, True), epoch=9, lineage=OTHER)
    assert stage.run(step) == []
    assert stage.core.counters["stale_steps"] == 1


def test_what_goes_on_says_whose_it_is(stage: StageBench) -> None:
    step = step_of(2, Row(1, 3, 1, True), epoch=9, lineage=OURS)
    (sent,) = [a for a in stage.run(step) if isinstance(a, act.SendStep)]
    assert sent.step.lineage == OURS


def test_a_load_for_another_life_is_not_taken_for_this_ones(stage: StageBench) -> None:
    """Two brokers' plans have the same epoch, and other layers."""
    stage.order(prepare(10, OURS))
    stage.order(of(OTHER, WELCOME))
    assert stage.order(prepare(10, OTHER, stop=4)) == []  # one load at a time
    actions = stage.feed(Loaded(10, CAPACITY))  # the first one's
    assert [a.layers for a in actions if isinstance(a, act.LoadLayers)] == [LayerRange(0, 4)]
    assert not [a for a in actions if isinstance(a, act.SendToBroker)]
    assert [a for a in stage.feed(Loaded(10, CAPACITY)) if isinstance(a, act.SendToBroker)]


def test_nobody_waits_for_a_load_of_a_broker_that_is_gone(stage: StageBench) -> None:
    stage.order(prepare(10, OURS))
    stage.order(of(LATER, WELCOME))
    assert stage.feed(Loaded(10, CAPACITY)) == []
