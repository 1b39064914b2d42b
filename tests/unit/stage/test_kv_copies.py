"""Copies of keys and values: what a stage accepts, what ends copies, and how the next plan takes them over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from swarm.stage import actions as act
from swarm.stage.events import KvArrived, KvStoreFailed, Loaded
from swarm.stage.kv_arrivals import REPEAT_S, UNORDERED_S
from swarm.stage.kv_sender import LONG_PART_S
from swarm.wire.messages import (
    REPLAY_STEP,
    Activate,
    Activated,
    BlockKey,
    DataPathError,
    Fence,
    HeldSequence,
    KvSource,
    LayerRange,
    LeaseRenewed,
    Lineage,
    LogRange,
    Open,
    Prepare,
    RangePosition,
    ReceiveKv,
    Replay,
    Row,
    SequencePosition,
    Step,
    Unassign,
    Welcome,
)
from tests.unit.stage.bench import CAPACITY, EDGE, WELCOME, StageBench, opened, step_of
from tests.unit.stage.kv_bench import AMPLE, LAYERS, KvPipe, activate, held_by, keep_warm, positions, tick

MakeStage = Callable[..., StageBench]
BEHIND = LayerRange(3, 6)
ALL = LayerRange(0, 6)
KEY, OTHER_KEY = "a" * 64, "b" * 64


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


@pytest.fixture
def spare(make_stage: MakeStage) -> KvPipe:
    """The first stage of two, and a worker without a part in the plan, which keeps its layers warm."""
    sender, receiver = make_stage(0, 3), make_stage(0, 3)
    activate(sender)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver)
    pipe.order()
    return pipe


def begin(sequence: int = 1, limit: int = 256) -> Open:
    """The record of a sequence whose tokens are those that ``step_of`` gives it."""
    return opened(sequence, tokens=tuple(range(10, 10 + limit)), limit=limit)


def run_both(pipe: KvPipe, number: int, start: int, count: int, sequence: int = 1, **fields: object) -> None:
    """A step goes through both stages."""
    step = step_of(number, Row(sequence, start, count, False), **fields)
    (sent,) = [a for a in pipe.sender.run(step) if isinstance(a, act.SendStep)]
    pipe.receiver.step(step, sent.hidden)
    pipe.receiver.compute()


def copied(stage: StageBench, sequence: int = 1) -> dict[int, int]:
    """Positions of a sequence's copies by layer."""
    copy = stage.core.store.copies.sequences.get(sequence)
    return {} if copy is None else copy.positions


def level(position: int, layers: LayerRange = LAYERS) -> dict[int, int]:
    return dict.fromkeys(range(layers.first, layers.stop), position)


def counted(stage: StageBench, name: str) -> float:
    return stage.core.counters.get(name, 0)


def activated(actions: list[act.Action]) -> Activated:
    (message,) = [a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, Activated)]
    return message


def take_over(pipe: KvPipe, epoch: int = 2, **live: int) -> Activated:
    """The receiver gets the sender's layers, too."""
    pipe.receiver.first, pipe.receiver.stop = 0, max(pipe.receiver.stop, 3)
    return activated(activate(pipe.receiver, epoch, **live))


def replay(stage: StageBench, start: int, stop: int, through: LayerRange, epoch: int = 2) -> None:
    """The broker has these positions rebuilt from the tokens."""
    step = step_of(REPLAY_STEP, Row(1, start, stop - start, False), epoch=epoch, replay=True, through=through)
    stage.run(step)


