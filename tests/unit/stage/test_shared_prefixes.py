"""Sequences that go on sharing a prefix over a change of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.events import KvOverfull
from swarm.stage.sequences import StoredSequence
from swarm.stage.shared_prefixes import SharedPrefixes
from swarm.wire.messages import (
    Activate,
    DataPathError,
    HeldSequence,
    LayerRange,
    LogRange,
    Open,
    RangePosition,
    Replay,
    Row,
    SharedPrefix,
    Step,
)
from swarm.wire.shared_positions import SharedPositions
from tests.unit.stage.bench import StageBench, step_of

UNIT = 32
PROMPT = tuple(range(1, 41))
LINK = SharedPrefix(2, 1, UNIT)
SHARED: dict[str, Any] = {"shared": (LINK,), "share_unit": UNIT}


def record(sequence: int, tokens: tuple[int, ...] = PROMPT, **fields: object) -> Open:
    return msgspec.structs.replace(Open(sequence, SamplingParams(), 5, 40, 64, tokens), **fields)


@pytest.fixture
def stage(make_stage: Callable[..., StageBench]) -> StageBench:
    """Two sequences begin alike; each has computed 42 positions."""
    stage = make_stage()
    stage.activate(share_unit=UNIT)
    stage.run(step_of(1, Row(1, 0, 40, False), open=(record(1),), tokens=PROMPT))
    fork = record(2, source=1, shared=UNIT)
    stage.run(step_of(2, Row(2, UNIT, 8, False), open=(fork,), tokens=PROMPT[UNIT:]))
    for sequence in (1, 2):
        stage.run(step_of(2 + sequence, Row(sequence, 40, 2, False), tokens=(50 + sequence, 60 + sequence)))
    assert stage.executor.shared.saved == UNIT
    return stage


def shares(actions: list[act.Action]) -> list[act.SharePrefix]:
    return [action for action in actions if isinstance(action, act.SharePrefix)]


def replay(sequence: int, start: int, through: LayerRange, **fields: object) -> Step:
    tokens = (*PROMPT, 50 + sequence, 60 + sequence)
    count = len(tokens) - start
    return step_of(
        0,
        Row(sequence, start, count, False),
        **({"replay": True, "through": through, "tokens": tokens[start:], "epoch": 2} | fields),
    )


def test_what_stays_counts_once_again(stage: StageBench) -> None:
    actions = stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    assert shares(actions) == [act.SharePrefix(2, 1, UNIT, is_mapped=True)]
    assert stage.executor.shared.saved == UNIT
    assert shares(stage.order(Activate(epoch=2, first_step=5, live=(), **SHARED))) == []  # the same order again


def test_a_new_layer_gets_the_prefix_once_the_source_has_it(stage: StageBench) -> None:
    """Before that it counts only; then the other's own positions are replayed, if it lacks any."""
    stage.stop = 5
    actions = stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    assert shares(actions) == [act.SharePrefix(2, 1, UNIT, is_mapped=False)]
    assert stage.executor.shared.saved == UNIT
    new = LayerRange(3, 5)
    stage.order(Replay(epoch=2, sequence=1, boundary=3, start=0, stop=42, through=new))
    actions = stage.compute()
    assert shares(actions) == [act.SharePrefix(2, 1, UNIT, is_mapped=True)]
    assert stage.executor.shared.saved == UNIT
    actions = stage.order(Replay(epoch=2, sequence=2, boundary=3, start=UNIT, stop=42, through=new))
    assert shares(actions) == []
    stage.compute()
    assert stage.core.sequences[2].kv == [RangePosition(LayerRange(0, 5), 42)]
    chains = stage.executor.chains
    assert all(chains[1][layer][:UNIT] == chains[2][layer][:UNIT] for layer in range(5))
    assert chains[1][4][41] != chains[2][4][41]
    assert LogRange(2, 5, UNIT, 42) in stage.core.log.ranges()


def test_a_stage_that_holds_nothing_opens_the_sequence_with_its_first_replay(
    make_stage: Callable[..., StageBench],
) -> None:
    """It begins behind the prefix, which is mapped at once."""
    stage = make_stage(first=3, stop=6)
    stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    stage.step(replay(1, 0, LayerRange(3, 6), open=(record(1),)), np.ones((42, 2), np.float32))
    stage.compute()
    actions = stage.step(replay(2, UNIT, LayerRange(3, 6), open=(record(2),)), np.ones((10, 2), np.float32))
    assert [type(action) for action in actions] == [act.OpenSequence, act.SharePrefix, act.Compute]
    stage.compute()
    assert stage.core.inventory() == tuple(
        HeldSequence(sequence, (RangePosition(LayerRange(3, 6), 42),)) for sequence in (1, 2)
    )
    assert stage.executor.shared.saved == UNIT


