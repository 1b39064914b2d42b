"""States between positions: where a recurrent layer holds them, and to which of them a cut sequence falls back."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import torch

from swarm.broker.planner.problem import ModelSizes
from swarm.errors import IllegalMove, ModelError
from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import GRID, Span
from swarm.stage.attention.states import Segment, StateStore
from swarm.stage.engine.memory_plan import MemoryPlan
from swarm.stage.events import ComputeFenced
from swarm.stage.executor import FenceRaised
from swarm.testing import fake_manifest
from swarm.wire.messages import Fence, LayerRange, Open, Row
from tests.unit.stage.bench import StageBench, opened, step_of

CPU = torch.device("cpu")
STRIDE = 32


def row(store: StateStore, start: int, count: int, sequence: int = 1, layer: int = 0) -> list[Segment]:
    """Advance a layer whose state is the number of positions that it has seen."""
    segments = store.segments([Span(sequence, 0, start, count, ())], layer, 1)
    for segment in segments:
        segment.after.copy_(segment.before + segment.count)
    return segments


def test_a_row_is_split_where_its_states_are_kept() -> None:
    store = StateStore(CPU, STRIDE)
    assert [(s.offset, s.count) for s in row(store, 0, 70)] == [(0, 32), (32, 32), (64, 5), (69, 1)]
    assert [int(s.after) for s in row(store, 70, 1)] == [71]
    assert store.positions(1, 0) == [32, 64, 70, 71]


def test_the_last_whole_block_has_a_state() -> None:
    """If the sequence ends, another one can begin there."""
    store = StateStore(CPU, 128)
    row(store, 0, 70)
    assert store.positions(1, 0) == [64, 69, 70]
    row(store, 70, 25)
    assert store.positions(1, 0) == [64, 70, 94, 95]
    row(store, 95, 1)
    assert store.positions(1, 0) == [95, 96]
    row(store, 96, 140)
    assert store.positions(1, 0) == [96, 128, 224, 235, 236]
    store.shrink(1, 224)
    assert store.positions(1, 0) == [128, 224]


def test_an_ended_sequence_keeps_what_others_can_begin_with() -> None:
    store = StateStore(CPU, STRIDE)
    row(store, 0, 70)
    store.shrink(1, 69)
    assert store.positions(1, 0) == [32, 64, 69]
    store.fork(2, 1, 64)
    assert int(row(store, 64, 4, sequence=2)[-1].after) == 68


def test_a_step_may_be_repeated_from_its_begin() -> None:
    """A fence stopped it when one of two layers had gone on."""
    store = StateStore(CPU, STRIDE)
    for layer in (0, 1):
        row(store, 0, 40, layer=layer)
    row(store, 40, 5)
    for layer in (0, 1):
        assert int(row(store, 40, 3, layer=layer)[-1].after) == 43
    with pytest.raises(IllegalMove, match="layer 0 has no state of sequence 1 at 39"):
        row(store, 39, 1)


def test_a_cut_keeps_what_lies_before_it() -> None:
    store = StateStore(CPU, STRIDE)
    row(store, 0, 70)
    store.truncate(1, 69)
    assert store.positions(1, 0) == [32, 64, 69]
    store.truncate(1, 40)
    assert int(row(store, 32, 4)[-1].after) == 36


def test_a_fork_shares_states_and_goes_its_own_way() -> None:
    arena = KvArena(CPU, STRIDE)
    arena.open(1, 96)
    row(arena.states, 0, 70)
    num_bytes = arena.states.num_bytes
    arena.fork(2, 1, 64, 96)
    assert arena.states.num_bytes == num_bytes
    row(arena.states, 64, 2, sequence=2)
    assert arena.states.positions(1, 0) == [32, 64, 69, 70]
    assert arena.states.positions(2, 0) == [32, 64, 65, 66]
    with pytest.raises(IllegalMove, match="no state of sequence 1 at 50"):
        arena.fork(3, 1, 50, 96)


def test_states_leave_with_their_layers_and_sequences() -> None:
    arena = KvArena(CPU, STRIDE)
    arena.open(1, 96)
    for layer in (0, 1):
        row(arena.states, 0, 40, layer=layer)
    arena.keep_layers(LayerRange(1, 3))
    assert (arena.states.positions(1, 0), arena.states.positions(1, 1)) == ([], [32, 39, 40])
    arena.release(1)
    assert arena.states.num_bytes == 0


def test_memory_is_reserved_for_the_states_of_all_sequences() -> None:
    """They take half of it at most: then fewer sequences run."""
    manifest = fake_manifest(6, state_stride=1000)  # a state has 1000 bytes, a position one byte in each layer
    plan = MemoryPlan(manifest, manifest.weight_bytes(LayerRange(0, 6)) + (1 << 20), 1.0, max_sequences=8)
    layers = LayerRange(0, 6)
    assert plan.num_sequences(layers, frozenset()) == 8
    assert plan.kv_positions(layers, frozenset()) == ((1 << 20) - 8 * 4 * 6000) // 6 // 32 * 32
    plan.max_sequences = 1000
    assert plan.num_sequences(layers, frozenset()) == (1 << 19) // 24000


def test_what_is_added_later_takes_nothing_of_the_states_memory() -> None:
    """What a plan reserved stays, although more weights would leave memory for fewer states now."""
    manifest, layers = fake_manifest(6, state_stride=1000), LayerRange(0, 6)
    plan = MemoryPlan(manifest, manifest.weight_bytes(layers) + (1 << 20), 0.5, max_sequences=1000)
    positions, reserved = plan.kv_positions(layers, frozenset()), plan.reserved_bytes(layers, frozenset())
    assert reserved == (1 << 18) // 24000 * 24000
    free = (1 << 20) - reserved - 6 * positions
    for more, fits in ((free, True), (free + 1, False)):
        sizes = (manifest.layer_bytes[0] + more, *manifest.layer_bytes[1:])
        plan.manifest = msgspec.structs.replace(manifest, layer_bytes=sizes)
        with contextlib.nullcontext() if fits else pytest.raises(ModelError, match=r"lacks 0\.0 MiB beside its layers"):
            plan.check_kept(layers, frozenset(), kv_positions=positions, reserved_bytes=reserved)


def test_the_planner_counts_the_work_on_images_as_the_first_stage_does() -> None:
    blind = fake_manifest(6)
    manifest = msgspec.structs.replace(blind, image_bytes=1 << 18)
    memory = blind.weight_bytes(LayerRange(0, 6)) + (1 << 20)
    for layers, is_first in ((LayerRange(0, 3), True), (LayerRange(0, 6), True), (LayerRange(1, 4), False)):
        plan, free = MemoryPlan(manifest, memory, 0.5), MemoryPlan(blind, memory, 0.5)
        assert plan.kv_budget(layers, frozenset()) == free.kv_budget(layers, frozenset()) - (is_first << 17)
        model, without = ModelSizes.from_manifest(manifest), ModelSizes.from_manifest(blind)
        positions = model.kv_positions(layers, memory, 0.5)
        assert plan.kv_positions(layers, frozenset()) == positions // GRID * GRID
        assert model.needed_bytes(layers, 0) - without.needed_bytes(layers, 0) == is_first << 18
    least = manifest.weight_bytes(LayerRange(0, 3)) + (1 << 18)
    for more, fits in ((0, True), (-1, False)):
        plan = MemoryPlan(manifest, least + more, 0.5)
        with contextlib.nullcontext() if fits else pytest.raises(ModelError, match=r"lacks 0\.0 MiB"):
            plan.check_kept(LayerRange(0, 3), frozenset(), kv_positions=0, reserved_bytes=0)


@pytest.mark.parametrize("max_sequences", [1, 8, 1000])
@pytest.mark.parametrize("kib", [0, 10, 100, 1 << 12])
def test_the_planner_counts_states_as_a_stage_does(max_sequences: int, kib: int) -> None:
    """Also where it asks how much memory a number of positions needs: this much, and hardly less, has them."""
    manifest, layers = fake_manifest(6, state_stride=1000), LayerRange(1, 4)
    model = ModelSizes.from_manifest(manifest, max_sequences=max_sequences)
    plan = MemoryPlan(manifest, manifest.weight_bytes(layers) + (kib << 10), 0.5, max_sequences)
    assert plan.kv_positions(layers, frozenset()) == model.kv_positions(layers, plan.memory_bytes, 0.5) // GRID * GRID
    for positions in (0, 64, 6400):
        needed = manifest.weight_bytes(layers) + 2 * model.needed_kv(layers, positions)
        assert positions <= model.kv_positions(layers, needed, 0.5) <= positions + 4000
        assert needed - manifest.weight_bytes(layers) >= 2 * 12000  # there is memory for one sequence


def test_a_manifest_counts_states_by_position() -> None:
    manifest = msgspec.structs.replace(fake_manifest(3), kv_bytes_per_token=(40, 40, 40))
    with_states = manifest.with_states((0, 513, 1024), (True, False, True))
    assert with_states.kv_bytes_per_token == (40, 2, 42)
    assert with_states.state_stride == 512
    assert with_states.floor_to_state(1500) == 1024


# --- the core ---------------------------------------------------------------------------------------------------------


def bench_at(position: int) -> StageBench:
    """A stage that has computed a prompt in two rows, the last of 20 positions."""
    bench = StageBench(state_stride=STRIDE)
    bench.activate()
    bench.run(step_of(1, Row(1, 0, position - 20, False), open=(opened(1, limit=128),)))
    bench.run(step_of(2, Row(1, position - 20, 20, False)))
    return bench


@pytest.mark.parametrize(("counts", "expected"), [(90, 90), (89, 89), (88, 70), (70, 70), (69, 64), (63, 32), (31, 0)])
def test_a_cut_falls_back_to_a_position_whose_state_is_held(counts: int, expected: int) -> None:
    """The executor would refuse to go on anywhere else."""
    bench = bench_at(90)
    bench.activate(epoch=2, live=((1, counts),))
    assert bench.core.sequences[1].position() == expected
    bench.run(step_of(1, Row(1, expected, 5, False), epoch=2))
    assert bench.core.sequences[1].position() == expected + 5


def test_a_step_that_a_fence_stopped_is_repeated() -> None:
    bench = bench_at(90)
    bench.step(step_of(3, Row(1, 90, 2, False)))
    assert bench.computing is not None
    with pytest.raises(FenceRaised):  # some layers have gone on
        bench.executor.forward(bench.computing.batch, lambda: True, lambda: None)
    bench.computing = None
    bench.order(Fence(epoch=2))
    bench.feed(ComputeFenced(1, 3))
    bench.activate(epoch=2, live=((1, 90),))
    bench.run(step_of(1, Row(1, 90, 2, False), epoch=2))
    bench.activate(epoch=3, live=((1, 89),))  # the state at 89 went when the step began
    assert bench.core.sequences[1].position() == 64


def test_a_step_in_pieces_may_leave_no_state_at_its_begin() -> None:
    bench = bench_at(90)
    bench.step(step_of(3, Row(1, 90, 2, False)))
    bench.fail("out of memory", is_memory=True)
    bench.fail("out of memory", is_memory=True)
    assert bench.core.sequences[1].position() == 64


@pytest.mark.parametrize("lengths", [(70, 25, 1, 1, 40), (64, 1, 31, 1), (10, 90, 3, 1, 1)])
def test_a_stage_records_the_states_that_its_layers_hold(lengths: tuple[int, ...]) -> None:
    bench = StageBench(state_stride=4 * STRIDE)
    bench.activate()
    start = 0
    for number, count in enumerate(lengths, 1):
        bench.run(step_of(number, Row(1, start, count, False), open=() if start else (opened(1, limit=256),)))
        start += count
        held = bench.core.sequences[1]
        recorded = {p for p in range(1, start + 1) if held.can_begin(held.kv[0].layers, p)}
        assert recorded == bench.executor.states[1, 0] - {0}
        assert start // STRIDE * STRIDE in recorded | {0}


@pytest.mark.parametrize(("position", "is_held"), [(64, True), (80, False)])
def test_a_sequence_begins_as_another_one_only_where_that_holds_states(position: int, is_held: bool) -> None:
    bench = bench_at(90)
    tokens = tuple(bench.core.sequences[1].history)
    fork = Open(2, SamplingParams(), 5, 3, 128, tokens, 1, position)
    actions = bench.run(step_of(3, Row(2, position, 2, False), open=(fork,)))
    assert any(isinstance(action, act.ForkSequence) for action in actions) is is_held


def test_a_replay_begins_where_a_state_is_held() -> None:
    held = bench_at(90).core.sequences[1]
    layers = held.kv[0].layers
    assert [start for start in range(100) if held.can_begin(layers, start)] == [0, 32, 64, 70, 89, 90]