def undisturbed(make_stage: MakeStage, position: int, layers: LayerRange = ALL) -> dict[int, list[int]]:
    """States after as many positions in one worker that has all layers."""
    whole = make_stage(0, 6)
    activate(whole)
    whole.run(step_of(1, Row(1, 0, position, False), open=(begin(),)))
    return {layer: whole.executor.chains[1][layer] for layer in range(layers.first, layers.stop)}


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_finished_blocks_are_copied_and_taken_over(pipe: KvPipe, make_stage: MakeStage) -> None:
    """The survivor begins where the copies end: it computes only what they lack, and then what the lost one would."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    assert copied(pipe.receiver) == level(64)
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert report.held == (HeldSequence(1, (RangePosition(LAYERS, 64),)),)
    assert report.num_bytes == 3 * 64 * 8
    assert not report.is_complete

    told = take_over(pipe, s1=70)
    assert told.held == (HeldSequence(1, (RangePosition(LAYERS, 64), RangePosition(BEHIND, 70))),)
    assert told.copies == ()
    replay(pipe.receiver, 64, 70, LAYERS)
    pipe.receiver.run(step_of(1, Row(1, 70, 30, False), epoch=2, open=(begin(),)))
    assert pipe.receiver.executor.chains[1] == undisturbed(make_stage, 100)


def test_a_spare_worker_becomes_a_stage_of_copies(spare: KvPipe, make_stage: MakeStage) -> None:
    """A sequence that it never opened is there, with its record; the broker gets digests of the tokens."""
    spare.sender.run(step_of(1, Row(1, 0, 70, False), open=(begin(),)))
    spare.copy_all()
    told = take_over(spare, s1=70)
    (held,) = told.held
    assert held.kv == (RangePosition(LAYERS, 64),)
    assert held.limit == 256
    assert len(held.digests) > 1
    replay(spare.receiver, 64, 70, LAYERS)
    spare.receiver.run(step_of(1, Row(1, 70, 5, False), epoch=2, open=(begin(),)))
    assert spare.receiver.executor.chains[1] == undisturbed(make_stage, 75, LAYERS)


def test_copies_from_other_tokens_are_found_at_the_first_step(spare: KvPipe) -> None:
    """The broker sees it from the digests; if it does not look, the stage refuses, and drops the sequence."""
    spare.sender.run(step_of(1, Row(1, 0, 64, False), open=(begin(),)))
    spare.copy_all()
    take_over(spare, s1=64)
    out = spare.receiver.step(step_of(1, Row(1, 64, 5, False), epoch=2, open=(opened(1, tokens=(4,) * 64, limit=256),)))
    (error,) = [a.message for a in out if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)]
    assert "copies, which were computed from other tokens" in error.reason
    assert spare.receiver.executor.chains == {}


@pytest.mark.parametrize("is_replay", [False, True])
def test_a_sequence_of_copies_with_another_limit_gets_its_memory_anew(
    is_replay: bool, spare: KvPipe, make_stage: MakeStage
) -> None:
    """The broker has counted none of its positions, since the report names the limit."""
    spare.sender.run(step_of(1, Row(1, 0, 64, False), open=(begin(),)))
    spare.copy_all()
    assert take_over(spare, s1=64).held[0].limit == 256
    if is_replay:
        step = step_of(REPLAY_STEP, Row(1, 0, 64, False), epoch=2, replay=True, through=LAYERS, open=(begin(limit=90),))
    else:
        step = step_of(1, Row(1, 0, 64, False), epoch=2, open=(begin(limit=90),))
    assert act.OpenSequence(1, 90) in spare.receiver.run(step)
    assert spare.receiver.core.sequences[1].open.limit == spare.receiver.executor.limits[1] == 90
    assert spare.receiver.executor.chains[1] == undisturbed(make_stage, 64, LAYERS)


# --- what is not accepted --------------------------------------------------------------------------------------------


def first_part(pipe: KvPipe) -> KvArrived:
    """The first part of a sequence, not delivered."""
    run_both(pipe, 1, 0, 40, open=(begin(),))
    pipe.turn()
    return pipe.waiting.pop()


def changed(event: KvArrived, **fields: object) -> KvArrived:
    return replace(event, part=msgspec.structs.replace(event.part, **fields))


FOREIGN: dict[str, Callable[[KvArrived], KvArrived]] = {
    "kv_parts_stale": lambda event: changed(event, lineage=Lineage("other", 1)),
    "kv_parts_stale ": lambda event: changed(event, epoch=2),
    "kv_parts_foreign": lambda event: changed(event, sender="w7.1"),
    "kv_parts_foreign ": lambda event: replace(event, sender=OTHER_KEY),
    "kv_parts_of_other_layers": lambda event: changed(event, layers=LayerRange(2, 5)),
    "kv_parts_malformed": lambda event: changed(event, tokens=()),
    "kv_parts_malformed ": lambda event: changed(event, tokens=event.part.tokens[1:]),
    "kv_parts_malformed  ": lambda event: changed(event, layers=LayerRange(0, 2)),
    "kv_parts_malformed   ": lambda event: changed(event, block=1),
    "kv_parts_of_other_limit": lambda event: changed(event, open=opened(1, limit=128)),
    "kv_parts_of_other_tokens": lambda event: changed(event, tokens=(*event.part.tokens[:-1], 5)),
    "kv_parts_unopened": lambda event: changed(event, sequence=2, open=None),
    "kv_parts_unopened ": lambda event: changed(event, sequence=2),
    "kv_parts_without_memory": lambda event: replace(event, free_bytes=event.data.numbers.nbytes - 1),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_part_with_anything_wrong_is_dropped_and_counted(name: str, pipe: KvPipe) -> None:
    event = first_part(pipe)
    assert pipe.receiver.feed(FOREIGN[name](event)) == []
    assert counted(pipe.receiver, name.strip()) == 1
    assert copied(pipe.receiver) == {}
    assert len(pipe.receiver.feed(event)) == 1, "the right one is stored"
    assert copied(pipe.receiver) == level(32)


def test_only_the_owner_of_the_named_key_sends(pipe: KvPipe) -> None:
    """The listener accepts this key only, and a part counts only if it came with it. A blocked key ends that."""
    event = first_part(pipe)
    source = KvSource("w0.1", LAYERS, KEY)
    assert act.AllowKvSenders(frozenset((KEY,))) in pipe.receiver.order(ReceiveKv(epoch=1, sources=(source,)))
    pipe.receiver.feed(replace(event, sender=OTHER_KEY))
    assert copied(pipe.receiver) == {}
    pipe.receiver.feed(replace(event, sender=KEY))
    assert copied(pipe.receiver) == level(32)
    assert act.AllowKvSenders(frozenset()) in pipe.receiver.order(BlockKey(epoch=1, key=KEY))
    pipe.receiver.feed(replace(event, sender=KEY))
    assert counted(pipe.receiver, "kv_parts_foreign") == 2
    assert copied(pipe.receiver) == level(32), "what came before stays"


def test_a_stage_takes_no_copies_of_its_own_layers(pipe: KvPipe) -> None:
    event = first_part(pipe)
    pipe.receive(layers=LayerRange(0, 6))
    data = pipe.receiver.executor.read_kv(1, BEHIND, 0, 32)
    pipe.receiver.feed(replace(changed(event, layers=BEHIND), data=data))
    assert counted(pipe.receiver, "kv_parts_of_other_layers") == 1


def test_what_a_stage_has_computed_is_no_place_for_copies_after_a_fence_either(pipe: KvPipe) -> None:
    """Its sequences stay for the next plan, which may give it the same layers."""
    event = first_part(pipe)
    pipe.receiver.order(Fence(epoch=2))
    pipe.receive(epoch=2, layers=ALL)
    data = pipe.receiver.executor.read_kv(1, BEHIND, 0, 32)
    pipe.receiver.feed(replace(changed(event, layers=BEHIND, epoch=2), data=data))
    assert counted(pipe.receiver, "kv_parts_of_other_layers") == 1
    pipe.receiver.feed(changed(event, epoch=2))
    assert copied(pipe.receiver) == level(32)


def test_nothing_is_accepted_without_an_order_for_this_plan(pipe: KvPipe) -> None:
    """Not before an order, not for another plan, not after a fence."""
    event = first_part(pipe)
    pipe.receiver.order(ReceiveKv(epoch=2, sources=(KvSource("w0.1", LAYERS),)))
    assert counted(pipe.receiver, "stale_orders") == 1
    pipe.receiver.order(Fence(epoch=2))
    pipe.receiver.feed(event)
    assert counted(pipe.receiver, "kv_parts_stale") == 1


def test_a_gap_leaves_what_is_held_as_it_is(pipe: KvPipe) -> None:
    """A lost part, and all after it, until the broker has them sent again."""
    run_both(pipe, 1, 0, 128, open=(begin(),))
    for _ in range(3):
        pipe.turn()
    del pipe.waiting[1]
    pipe.deliver()
    assert copied(pipe.receiver) == level(32)
    assert counted(pipe.receiver, "kv_gaps") == 1
    pipe.send(held=positions(s1=32))
    pipe.copy_all()
    assert copied(pipe.receiver) == level(128)


def test_a_part_that_comes_twice_is_stored_once(pipe: KvPipe) -> None:
    event = first_part(pipe)
    pipe.receiver.feed(event)
    assert pipe.receiver.feed(event) == []
    assert counted(pipe.receiver, "kv_parts_duplicate") == 1
    assert copied(pipe.receiver) == level(32)


def test_layers_come_from_two_senders(make_stage: MakeStage) -> None:
    """Each layer is as far as its own sender has come; all have the same tokens."""
    first, second, spare = make_stage(0, 2), make_stage(2, 4), make_stage(0, 4)
    activate(first)
    activate(second)
    front, back = KvPipe(first, spare), KvPipe(second, spare)
    near, far = LayerRange(0, 2), LayerRange(2, 4)
    spare.order(ReceiveKv(epoch=1, sources=(KvSource("w0.1", near), KvSource("w0.1", far)), awaited=positions(s1=64)))
    front.send(layers=near)
    back.send(layers=far)
    step = step_of(1, Row(1, 0, 70, False), open=(begin(),))
    (sent,) = [a for a in first.run(step) if isinstance(a, act.SendStep)]
    second.step(step, sent.hidden)
    second.compute()
    back.turn()
    back.deliver()
    assert copied(spare) == level(32, far)
    front.copy_all()
    assert held_by(tick(spare))[0].held == (HeldSequence(1, (RangePosition(near, 64), RangePosition(far, 32))),)
    (complete,) = held_by(back.copy_all())
    assert complete.is_complete
    told = activated(activate(spare, 2, s1=50))
    assert told.held[0].kv == (RangePosition(LayerRange(0, 4), 50),)
    assert spare.executor.chains[1] == {
        layer: states[:50] for layer, states in undisturbed(make_stage, 70, LayerRange(0, 4)).items()
    }


def test_other_tokens_of_a_sequence_that_was_never_opened_replace_the_copies(spare: KvPipe) -> None:
    """Nothing tells which are right: the copies are dropped, and the part is stored if it is a beginning."""
    event = first_part_of_spare(spare)
    spare.receiver.feed(event)
    other = changed(event, tokens=(5, *event.part.tokens[1:]))
    spare.receiver.feed(other)
    assert spare.receiver.core.store.copies.sequences[1].tokens[0] == 5
    spare.turn()
    (later,) = spare.waiting
    spare.receiver.feed(replace(later, part=msgspec.structs.replace(later.part, tokens=(6,) * 32)))
    assert copied(spare.receiver) == level(64)
    assert spare.receiver.core.store.copies.sequences[1].tokens[32:] == [6] * 32
    spare.receiver.feed(later)
    assert counted(spare.receiver, "kv_parts_of_other_tokens") == 1
    assert spare.receiver.executor.chains == {}


def first_part_of_spare(spare: KvPipe) -> KvArrived:
    spare.sender.run(step_of(1, Row(1, 0, 70, False), open=(begin(),)))
    spare.turn()
    return spare.waiting.pop()


# --- sequences that end, begin again and are cut ---------------------------------------------------------------------


def test_a_released_sequence_takes_its_copies_along(pipe: KvPipe) -> None:
    """What is still on its way is dropped, and does not open the sequence again."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.turn()
    pipe.deliver()
    pipe.turn()
    run_both(pipe, 2, 0, 3, sequence=2, release=(1,), open=(begin(2),))
    assert pipe.receiver.executor.chains.keys() == {2}
    pipe.deliver()
    assert counted(pipe.receiver, "kv_parts_of_released") == 1
    assert pipe.receiver.executor.chains.keys() == {2}


