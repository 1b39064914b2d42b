"""Sending copies of keys and values: which parts are next, how large they are, and when there is time for them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import pytest

from swarm.stage import actions as act
from swarm.stage.events import KvPartsTaken, KvTurn, StageTick
from swarm.stage.kv_sender import (
    FAILED_PAUSE_S,
    IDLE_SHARE,
    LONG_PART_S,
    MAX_BLOCKS,
    MAX_PARTS,
    MAX_PAUSE_S,
    PART_S,
    PAUSE_S,
    ROUND_SHARE,
    SAVED_S,
    SHARE,
    URGENT_SHARE,
)
from swarm.wire.messages import (
    BlockKey,
    Edge,
    Fence,
    KvTarget,
    LayerRange,
    LeaseRenewed,
    Row,
    SendKv,
    SequencePosition,
)
from tests.unit.stage.bench import WELCOME, StageBench, opened, step_of
from tests.unit.stage.kv_bench import BUSY, HOLDER, IDLE, LAYERS, activate, num_blocks_of, parts_in, positions

MakeStage = Callable[..., StageBench]
SECOND = Edge("w2.1", "tcp://second")


@pytest.fixture
def stage(make_stage: MakeStage) -> StageBench:
    """The first stage of two."""
    bench = make_stage(0, 3)
    activate(bench)
    return bench


def run(stage: StageBench, number: int, sequence: int, start: int, count: int, **fields: object) -> None:
    stage.run(step_of(number, Row(sequence, start, count, False), **fields))


def grow(stage: StageBench, **lengths: int) -> None:
    """``s1=70``: sequence 1 begins and has 70 positions."""
    for name, count in lengths.items():
        sequence = int(name[1:])
        item = opened(sequence, tokens=tuple(range(10, 522)), limit=512)
        run(stage, stage.core.steps.next_step, sequence, 0, count, open=(item,))


def send(stage: StageBench, *targets: KvTarget) -> list[act.Action]:
    return stage.order(SendKv(epoch=1, targets=targets))


def to(edge: Edge = HOLDER, layers: LayerRange = LAYERS, **fields: object) -> KvTarget:
    return KvTarget(edge, layers, **fields)  # type: ignore[arg-type]


def turn_of(
    stage: StageBench, turn: KvTurn = IDLE, block_s: float = LONG_PART_S, num_bytes: int = 9
) -> list[act.SendKvPart]:
    """Give the stage a turn. Return the parts that it sends; each block takes ``block_s``."""
    is_wanted = stage.core.wants_kv_turn(turn, stage.now)
    parts = parts_in(stage.feed(turn))
    assert is_wanted == bool(parts)
    if parts:
        stage.feed(KvPartsTaken(parts[0].to.to, num_bytes, block_s * sum(map(num_blocks_of, parts))))
    return parts


def take(
    stage: StageBench, turn: KvTurn = IDLE, block_s: float = LONG_PART_S, num_bytes: int = 9
) -> act.SendKvPart | None:
    """Give the stage a turn, if it is idle after a while. Unless told otherwise, a turn has time for one block."""
    stage.now += MAX_PAUSE_S if turn.is_idle else 0.0
    parts = turn_of(stage, turn, block_s, num_bytes)
    assert len(parts) <= 1
    return parts[0] if parts else None


def all_parts(stage: StageBench, turn: KvTurn = IDLE) -> list[tuple[str, int, int, int]]:
    """Receiver, sequence, first and last position of each part until nothing is left."""
    parts = []
    while (part := take(stage, turn)) is not None:
        parts.append((part.to.to, *span(part)))
        stage.now += MAX_PAUSE_S
    return parts


def span(part: act.SendKvPart) -> tuple[int, int, int]:
    """Sequence, first and last position of a part."""
    return part.sequence, part.start, part.start + len(part.tokens)


# --- which -----------------------------------------------------------------------------------------------------------


def test_finished_blocks_go_in_order_with_the_sequence_s_record_first(stage: StageBench) -> None:
    """The record has no tokens, which come with the parts, and no source, which the receiver need not have."""
    assert send(stage, to()) == [act.ConnectKvTargets((HOLDER,))]
    grow(stage, s1=70)
    first, second, third = take(stage), take(stage), take(stage)
    assert first == act.SendKvPart(
        HOLDER, 1, stage.core.lineage, 1, LAYERS, 0, tuple(range(10, 42)), opened(1, tokens=(), limit=512)
    )
    assert second == act.SendKvPart(HOLDER, 1, stage.core.lineage, 1, LAYERS, 32, tuple(range(42, 74)), None)
    assert third is None
    run(stage, 2, 1, 70, 25)
    assert take(stage) is None
    run(stage, 3, 1, 95, 1)
    stage.now += PAUSE_S
    assert all_parts(stage) == [("w0.1", 1, 64, 96)]


def test_new_blocks_of_all_sequences_go_together_after_a_rest(stage: StageBench) -> None:
    """A message costs as much as some tokens, so a target that has everything rests; not if a change of plan waits."""
    grow(stage, s1=64, s2=64, s3=70)
    send(stage, to())
    block_s = ROUND_SHARE * PAUSE_S / 5
    turn_of(stage, block_s=block_s)
    assert [span(part) for part in turn_of(stage, block_s=block_s)] == [(2, 0, 64), (3, 0, 64), (1, 32, 64)]
    for number, sequence in enumerate((1, 2), 4):
        run(stage, number, sequence, 64, 32)
    stage.now += PAUSE_S / 2
    assert not stage.core.wants_kv_turn(IDLE, stage.now)
    assert stage.core.next_kv_turn_at == pytest.approx(stage.now + PAUSE_S / 2)
    run(stage, 6, 3, 70, 26)
    stage.now += PAUSE_S / 2 + 1e-6
    assert [span(part) for part in turn_of(stage, block_s=block_s)] == [(1, 64, 96), (2, 64, 96), (3, 64, 96)]
    run(stage, 7, 1, 96, 32)
    send(stage, to(held=positions(s1=96, s2=96, s3=96), is_urgent=True))
    assert [span(part) for part in turn_of(stage)] == [(1, 96, 128)]
    run(stage, 8, 2, 96, 32)
    assert [span(part) for part in turn_of(stage)] == [(2, 96, 128)]


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.0001, PAUSE_S), (0.0006, 0.2), (0.01, MAX_PAUSE_S)])
def test_a_rest_is_as_long_as_the_round_was_expensive(took_s: float, rest_s: float, stage: StageBench) -> None:
    """A busy machine takes longer for a round, and has fewer. While all targets rest, no turn is asked for."""
    grow(stage, s1=32)
    assert stage.core.next_kv_turn_at == inf
    send(stage, to())
    assert stage.core.next_kv_turn_at <= stage.now
    turn_of(stage, block_s=took_s)
    run(stage, 2, 1, 32, 32)
    assert stage.core.next_kv_turn_at == pytest.approx(stage.now + rest_s)


def test_a_target_that_lags_behind_does_not_rest(stage: StageBench) -> None:
    """Long prompts are copied turn after turn in idle time."""
    grow(stage, s1=512, s2=512)
    send(stage, to())
    began, num_blocks = stage.now, 0
    while parts := turn_of(stage, block_s=PART_S / 2):
        num_blocks += sum(map(num_blocks_of, parts))
        stage.now += 2 * LONG_PART_S / IDLE_SHARE
    assert num_blocks == 32
    assert stage.now - began <= 6 * 2 * LONG_PART_S / IDLE_SHARE


def test_a_turn_has_a_limited_number_of_sequences(stage: StageBench) -> None:
    """The others follow at once."""
    grow(stage, **{f"s{number}": 32 for number in range(1, MAX_PARTS + 4)})
    send(stage, to())
    assert [len(turn_of(stage, block_s=1e-6)) for _ in range(4)] == [1, MAX_PARTS, 2, 0]


def test_sequences_and_targets_take_turns(stage: StageBench) -> None:
    """The one whose last turn is longest ago is next."""
    grow(stage, s1=96, s2=64)
    send(stage, to(), to(SECOND))
    assert all_parts(stage) == [
        ("w0.1", 1, 0, 32),
        ("w2.1", 1, 0, 32),
        ("w0.1", 2, 0, 32),
        ("w2.1", 2, 0, 32),
        ("w0.1", 1, 32, 64),
        ("w2.1", 1, 32, 64),
        ("w0.1", 2, 32, 64),
        ("w2.1", 2, 32, 64),
        ("w0.1", 1, 64, 96),
        ("w2.1", 1, 64, 96),
    ]


def test_a_target_may_have_two_ranges_of_layers(stage: StageBench) -> None:
    grow(stage, s1=40)
    near, far = LayerRange(0, 1), LayerRange(2, 3)
    assert send(stage, to(layers=near), to(layers=far)) == [act.ConnectKvTargets((HOLDER,))]
    assert [part.layers for part in (take(stage), take(stage)) if part is not None] == [near, far]
    assert take(stage) is None


def test_what_a_change_of_plan_awaits_goes_first_then_what_is_urgent(stage: StageBench) -> None:
    grow(stage, s1=40)
    third = Edge("w3.1", "tcp://third")
    send(stage, to(), to(SECOND, is_urgent=True), to(third, until=positions(s1=40), is_urgent=True))
    assert [part[0] for part in all_parts(stage)] == ["w3.1", "w3.1", "w2.1", "w0.1"]


def test_until_is_exact_and_repeats_no_more_than_a_block(stage: StageBench) -> None:
    """It goes on from what was sent, unless the order names what is held; sequences that it does not name stay."""
    grow(stage, s1=70, s2=70, s3=70)
    send(stage, to())
    turn_of(stage, block_s=PART_S / 2)
    turn_of(stage, block_s=PART_S / 2)
    send(stage, to(until=positions(s1=70, s2=66), held=positions(s2=0)))
    assert [span(part) for part in turn_of(stage)] == [(2, 0, 66), (1, 64, 70)]
    send(stage, to(until=positions(s1=70)))
    assert all_parts(stage) == []


def test_until_waits_for_a_step_in_flight(stage: StageBench) -> None:
    """The order may come before the last positions are computed."""
    grow(stage, s1=64)
    send(stage, to(until=positions(s1=66)))
    assert len(all_parts(stage)) == 2
    run(stage, 2, 1, 64, 2)
    assert all_parts(stage) == [("w0.1", 1, 64, 66)]


def test_an_order_says_what_is_held(stage: StageBench) -> None:
    """Also less than was sent: parts were lost. A held position within a block has its block sent again."""
    grow(stage, s1=96, s2=96)
    send(stage, to())
    assert len(all_parts(stage)) == 6
    send(stage, to(held=positions(s1=96, s2=40)))
    assert all_parts(stage) == [("w0.1", 2, 32, 64), ("w0.1", 2, 64, 96)]
    send(stage, to())
    assert len(all_parts(stage)) == 6


def test_a_sequence_that_begins_again_is_sent_from_its_beginning(stage: StageBench) -> None:
    grow(stage, s1=70)
    send(stage, to())
    all_parts(stage)
    item = opened(1, tokens=tuple(range(10, 522)), limit=512)
    run(stage, 2, 1, 0, 40, release=(1,), open=(item,))
    assert all_parts(stage) == [("w0.1", 1, 0, 32)]


def test_a_truncation_has_what_lies_behind_it_sent_again(stage: StageBench) -> None:
    grow(stage, s1=100)
    send(stage, to())
    all_parts(stage)
    run(stage, 2, 1, 40, 60, truncate=(SequencePosition(1, 40),))
    stage.now += PAUSE_S
    assert all_parts(stage) == [("w0.1", 1, 32, 64), ("w0.1", 1, 64, 96)]


def test_a_target_outside_of_the_stage_s_layers_is_left_out(stage: StageBench) -> None:
    grow(stage, s1=40)
    assert send(stage, to(layers=LayerRange(2, 4)), to(layers=LayerRange(1, 1))) == []
    assert take(stage) is None
    assert stage.core.counters["kv_impossible_targets"] == 2


# --- how much and when -----------------------------------------------------------------------------------------------


def test_parts_grow_until_they_take_their_time(stage: StageBench) -> None:
    """As many blocks as are read within a millisecond, in idle time within four, and never more than the most."""
    grow(stage, **{f"s{number}": 512 for number in range(1, 7)})
    send(stage, to())
    stage.now += 1.0
    sizes = [sum(map(num_blocks_of, turn_of(stage, turn, PART_S / 4))) for turn in (BUSY, BUSY, IDLE)]
    assert sizes == [1, 4, 16]
    for _ in range(40):
        send(stage, to())
        stage.now += 1.0
        parts = turn_of(stage, IDLE, 1e-6)
    assert sum(map(num_blocks_of, parts)) == MAX_BLOCKS


def test_a_part_stops_where_the_turn_s_time_ends(stage: StageBench) -> None:
    """The sequence whose last turn is longest ago goes first, and the last one gets what is left."""
    grow(stage, s1=96, s2=96, s3=40)
    send(stage, to())
    turn_of(stage, block_s=PART_S)
    assert [span(part) for part in turn_of(stage, block_s=PART_S)] == [(2, 0, 96), (3, 0, 32)]
    assert [span(part) for part in turn_of(stage, block_s=PART_S)] == [(1, 32, 96)]


def test_between_steps_copies_take_their_share_of_the_time(stage: StageBench) -> None:
    """At most 2 % of the passing time, on average; what was not used is saved up for a moment only."""
    grow(stage, s1=512, s2=512, s3=512, s4=512)
    send(stage, to())
    stage.now += 3600.0
    spent = 0.0
    for _ in range(1000):
        stage.now += 0.01
        if take(stage, BUSY, PART_S) is not None:
            spent += PART_S
    assert spent == pytest.approx(min(64 * PART_S, SAVED_S + 10.0 * SHARE), abs=2 * PART_S)


def test_an_urgent_target_has_half_of_the_time(stage: StageBench) -> None:
    grow(stage, s1=512, s2=512, s3=512, s4=512)
    send(stage, to(is_urgent=True))
    began, spent = stage.now, 0.0
    while (part := take(stage, BUSY, 0.01)) is not None or spent < 0.4:
        spent += 0.01 * (part is not None)
        stage.now += 0.001
    assert spent / (stage.now - began) == pytest.approx(URGENT_SHARE, rel=0.2)


def test_idle_time_has_a_budget_of_its_own(stage: StageBench) -> None:
    """Copies take a quarter of it, since other stages may compute on the same cores. It is not charged to the time in
    which steps wait, and it is used when that is spent."""
    grow(stage, s1=512, s2=512, s3=512, s4=512)
    send(stage, to())
    while take(stage, BUSY, SAVED_S) is not None:
        pass
    spent = 0.0
    for _ in range(100):
        stage.now += 0.001
        spent += LONG_PART_S * bool(turn_of(stage, IDLE, LONG_PART_S))
    assert spent == pytest.approx(SAVED_S + 0.1 * IDLE_SHARE, abs=2 * LONG_PART_S)
    stage.now += 2.0
    assert take(stage, BUSY) is not None


def test_an_urgent_target_has_all_idle_time(stage: StageBench) -> None:
    grow(stage, s1=512)
    send(stage, to(is_urgent=True))
    assert [len(turn_of(stage, IDLE, 1.0)) for _ in range(17)] == [1] * 16 + [0]


def test_what_a_change_of_plan_awaits_needs_no_budget(stage: StageBench) -> None:
    grow(stage, s1=512)
    send(stage, to(until=positions(s1=500)))
    parts = [turn_of(stage, BUSY, 1.0) for _ in range(16)]
    assert span(parts[-1][0]) == (1, 480, 500)


def test_a_blocked_target_is_left_out(stage: StageBench) -> None:
    """However long; the others go on."""
    grow(stage, s1=70)
    send(stage, to(), to(SECOND))
    blocked = KvTurn(is_idle=True, blocked=frozenset(("w0.1",)))
    assert [part[0] for part in all_parts(stage, blocked)] == ["w2.1", "w2.1"]
    stage.now += 3600.0
    assert all_parts(stage, blocked) == []
    assert [part[0] for part in all_parts(stage)] == ["w0.1", "w0.1"]


def test_a_part_that_could_not_be_sent_is_sent_later(stage: StageBench) -> None:
    """Its target is left alone for a while, then the same part comes again."""
    grow(stage, s1=70)
    send(stage, to())
    take(stage)
    lost = take(stage, num_bytes=0)
    assert take(stage) is None
    stage.now += FAILED_PAUSE_S
    assert take(stage) == lost


def test_one_part_at_a_time(stage: StageBench) -> None:
    """Until the shell has carried it out, there is no next one; a part cut meanwhile is not counted as sent."""
    grow(stage, s1=100)
    send(stage, to())
    (part,) = parts_in(stage.feed(IDLE))
    assert stage.feed(IDLE) == []
    run(stage, 2, 1, 20, 80, truncate=(SequencePosition(1, 20),))
    stage.feed(KvPartsTaken(part.to.to, 9, LONG_PART_S))
    assert all_parts(stage)[0] == ("w0.1", 1, 0, 32)


def test_an_order_that_replaces_another_forgets_its_part(stage: StageBench) -> None:
    grow(stage, s1=40)
    send(stage, to())
    (part,) = parts_in(stage.feed(IDLE))
    send(stage, to(SECOND))
    stage.feed(KvPartsTaken(part.to.to, 0, LONG_PART_S))
    assert all_parts(stage) == [("w2.1", 1, 0, 32)]
    assert stage.core.sequences[1].sent.keys() == {("w2.1", LAYERS)}


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_fence_ends_sending(stage: StageBench) -> None:
    grow(stage, s1=40)
    send(stage, to())
    assert act.ConnectKvTargets(()) in stage.order(Fence(epoch=2))
    assert take(stage) is None
    assert stage.core.sequences[1].sent == {}


def test_only_a_stage_of_the_plan_sends(make_stage: MakeStage) -> None:
    """Not before it is activated, and not for another plan."""
    stage = make_stage(0, 3)
    assert send(stage, to()) == []
    activate(stage, 2)
    assert send(stage, to()) == []
    assert stage.core.counters["stale_orders"] == 2


def test_nothing_is_sent_to_a_blocked_key(stage: StageBench) -> None:
    key = "a" * 64
    grow(stage, s1=40)
    keyed = Edge("w3.1", f"tcp://{key}@host:1")
    send(stage, to(keyed), to(SECOND))
    actions = stage.order(BlockKey(epoch=1, key=key))
    assert act.ConnectKvTargets((SECOND,)) in actions
    assert act.DisconnectKey(key) in actions
    assert [part[0] for part in all_parts(stage)] == ["w2.1"]


def test_a_parked_worker_sends_nothing(stage: StageBench) -> None:
    grow(stage, s1=40)
    send(stage, to())
    stage.core.membership.on_welcome(WELCOME)
    stage.now += 60.0
    stage.feed(StageTick())
    assert stage.core.is_parked
    assert take(stage) is None
    stage.order(LeaseRenewed())
    assert take(stage) is not None


def test_only_sequences_with_a_new_block_are_looked_at(stage: StageBench) -> None:
    """Turns come after every step: without a new block they cost nothing."""
    grow(stage, s1=40, s2=40)
    send(stage, to())
    all_parts(stage)
    run(stage, 3, 1, 40, 1)
    sender = stage.core.exchange.sender
    assert not sender.unsent
    run(stage, 4, 1, 41, 23)
    assert sender.unsent.keys() == {1}


def test_the_beginning_of_a_fork_is_sent_at_once(stage: StageBench) -> None:
    """Its first rows need not finish a block."""
    grow(stage, s1=70)
    send(stage, to())
    all_parts(stage)
    fork = msgspec.structs.replace(opened(2, tokens=tuple(range(10, 522)), limit=512), source=1, shared=64)
    run(stage, 2, 2, 64, 3, open=(fork,))
    part = take(stage)
    assert part is not None
    assert part.open == opened(2, tokens=(), limit=512), "the receiver need not have the source"
    assert all_parts(stage) == [("w0.1", 2, 32, 64)]