def test_the_log_s_holder_sends_the_record_of_a_sequence_that_begins_behind_its_prefix(stage: StageBench) -> None:
    """The next stage may not have it."""
    stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    actions = stage.order(Replay(epoch=2, sequence=2, boundary=3, start=UNIT, stop=42, through=LayerRange(3, 6)))
    (sent,) = [action.step for action in actions if isinstance(action, act.SendStep)]
    assert [item.sequence for item in sent.open] == [2]
    actions = stage.order(Replay(epoch=2, sequence=2, boundary=3, start=40, stop=42, through=LayerRange(3, 6)))
    (sent,) = [action.step for action in actions if isinstance(action, act.SendStep)]
    assert sent.open == ()


def test_without_the_source_nothing_is_guessed(make_stage: Callable[..., StageBench]) -> None:
    stage = make_stage(first=3, stop=6)
    stage.activate(2, 5, ((2, 42),), **SHARED)
    actions = stage.step(replay(2, UNIT, LayerRange(3, 6), open=(record(2),)), np.ones((10, 2), np.float32))
    (trouble,) = [a.message for a in actions if isinstance(a, act.SendToBroker)]
    assert isinstance(trouble, DataPathError)
    assert trouble.misplaced
    assert stage.computing is None


def test_a_prefix_that_could_not_be_mapped_is_not_held(stage: StageBench) -> None:
    stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    stage.feed(KvOverfull("no mapping", (2,)))
    assert list(stage.core.sequences) == [1]


# --- sequences that lack different things -----------------------------------------------------------------------------

ALL = LayerRange(0, 3)
CHAIN = (LINK, SharedPrefix(3, 2, UNIT + 8))


def stored(tokens: tuple[int, ...] = PROMPT, *kv: RangePosition) -> StoredSequence:
    return StoredSequence(record(1, tokens), list(tokens), list(kv or (RangePosition(ALL, len(tokens)),)))


def account(actions: list[act.Action]) -> SharedPositions:
    """What the executor counts."""
    positions = SharedPositions(8)
    for action in shares(actions):
        if not positions.inherited(action.sequence):
            positions.fork(action.sequence, action.source, action.position)
    return positions


def test_a_copied_prefix_gives_way_to_the_source_s() -> None:
    """The sequence has all of its positions and runs on; the pages are shared once the source has them."""
    source = stored(PROMPT, RangePosition(LayerRange(0, 2), 40), RangePosition(LayerRange(2, 3), 0))
    prefixes = SharedPrefixes([], {1: source, 2: stored()})
    prefixes.start_plan((LINK,), ALL)
    prefixes.apply_all(ALL)
    assert prefixes.actions == [act.SharePrefix(2, 1, UNIT, is_mapped=False)]
    source.advance(ALL, 40)
    prefixes.apply_all(ALL)
    prefixes.apply_all(ALL)
    assert prefixes.actions[1:] == [act.SharePrefix(2, 1, UNIT, is_mapped=True)]


def test_a_source_counts_its_own_prefix_first() -> None:
    """It is not open yet, or its own source isn't: in the end the stage counts what the broker counts."""
    expected = SharedPositions(8)
    for link in CHAIN:
        expected.fork(link.sequence, link.source, link.position)
    for late in (1, 2):
        sequences = {number: stored() for number in (1, 2, 3) if number != late}
        prefixes = SharedPrefixes([], sequences)
        prefixes.start_plan(CHAIN, ALL)
        assert prefixes.actions == []
        sequences[late] = stored()
        prefixes.apply_all(ALL)
        assert [action.sequence for action in shares(prefixes.actions)] == [2, 3]
        counted = account(prefixes.actions)
        assert (counted.saved, counted.num_mappings) == (expected.saved, expected.num_mappings)


def test_a_chain_goes_on_without_its_first_sequence() -> None:
    """It has ended before it was opened here."""
    prefixes = SharedPrefixes([], {2: stored(), 3: stored()})
    prefixes.start_plan(CHAIN, ALL)
    prefixes.forget((1,))
    prefixes.apply_all(ALL)
    assert prefixes.actions == [act.SharePrefix(3, 2, UNIT + 8, is_mapped=True)]


def test_a_released_sequence_has_no_link_any_more(stage: StageBench) -> None:
    """Under the same number it is admitted anew."""
    stage.stop = 5
    stage.activate(2, 5, ((1, 42), (2, 42)), **SHARED)
    stage.run(step_of(5, epoch=2, release=(2,)))
    stage.order(Replay(epoch=2, sequence=1, boundary=3, start=0, stop=42, through=LayerRange(3, 5)))
    assert shares(stage.compute()) == []
    assert not stage.core.store.prefixes.position(2)


def test_other_tokens_share_nothing() -> None:
    prefixes = SharedPrefixes([], {1: stored(), 2: stored((0, *PROMPT[1:]))})
    prefixes.start_plan((LINK,), ALL)
    assert prefixes.actions == []