def test_a_sequence_that_is_admitted_again_is_copied_from_its_beginning(pipe: KvPipe) -> None:
    """Parts of its first life join no position of the second."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.turn()
    pipe.deliver()
    pipe.turn()
    run_both(pipe, 2, 0, 70, release=(1,), open=(begin(),))
    pipe.deliver()
    assert counted(pipe.receiver, "kv_gaps") == 1
    pipe.copy_all()
    assert copied(pipe.receiver) == level(64)


@pytest.mark.parametrize("limit", [256, 128])
def test_a_copy_that_opened_the_slot_shares_it_with_the_stage(limit: int, pipe: KvPipe) -> None:
    """If the copy comes before the stage's own first step, the slot stays; with another limit, it is opened anew."""
    step = step_of(1, Row(1, 0, 40, False), open=(begin(),))
    (sent,) = [a for a in pipe.sender.run(step) if isinstance(a, act.SendStep)]
    pipe.turn()
    pipe.deliver()
    assert copied(pipe.receiver) == level(32)
    actions = pipe.receiver.step(msgspec.structs.replace(step, open=(begin(limit=limit),)), sent.hidden)
    pipe.receiver.compute()
    assert [a for a in actions if not isinstance(a, act.Compute)] == (
        [] if limit == 256 else [act.ReleaseSequence(1), act.OpenSequence(1, 128)]
    )
    assert copied(pipe.receiver) == (level(32) if limit == 256 else {})


