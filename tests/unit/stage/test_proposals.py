"""Proposed tokens in a stage: what is accepted, what is refused as a violation, and what no other worker may get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.events import ComputeFenced, KvPartsTaken
from swarm.stage.executor import Batch, SampleJob, is_end_token
from swarm.stage.kv_sender import MAX_PAUSE_S
from swarm.stage.proposals import certain_rows, proposal_error
from swarm.stage.shell.pieces import PIECE_POSITIONS, forward_in_pieces, split_batch
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import (
    BLOCK,
    MAX_PROPOSED,
    DataPathError,
    Edge,
    Fence,
    HeldSequence,
    KvTarget,
    LayerRange,
    Lineage,
    Open,
    ProposedTail,
    RangePosition,
    Row,
    Sampled,
    SendKv,
    SequencePosition,
    Step,
    StepDone,
)
from tests.unit.stage.bench import WELCOME, StageBench, step_of
from tests.unit.stage.kv_bench import IDLE, num_blocks_of, parts_in, positions
from tests.unit.stage.spill_bench import SpillBench

MakeStage = Callable[..., StageBench]
LIMIT = 512
HOLDER = Edge("w1.1", "tcp://holder")


@pytest.fixture
def whole(make_stage: MakeStage) -> StageBench:
    """A stage of all layers: it embeds tokens and draws others."""
    bench = make_stage(0, 6)
    bench.activate()
    return bench


def record(sequence: int, *tokens: int, params: SamplingParams | None = None, source: int | None = None) -> Open:
    return Open(sequence, params or SamplingParams(), 5, 3, LIMIT, tokens, source, len(tokens) - 1 if source else 0)


def begin(stage: StageBench, sequence: int = 1, params: SamplingParams | None = None, prompt: int = 3) -> int:
    """Compute a prompt; return the token drawn after it."""
    number, tokens = stage.core.steps.next_step, tuple(range(20, 20 + prompt))
    item = Open(sequence, params or SamplingParams(), 5, prompt, LIMIT, tokens)
    actions = stage.run(step_of(number, Row(sequence, 0, prompt, True), open=(item,), tokens=tokens))
    return done_of(actions).sampled[0].token if stage.stop == 6 else 0


def propose(
    stage: StageBench, start: int, token: int, *guess: int, sequence: int = 1, cut: bool = False, **fields: object
) -> Step:
    """Return a step with a certain token at a position and the tokens proposed after it."""
    tails = {"proposed": (ProposedTail(sequence, len(guess)),)} if guess else {}
    cuts = {"truncate": (SequencePosition(sequence, start),)} if cut else {}
    row = Row(sequence, start, 1 + len(guess), True)
    return step_of(stage.core.steps.next_step, row, tokens=(token, *guess), **(tails | cuts | fields))


def done_of(actions: list[act.Action]) -> StepDone:
    (done,) = (action.done for action in actions if isinstance(action, act.SendDone))
    return done


def errors_in(actions: list[act.Action]) -> list[str]:
    return [
        a.message.reason for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)
    ]


def continuation(make_stage: MakeStage, count: int, params: SamplingParams | None = None) -> list[Sampled]:
    """Draw one token a step, without proposals."""
    stage = make_stage(0, 6)
    stage.activate()
    drawn = [Sampled(1, 3, begin(stage, params=params), ())]
    for position in range(3, 2 + count):
        drawn += done_of(stage.run(propose(stage, position, drawn[-1].token))).sampled
    return drawn


# --- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, logprobs=0)])
@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_a_step_yields_the_accepted_tokens_and_one_more(
    make_stage: MakeStage, whole: StageBench, num_right: int, sampling: SamplingParams
) -> None:
    """The same as steps without proposals, with log probabilities; what was refused leaves no trace."""
    expected = continuation(make_stage, 12, sampling)
    tokens = [item.token for item in expected]
    begin(whole, params=sampling)
    guess = [*tokens[1 : 1 + num_right], *((token + 1) % 97 for token in tokens[1 + num_right : 6])]
    done = done_of(whole.run(propose(whole, 3, tokens[0], *guess)))
    assert done.kv == (SequencePosition(1, 4 + num_right),)
    assert list(done.sampled) == expected[1 : 2 + num_right]
    at = 4 + num_right
    again = done_of(whole.run(propose(whole, at, tokens[at - 3], *tokens[at - 2 : at + 1], cut=num_right < 5)))
    assert again.kv == (SequencePosition(1, at + 4),)
    assert list(again.sampled) == expected[at - 2 : at + 2]


def test_sequences_of_a_step_are_verified_apart(make_stage: MakeStage, whole: StageBench) -> None:
    """A row with proposals beside one without, in the order of the rows."""
    tokens = [item.token for item in continuation(make_stage, 5)]
    begin(whole)
    other = begin(whole, 2, prompt=5)
    rows = (Row(2, 5, 1, True), Row(1, 3, 4, True))
    tails = (ProposedTail(1, 3),)
    step = step_of(3, *rows, tokens=(other, *tokens[:3], 96), proposed=tails)
    done = done_of(whole.run(step))
    assert done.kv == (SequencePosition(2, 6), SequencePosition(1, 6))
    assert [(item.sequence, item.position) for item in done.sampled] == [(2, 6), (1, 4), (1, 5), (1, 6)]
    assert certain_rows(step) == (Row(2, 5, 1, True), Row(1, 3, 1, True))


def test_nothing_is_drawn_after_an_accepted_end(make_stage: MakeStage, whole: StageBench) -> None:
    """The answer is complete there: a failure behind it must not count."""
    tokens = [item.token for item in continuation(make_stage, 6)]
    params = SamplingParams(stop_token_ids=(tokens[2],))
    begin(whole, params=params)
    done = done_of(whole.run(propose(whole, 3, *tokens[:5])))
    assert [item.token for item in done.sampled] == tokens[1:3]
    assert done.kv == (SequencePosition(1, 5),)


@pytest.mark.parametrize(("ignore_eos", "is_end"), [(False, True), (True, False)])
def test_which_tokens_end_an_answer(ignore_eos: bool, is_end: bool) -> None:
    params = SamplingParams(stop_token_ids=(9,), ignore_eos=ignore_eos)
    assert is_end_token(9, params, (0,))
    assert is_end_token(0, params, (0,)) is is_end
    assert not is_end_token(8, params, (0,))


def test_a_late_grammar_accepts_nothing(make_stage: MakeStage, whole: StageBench) -> None:
    """Its row is certain up to the token that was known."""
    tokens = [item.token for item in continuation(make_stage, 5)]
    begin(whole)
    whole.executor.defer_every = 1
    done = done_of(whole.run(propose(whole, 3, *tokens[:4])))
    assert (done.late, done.sampled, done.kv) == ((1,), (), (SequencePosition(1, 4),))
    whole.executor.defer_every = 0
    again = done_of(whole.run(propose(whole, 3, *tokens[:4], cut=True)))
    assert [item.token for item in again.sampled] == tokens[1:5]


def test_pieces_verify_what_the_whole_verifies() -> None:
    """A device with too little memory computes a row in pieces; its draws need the positions of one piece."""
    count, num_proposed = 3 * PIECE_POSITIONS, PIECE_POSITIONS + 8
    history = [(5 * position) % 97 for position in range(count)]

    def result(forward: Callable[[FakeExecutor, Batch], object], guess: list[int]) -> object:
        executor = FakeExecutor(fake_manifest(6))
        executor.prepare(LayerRange(0, 6), (), 4, lambda done, total: None)
        executor.activate(LayerRange(0, 6))
        executor.open(1, LIMIT)
        seen = [*history, *guess]
        job = SampleJob(0, SamplingParams(), 5, seen, 3, len(guess))
        proposed = {0: len(guess)} if guess else {}
        batch = Batch((Row(1, 0, len(seen), True),), np.asarray(seen), None, (job,), proposed=proposed)
        return forward(executor, batch)

    def directly(executor: FakeExecutor, batch: Batch) -> object:
        done = executor.forward(batch, lambda: False, lambda: None)
        return done.sampled, done.certain

    def by_pieces(executor: FakeExecutor, batch: Batch) -> object:
        done = forward_in_pieces(executor, batch, lambda: False, lambda: None)
        assert [piece.rows[0].count for piece in split_batch(batch)] == [*[PIECE_POSITIONS] * 2, 31, num_proposed + 1]
        return done.sampled, done.certain

    guess: list[int] = []
    for _ in range(num_proposed):
        sampled, _ = result(directly, guess)  # type: ignore[misc]
        guess.append(sampled[-1].token)
    expected = result(directly, guess)
    assert expected[1] == (SequencePosition(1, count + num_proposed),)  # type: ignore[index]
    assert result(by_pieces, guess) == expected


# --- violations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tails", "reason"),
    [
        ([(1, 4)], "4 tokens are proposed for sequence 1, whose row has 4 positions"),
        ([(7, 1)], "tokens are proposed for sequence 7, which has no row in the step, or twice"),
        ([(1, 1), (1, 2)], "tokens are proposed for sequence 1, which has no row in the step, or twice"),
        ([(2, 1)], "tokens are proposed for sequence 2, whose row draws none"),
    ],
)
def test_impossible_proposals_are_reported_once(whole: StageBench, tails: list[tuple[int, int]], reason: str) -> None:
    """And the step is not computed."""
    begin(whole)
    begin(whole, 2)
    rows = (Row(1, 3, 4, True), Row(2, 3, 2, False))
    step = step_of(3, *rows, proposed=tuple(ProposedTail(*tail) for tail in tails))
    assert proposal_error(step) == reason
    actions = whole.step(step)
    assert errors_in(actions) == [f"step 3 of epoch 1: {reason}"]
    assert whole.computing is None
    assert whole.core.sequences[1].position() == 3


def test_a_step_has_no_more_draws_than_its_result_may_report() -> None:
    """Rows and proposals together."""
    rows = tuple(Row(sequence, 0, MAX_PROPOSED + 1, True) for sequence in range(64))
    tails = tuple(ProposedTail(row.sequence, MAX_PROPOSED) for row in rows)
    step = step_of(1, *rows, proposed=tails)
    assert proposal_error(step) == "4160 tokens may be drawn in the step, which is more than 4096"
    assert proposal_error(step_of(1, *rows, proposed=tails[1:])) is None


# --- unverified tokens -----------------------------------------------------------------------------------------------


def held_positions(stage: StageBench) -> tuple[HeldSequence, ...]:
    return stage.core.hello_inventory()


def test_unverified_tokens_are_in_no_inventory(stage: StageBench) -> None:
    """Hello lists a sequence up to its verified position, with digests of verified tokens; the next step verifies."""
    begin(stage, prompt=60)
    tokens = tuple(range(20, 80))

    def listed(position: int, tokens: tuple[int, ...]) -> HeldSequence:
        kv = (RangePosition(LayerRange(0, 3), position),)
        return HeldSequence(1, kv, prefix_digests(tokens, position), LIMIT)

    stage.run(propose(stage, 60, 5, 6, 7, 8, 9, 10))
    assert stage.core.sequences[1].position() == 66
    assert held_positions(stage) == (listed(61, (*tokens, 5)),)
    assert stage.core.inventory() == (HeldSequence(1, (RangePosition(LayerRange(0, 3), 61),)),)
    stage.run(propose(stage, 64, 50, 51, cut=True))
    assert held_positions(stage) == (listed(65, (*tokens, 5, 6, 7, 8, 50)),)
    stage.run(propose(stage, 66, 52))
    assert held_positions(stage) == (listed(67, (*tokens, 5, 6, 7, 8, 50, 51, 52)),)
    assert stage.core.sequences[1].unverified_from is None


@pytest.mark.parametrize("num_accepted", [0, 2])
def test_a_fenced_step_leaves_no_unverified_tokens(stage: StageBench, num_accepted: int) -> None:
    """Its positions are not there, and those before it are verified."""
    begin(stage)
    stage.run(propose(stage, 3, 5, 6, 7))
    at = 4 + num_accepted
    stage.step(propose(stage, at, 8, 9, cut=num_accepted < 2))
    stage.order(Fence(epoch=2))
    stage.computing = None
    stage.feed(ComputeFenced(1, 3))
    held = stage.core.sequences[1]
    assert (held.position(), held.unverified_from) == (at, None)
    stage.activate(2, live=((1, at),))
    tokens = [*[20, 21, 22, 5, 6, 7][:at], 8]
    assert errors_in(stage.run(propose(stage, at, 8, open=(record(1, *tokens),), epoch=2))) == []
    assert held.history == tokens


def test_a_plan_cuts_at_what_the_broker_names(stage: StageBench) -> None:
    """It has seen which proposals were accepted; the positions and logged inputs behind them go."""
    begin(stage)
    stage.run(propose(stage, 3, 5, 6, 7, 8))
    stage.activate(2, live=((1, 5),))
    held = stage.core.sequences[1]
    assert (held.position(), held.history, held.unverified_from) == (5, [20, 21, 22, 5, 6], None)
    assert stage.core.log.read(1, 3, 0, 5) is not None
    assert stage.core.log.read(1, 3, 0, 6) is None


def test_another_broker_finds_verified_tokens_only(make_stage: MakeStage) -> None:
    """It has not seen which proposals were accepted."""
    stage = make_stage()
    stage.order(WELCOME)
    stage.activate()
    begin(stage)
    stage.run(propose(stage, 3, 5, 6, 7))
    welcome = msgspec.structs.replace(WELCOME, epoch=40, lineage=Lineage("", 2))
    actions = stage.order(welcome)
    assert act.TruncateSequence(1, 4) in actions
    assert stage.core.sequences[1].position() == 4


def test_forks_reach_no_refused_tokens(stage: StageBench) -> None:
    """A new sequence may begin with accepted proposals, not with others."""
    begin(stage)
    stage.run(propose(stage, 3, 5, 6, 7))
    fork = record(2, 20, 21, 22, 5, 6, 60, source=1)
    assert errors_in(stage.run(step_of(3, Row(2, 5, 1, True), open=(fork,), tokens=(60,)))) == []
    assert stage.core.sequences[2].position() == 6
    wrong = record(3, 20, 21, 22, 5, 61, 62, source=1)
    actions = stage.run(step_of(4, Row(3, 5, 1, True), open=(wrong,), tokens=(62,)))
    assert errors_in(actions) == ["step 4 of epoch 1: sequence 3 is to begin as 1, with proposals that were refused"]


def copied(stage: StageBench) -> list[tuple[int, int]]:
    """Give turns until nothing is left to be sent; return the positions of all parts."""
    spans = []
    while True:
        stage.now += MAX_PAUSE_S
        parts = parts_in(stage.feed(IDLE))
        if not parts:
            return spans
        spans += [(part.start, part.start + len(part.tokens)) for part in parts]
        stage.feed(KvPartsTaken(parts[0].to.to, 9, 0.001 * sum(map(num_blocks_of, parts))))


@pytest.mark.parametrize("is_cut_first", [False, True])
def test_copies_contain_verified_blocks_only(stage: StageBench, is_cut_first: bool) -> None:
    """A block is sent when the step after its last token begins, though that step is in a later block. A step without
    a row of the sequence may cut it before."""
    stop = 2 * BLOCK
    begin(stage, prompt=stop - 3)
    stage.order(SendKv(epoch=1, targets=(KvTarget(HOLDER, LayerRange(0, 3)),)))
    assert copied(stage) == [(0, BLOCK)]
    stage.run(propose(stage, stop - 3, 1, 2, 3, 4, 5, 6))
    assert stage.core.sequences[1].position() == stop + 3
    assert copied(stage) == []
    if is_cut_first:
        number = stage.core.steps.next_step
        stage.run(step_of(number, truncate=(SequencePosition(1, stop + 1),)))
        assert copied(stage) == [(BLOCK, 2 * BLOCK)]
    stage.run(propose(stage, stop + 1, 7, 8, cut=not is_cut_first))
    assert copied(stage) == ([] if is_cut_first else [(BLOCK, 2 * BLOCK)])


def test_an_order_finds_verified_blocks_only(stage: StageBench) -> None:
    """A worker that is to hold copies from now on gets no block that ends in proposals."""
    begin(stage, prompt=2 * BLOCK - 3)
    stage.run(propose(stage, 2 * BLOCK - 3, 1, 2, 3, 4, 5, 6))
    stage.order(SendKv(epoch=1, targets=(KvTarget(HOLDER, LayerRange(0, 3)),)))
    assert copied(stage) == [(0, BLOCK)]


def test_what_a_change_of_plan_awaits_is_verified(stage: StageBench) -> None:
    """The broker names exact positions after the last step: it has seen what was accepted."""
    begin(stage, prompt=40)
    stage.run(propose(stage, 40, 1, 2, 3, 4))
    stage.order(SendKv(epoch=1, targets=(KvTarget(HOLDER, LayerRange(0, 3), until=positions(s1=43)),)))
    spans = copied(stage)
    assert spans[-1][1] == 43


def test_chunks_on_disk_contain_verified_tokens_only(make_stage: MakeStage, tmp_path: Path) -> None:
    stage = make_stage()
    stage.executor.capacity = 1 << 14
    stage.activate()
    disk = SpillBench(stage, tmp_path / "kv")
    disk.order_spilling(num_positions=256)
    disk.open(1)
    disk.compute(1, 0, 254)
    stage.run(propose(stage, 254, 1, 2, 3, 4))
    assert stage.core.sequences[1].position() == 258
    assert disk.write_all() == []
    stage.run(propose(stage, 257, 9, 8, cut=True))
    assert [(chunk.start, chunk.stop) for chunk in disk.write_all()] == [(0, 256)]
    assert stage.core.sequences[1].history[254:257] == [1, 2, 3]