def test_a_copy_from_other_tokens_than_the_first_step_s_is_dropped(pipe: KvPipe) -> None:
    step = step_of(1, Row(1, 0, 40, False), open=(begin(),))
    (sent,) = [a for a in pipe.sender.run(step) if isinstance(a, act.SendStep)]
    pipe.turn()
    pipe.deliver()
    other = opened(1, tokens=tuple(range(11, 60)), limit=256)
    assert pipe.receiver.step(msgspec.structs.replace(step, open=(other,)), sent.hidden)[:2] == [
        act.ReleaseSequence(1),
        act.OpenSequence(1, 256),
    ]
    pipe.receiver.compute()


def test_a_fork_begins_without_copies(pipe: KvPipe) -> None:
    """Neither its own early ones nor those of its source are in its slot."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    fork = msgspec.structs.replace(begin(2), source=1, shared=64)
    step = step_of(2, Row(2, 64, 40, False), open=(fork,))
    (sent,) = [a for a in pipe.sender.run(step) if isinstance(a, act.SendStep)]
    pipe.turn()
    pipe.deliver()
    assert copied(pipe.receiver, 2) == level(64)
    actions = pipe.receiver.step(step, sent.hidden)
    pipe.receiver.compute()
    assert actions[:2] == [act.ReleaseSequence(2), act.ForkSequence(2, 1, 64, 256)]
    assert copied(pipe.receiver, 2) == {}
    pipe.send(held=positions(s1=64))
    pipe.copy_all()
    assert copied(pipe.receiver, 2) == level(96)


def test_a_retired_sequence_is_not_copied(pipe: KvPipe) -> None:
    """Its copies are dropped with its end, nothing of it is sent, and parts on their way are refused."""
    run_both(pipe, 1, 0, 128, open=(begin(),))
    pipe.turn()
    pipe.deliver()
    pipe.turn()
    run_both(pipe, 2, 0, 3, sequence=2, retire=(SequencePosition(1, 96),), open=(begin(2),))
    assert copied(pipe.receiver) == {}
    assert pipe.turn() == []
    pipe.deliver()
    assert counted(pipe.receiver, "kv_parts_unopened") == 1
    assert pipe.receiver.executor.chains[1].keys() == {3, 4, 5}


def test_a_truncation_cuts_the_copies_and_what_counts_as_sent(pipe: KvPipe) -> None:
    """A part on its way behind the cut joins no position."""
    run_both(pipe, 1, 0, 100, open=(begin(),))
    pipe.block_s = LONG_PART_S
    pipe.turn()
    pipe.turn()
    pipe.deliver()
    pipe.turn()
    run_both(pipe, 2, 40, 60, truncate=(SequencePosition(1, 40),))
    assert copied(pipe.receiver) == level(40)
    pipe.deliver()
    assert counted(pipe.receiver, "kv_gaps") == 1
    pipe.copy_all()
    assert copied(pipe.receiver) == level(96)
    run_both(pipe, 3, 0, 10, truncate=(SequencePosition(1, 0),))
    assert copied(pipe.receiver) == {}


def test_a_worker_that_sees_no_steps_is_told_which_sequences_ended(spare: KvPipe) -> None:
    """The broker finds them in its reports. Other layers than the order's are dropped as well."""
    for number, sequence in ((1, 1), (2, 2)):
        spare.sender.run(step_of(number, Row(sequence, 0, 40, False), open=(begin(sequence),)))
    spare.copy_all()
    assert {held.sequence for held in held_by(tick(spare.receiver, after_s=2.0))[0].held} == {1, 2}
    assert spare.receive(ended=(1,)) == [act.ReleaseSequence(1)]
    assert spare.receiver.executor.chains.keys() == {2}
    assert spare.receive(layers=LayerRange(0, 2)) == [act.DropKv(2, LayerRange(2, 3))]
    assert copied(spare.receiver, 2) == {0: 32, 1: 32}
    assert spare.receiver.order(ReceiveKv(epoch=1, sources=())) == [act.ReleaseSequence(2)]


def test_a_copy_is_opened_again_with_another_limit(spare: KvPipe) -> None:
    """The sequence ended unseen, and was admitted again with a smaller reservation."""
    spare.sender.run(step_of(1, Row(1, 0, 70, False), open=(begin(),)))
    spare.copy_all()
    spare.sender.run(step_of(2, Row(1, 0, 40, False), release=(1,), open=(begin(limit=128),)))
    spare.copy_all()
    assert copied(spare.receiver) == level(32)
    assert spare.receiver.executor.limits == {1: 128}


# --- the next plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("live", "taken"), [(40, 40), (64, 64), (70, 64), (0, 0)])
def test_copies_count_up_to_the_acknowledged_position(live: int, taken: int, pipe: KvPipe) -> None:
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    told = take_over(pipe, s1=live)
    held = {layer: r.position for r in told.held[0].kv for layer in range(r.layers.first, r.layers.stop)}
    assert held == level(taken) | level(live, BEHIND)


def test_copies_of_warm_layers_stay_and_all_others_go(make_stage: MakeStage) -> None:
    """A spare worker gets one of three layers, and keeps another warm."""
    sender, spare = make_stage(0, 3), make_stage(1, 2)
    activate(sender)
    keep_warm(spare, LAYERS)
    pipe = KvPipe(sender, spare)
    pipe.order()
    for number, sequence in ((1, 1), (2, 2)):
        sender.run(step_of(number, Row(sequence, 0, 70, False), open=(begin(sequence),)))
    pipe.copy_all()
    told = activated(activate(spare, 2, kept=(LayerRange(2, 3),), s1=50))
    assert told.held[0].kv == (RangePosition(LayerRange(1, 2), 50),)
    assert told.copies == (HeldSequence(1, (RangePosition(LayerRange(2, 3), 50),)),)
    assert spare.executor.chains.keys() == {1}
    assert spare.executor.chains[1].keys() == {1, 2}


def test_a_sequence_that_stays_a_copy_is_cut_with_the_others(make_stage: MakeStage) -> None:
    """The worker joins the plan with other layers; its copies of a live sequence serve at the next death."""
    sender, spare = make_stage(0, 3), make_stage(4, 6)
    activate(sender)
    keep_warm(spare, LAYERS)
    pipe = KvPipe(sender, spare)
    pipe.order()
    sender.run(step_of(1, Row(1, 0, 70, False), open=(begin(),)))
    pipe.copy_all()
    told = activated(activate(spare, 2, kept=(LAYERS,), s1=50))
    assert told.held == ()
    assert told.copies == (HeldSequence(1, (RangePosition(LAYERS, 50),)),)
    told = activated(activate(spare, 3, kept=(LAYERS,), s1=0))
    assert told.copies == ()
    assert spare.executor.chains == {}


def test_a_second_death_finds_the_copies_that_the_first_one_left(pipe: KvPipe, make_stage: MakeStage) -> None:
    """One layer is taken over and being rebuilt, when the worker with the other two dies."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    pipe.receiver.first = 2
    told = activated(activate(pipe.receiver, 2, kept=(LayerRange(0, 2),), s1=70))
    assert told.held[0].kv == (RangePosition(LayerRange(2, 3), 64), RangePosition(BEHIND, 70))
    assert told.copies == (HeldSequence(1, (RangePosition(LayerRange(0, 2), 64),)),)
    pipe.receiver.order(Fence(epoch=3))
    pipe.receiver.first = 0
    told = activated(activate(pipe.receiver, 3, s1=70))
    assert told.held[0].kv == (RangePosition(LAYERS, 64), RangePosition(BEHIND, 70))
    replay(pipe.receiver, 64, 70, LAYERS, epoch=3)
    assert pipe.receiver.executor.chains[1] == undisturbed(make_stage, 70)


def test_what_is_computed_after_copies_is_logged_for_the_next_death(make_stage: MakeStage) -> None:
    """The stage before takes the lost layers over, up to 64. The log of its new end begins there: what copies of the
    next stage's layers lack is rebuilt from it, and not from the tokens."""
    middle, first = make_stage(2, 4), make_stage(0, 2)
    activate(middle)
    activate(first)
    keep_warm(first, LayerRange(2, 4))
    pipe = KvPipe(middle, first)
    pipe.order(layers=LayerRange(2, 4))
    step = step_of(1, Row(1, 0, 70, False), open=(begin(),))
    (sent,) = [a for a in first.run(step) if isinstance(a, act.SendStep)]
    middle.step(step, sent.hidden)
    middle.compute()
    pipe.copy_all()
    assert copied(first) == level(64, LayerRange(2, 4))
    first.stop = 4
    told = activated(activate(first, 2, s1=70))
    assert told.logs == (LogRange(1, 2, 0, 70),)
    first.order(Replay(epoch=2, sequence=1, boundary=2, start=64, stop=70, through=LayerRange(2, 4)))
    first.compute()
    first.run(step_of(1, Row(1, 70, 30, False), epoch=2, open=(begin(),)))
    told = activated(activate(first, 3, s1=100))
    assert set(told.logs) == {LogRange(1, 2, 0, 70), LogRange(1, 4, 64, 100)}
    (again,) = [
        action
        for action in first.order(Replay(epoch=3, sequence=1, boundary=4, start=80, stop=100, through=LayerRange(4, 6)))
        if isinstance(action, act.SendStep)
    ]
    assert again.hidden is not None
    whole = make_stage(0, 4)
    activate(whole)
    (undisturbed,) = [
        a for a in whole.run(step_of(1, Row(1, 0, 100, False), open=(begin(),))) if isinstance(a, act.SendStep)
    ]
    assert undisturbed.hidden is not None
    assert np.array_equal(again.hidden.view(np.uint32), undisturbed.hidden[80:].view(np.uint32))


def test_copies_and_a_replay_rebuild_one_sequence_together(pipe: KvPipe, make_stage: MakeStage) -> None:
    """Two layers have copies, one has none: a replay from the tokens goes through all three, and the copies stay."""
    pipe.order(layers=LayerRange(1, 3))
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    told = take_over(pipe, s1=70)
    assert told.held[0].kv == (
        RangePosition(LayerRange(0, 1), 0), RangePosition(LayerRange(1, 3), 64), RangePosition(BEHIND, 70)
    )  # fmt: skip
    replay(pipe.receiver, 0, 32, LAYERS)
    assert pipe.receiver.core.sequences[1].kv[0] == RangePosition(LAYERS, 32)
    replay(pipe.receiver, 32, 70, LAYERS)
    assert pipe.receiver.core.sequences[1].position() == 70
    assert pipe.receiver.executor.chains[1] == undisturbed(make_stage, 70)


def test_nothing_is_kept_of_layers_that_were_the_stage_s_own(pipe: KvPipe) -> None:
    """They are warm, but what it computed there itself is gone, and is no copy."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.sender.first = 1
    told = activated(activate(pipe.sender, 2, kept=(LayerRange(0, 1),), s1=70))
    assert told.copies == ()
    assert pipe.sender.executor.chains[1].keys() == {1, 2}


# --- other ends ------------------------------------------------------------------------------------------------------


def test_unassign_drops_the_stage_s_own_and_lets_copies_wait_for_an_order(spare: KvPipe) -> None:
    spare.sender.run(step_of(1, Row(1, 0, 40, False), open=(begin(1),)))
    spare.copy_all()
    assert spare.receiver.order(Unassign(epoch=2)) == []
    tick(spare.receiver, after_s=UNORDERED_S - 1)
    assert copied(spare.receiver) == level(32)
    spare.receive(epoch=2)
    tick(spare.receiver, after_s=UNORDERED_S)
    assert copied(spare.receiver) == level(32)
    spare.receiver.order(Unassign(epoch=3))
    tick(spare.receiver, after_s=UNORDERED_S)
    assert spare.receiver.executor.chains == {}


def test_unassign_drops_copies_of_sequences_that_the_stage_has_opened(pipe: KvPipe) -> None:
    run_both(pipe, 1, 0, 40, open=(begin(1),))
    pipe.copy_all()
    pipe.receiver.order(Unassign(epoch=2))
    assert pipe.receiver.executor.chains == {}


def welcome(journal: str, generation: int, epoch: int = 5) -> Welcome:
    return Welcome(
        epoch=epoch, lineage=Lineage(journal, generation),
        beat_endpoint="b", data_endpoint="d", beat_interval_s=0.1, lease_s=10.0, wants=(),
    )  # fmt: skip


def test_another_journal_s_copies_are_dropped(spare: KvPipe) -> None:
    spare.sender.run(step_of(1, Row(1, 0, 40, False), open=(begin(1),)))
    spare.copy_all()
    spare.receiver.order(welcome("another", 1))
    assert spare.receiver.executor.chains == {}
    spare.turn()
    assert spare.receiver.core.exchange.arrivals.order is None


def test_after_a_restart_of_the_broker_copies_count_as_far_as_the_stage_s_own_sequence(make_stage: MakeStage) -> None:
    """The broker trusts the positions whose tokens it recognises by the stage's digests; sequences that consist of
    copies only have none, and go."""
    sender, receiver = make_stage(0, 3), make_stage(3, 6)
    activate(sender)
    activate(receiver)
    keep_warm(receiver, LAYERS)
    pipe = KvPipe(sender, receiver)
    pipe.order()
    run_both(pipe, 1, 0, 70, open=(begin(),))
    run_both(pipe, 2, 0, 40, sequence=2, open=(begin(2),))
    pipe.copy_all()
    receiver.run(step_of(3, release=(2,)))
    sender.run(step_of(3, Row(3, 0, 40, False), open=(begin(3),)))
    pipe.copy_all()
    assert receiver.core.store.copies.sequences.keys() == {1, 3}
    receiver.order(welcome("", 7, epoch=1))
    assert receiver.core.store.copies.sequences.keys() == {1}
    assert receiver.core.exchange.arrivals.order is None
    receiver.first = 0
    receiver.order(Prepare(epoch=2, layers=ALL, standby=(), edge=EDGE, max_sequences=4, lineage=Lineage("", 7)))
    receiver.feed(Loaded(2, CAPACITY))
    live = positions(s1=50)
    told = activated(receiver.order(Activate(epoch=2, first_step=1, live=live, lineage=Lineage("", 7))))
    assert told.held[0].kv == (RangePosition(ALL, 50),)


def test_when_memory_is_short_the_longest_copies_go_first(spare: KvPipe) -> None:
    """Until what is missing is free, and no further."""
    for number, (sequence, count) in enumerate(((1, 40), (2, 100), (3, 70)), start=1):
        spare.sender.run(step_of(number, Row(sequence, 0, count, False), open=(begin(sequence),)))
    spare.copy_all()
    per_position = 3 * 8
    tick(spare.receiver, free_bytes=-96 * per_position)
    assert spare.receiver.core.store.copies.sequences.keys() == {1, 3}
    tick(spare.receiver, free_bytes=-1)
    assert spare.receiver.core.store.copies.sequences.keys() == {1}
    assert counted(spare.receiver, "kv_bytes_evicted") == (96 + 64) * per_position


def test_copies_go_before_a_step_is_computed_again_for_lack_of_memory(pipe: KvPipe) -> None:
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    pipe.receiver.step(step_of(2, Row(1, 70, 1, False)))
    actions = pipe.receiver.fail("out of memory", is_memory=True)
    assert actions[0] == act.DropKv(1, LAYERS)
    assert copied(pipe.receiver) == {}
    pipe.receiver.compute()


def test_a_part_that_could_not_be_stored_drops_the_copies(pipe: KvPipe) -> None:
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    assert act.DropKv(1, LAYERS) in pipe.receiver.feed(KvStoreFailed(1, "MemoryError"))
    assert copied(pipe.receiver) == {}


# --- reports ---------------------------------------------------------------------------------------------------------


def test_copies_are_reported_when_they_have_changed_at_most_once_a_second(pipe: KvPipe) -> None:
    tick(pipe.receiver, after_s=2.0)
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.turn()
    assert held_by(pipe.deliver()) == []
    (report,) = held_by(tick(pipe.receiver, after_s=1.0))
    assert report.free_bytes == AMPLE
    pipe.copy_all()
    assert held_by(tick(pipe.receiver, after_s=0.5)) == []
    (report,) = held_by(tick(pipe.receiver, after_s=0.5))
    assert report.held[0].kv == (RangePosition(LAYERS, 64),)
    assert held_by(tick(pipe.receiver, after_s=REPEAT_S - 0.5)) == []
    assert held_by(tick(pipe.receiver, after_s=1.0)) == [report], "it may have been lost"


def test_a_report_is_repeated_since_it_may_have_been_lost(pipe: KvPipe) -> None:
    """While there is something to report. The order to drop ended sequences is answered in any case: otherwise the
    broker would repeat it for ever."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    pipe.copy_all()
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert held_by(tick(pipe.receiver, after_s=REPEAT_S - 1.0)) == []
    assert held_by(tick(pipe.receiver, after_s=1.0)) == [report]
    for _ in range(2):
        pipe.receive(ended=(1,))
        (report,) = held_by(tick(pipe.receiver, after_s=1.0))
        assert report.held == ()
    assert held_by(tick(pipe.receiver, after_s=2 * REPEAT_S)) == []


def test_awaited_positions_are_reported_immediately(pipe: KvPipe) -> None:
    """Once, as soon as every layer has every sequence up to its position."""
    run_both(pipe, 1, 0, 70, open=(begin(),))
    run_both(pipe, 2, 0, 10, sequence=2, open=(begin(2),))
    exact = positions(s1=70, s2=10)
    assert held_by(pipe.receive(awaited=exact)) == []
    pipe.send(until=exact)
    pipe.block_s = LONG_PART_S  # so that every block is a part of its own
    (report,) = held_by(pipe.copy_all())
    assert report.is_complete
    assert {h.sequence: h.kv[0].position for h in report.held} == {1: 70, 2: 10}
    assert [r.is_complete for r in held_by(pipe.receive(awaited=exact))] == [True], "a repeated order is answered"
    told = take_over(pipe, s1=70, s2=10)
    assert all(len(held.kv) == 1 for held in told.held), "nothing is computed again"


def test_a_welcome_or_another_plan_s_order_has_everything_reported_again(pipe: KvPipe) -> None:
    """A broker that welcomes a worker has no report of it. What only copies have is dropped: no digest names it."""
    run_both(pipe, 1, 0, 40, open=(begin(1),))
    pipe.sender.run(step_of(2, Row(2, 0, 40, False), open=(begin(2),)))
    pipe.copy_all()
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert len(report.held) == 2
    pipe.receiver.order(msgspec.structs.replace(welcome("", 0), lineage=Lineage(), epoch=1))
    (report,) = held_by(tick(pipe.receiver, after_s=2.0))
    assert [held.sequence for held in report.held] == [1]
    activate(pipe.receiver, 2, kept=(LAYERS,), s1=40)
    pipe.receive(epoch=2)
    assert len(held_by(tick(pipe.receiver, after_s=2.0))) == 1


def test_a_worker_without_orders_and_copies_reports_nothing(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.order(welcome("journal", 1))
    assert held_by(tick(stage, after_s=2.0)) == []


def test_a_parked_worker_reports_later(pipe: KvPipe) -> None:
    run_both(pipe, 1, 0, 40, open=(begin(),))
    pipe.copy_all()
    pipe.receiver.core.membership.on_welcome(WELCOME)
    assert held_by(tick(pipe.receiver, after_s=60.0)) == []
    assert pipe.receiver.core.is_parked
    pipe.receiver.order(LeaseRenewed())
    assert len(held_by(tick(pipe.receiver))) == 1


def test_an_order_may_await_what_is_held_already(spare: KvPipe) -> None:
    spare.sender.run(step_of(1, Row(1, 0, 32, False), open=(begin(1),)))
    spare.copy_all()
    (report,) = held_by(spare.receive(awaited=positions(s1=32)))
    assert report.is_complete


def test_steps_are_not_disturbed_by_a_step_that_is_not_known(pipe: KvPipe) -> None:
    """A copy does not make a sequence one of the stage's own: a row of it without an Open is refused."""
    pipe.sender.run(step_of(1, Row(1, 0, 40, False), open=(begin(1),)))
    pipe.copy_all()
    out = pipe.receiver.step(Step(epoch=1, step=1, rows=(Row(1, 32, 1, False),), tokens=(42,)))
    assert any(isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError) for a in out)
