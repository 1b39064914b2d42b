"""After a death: who takes the lost layers. Survivors keep theirs, and it is done in the way that is soonest."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from swarm.broker.planner import tables
from swarm.broker.planner.lost_positions import LostSequence, pack_chunks, run_sums
from swarm.broker.planner.pauses import predict_steps_s
from swarm.broker.planner.problem import Device, LayerShare, Line, ModelSizes, PlanningProblem
from swarm.broker.planner.standby import StandbyPolicy, choose_standby
from swarm.broker.planner.takeover import (
    CHUNK_S,
    FIRST_CHUNK_S,
    MIN_LOAD_S,
    NEAR,
    NEAR_S,
    ReplayWork,
    Takeover,
    find_takeover,
    predict_replay_s,
)
from swarm.wire.messages import LayerRange, layers_of

MIB = 1 << 20


def model(num_layers: int = 12, layer_bytes: int = 10 * MIB) -> ModelSizes:
    return ModelSizes(
        name="m",
        layer_bytes=(layer_bytes,) * num_layers,
        embed_bytes=5 * MIB,
        head_bytes=5 * MIB,
        kv_bytes=(64,) * num_layers,
        layer_weights=(1.0,) * num_layers,
    )


def device(name: str, **fields: object) -> Device:
    defaults: dict[str, object] = {"memory_bytes": 1000 * MIB, "load_bytes_per_s": 100.0 * MIB, "replay_s": 0.0001}
    return Device(name, **(defaults | fields))  # type: ignore[arg-type]


def line(*shares: tuple[int, int, int]) -> Line:
    return tuple(LayerShare(who, LayerRange(first, stop)) for who, first, stop in shares)


def without(problem: PlanningProblem, survivors: Line) -> PlanningProblem:
    """Whoever held layers and is no survivor is dead: it has room for nothing."""
    alive = {share.device for share in survivors}
    devices = (d if d.held is None or i in alive else replace(d, memory_bytes=0) for i, d in enumerate(problem.devices))
    return replace(problem, devices=tuple(devices))


def found(problem: PlanningProblem, survivors: Line, positions: int = 100) -> Takeover:
    result = find_takeover(without(problem, survivors), survivors, ReplayWork(positions))
    assert result is not None
    layers = [layer for share in result.line for layer in range(share.layers.first, share.layers.stop)]
    assert layers == list(range(problem.model.num_layers))
    for share in survivors:
        (now,) = [each.layers for each in result.line if each.device == share.device]
        assert now.first <= share.layers.first
        assert share.layers.stop <= now.stop
    return result


def test_neighbours_share_what_is_lost() -> None:
    """Both load half of it at once, which is sooner than one loading it all."""
    devices = tuple(device(f"w{i}", held=LayerRange(4 * i, 4 * i + 4)) for i in range(3))
    result = found(PlanningProblem(model(), devices), line((0, 0, 4), (2, 8, 12)))
    assert result.line == line((0, 0, 6), (2, 6, 12))
    assert result.taken == line((0, 4, 6), (2, 6, 8))
    assert result.load_s == pytest.approx(MIN_LOAD_S + 0.2)
    assert result.replay_s == pytest.approx(4 * 100 * 0.0001)


def test_what_is_replayed() -> None:
    """Each sequence by itself in chunks; a position has half of its sequence before it, on average over all of them."""
    assert ReplayWork.from_sequences([], 256) == ReplayWork(0, 0, 0)
    several = ReplayWork.from_sequences([1, 256, 257], 256)
    assert several == ReplayWork(514, 4, (1 + 256**2 + 257**2) // (2 * 514), overlap=513 / 514, sequences=3)


def test_complete_sequences_take_a_part_of_the_time_from_the_others() -> None:
    """A replay beside steps lasts longer, by what the pauses between steps leave; one by itself doesn't."""
    besides_s = FIRST_CHUNK_S + 2 * CHUNK_S
    assert ReplayWork.from_sequences([512], 256).predict_s(1.0, 0.1) == pytest.approx(1.0 + besides_s)
    four = ReplayWork.from_sequences([256] * 4, 256)
    alone_s = 4.0 + FIRST_CHUNK_S + 4 * CHUNK_S
    for step_s in (0.1, 2.0):
        expected = alone_s + predict_steps_s(step_s, 4, 0.75 * alone_s, alone_s)
        assert four.predict_s(4.0, step_s) == pytest.approx(expected)
    assert ReplayWork.from_sequences([], 256).predict_s(0.0, 0.1) == 0.0


def test_the_ends_of_the_pipeline() -> None:
    """The first stage's layers can only go to the one behind it, the last one's to the one before it."""
    devices = tuple(device(f"w{i}", held=LayerRange(4 * i, 4 * i + 4)) for i in range(3))
    problem = PlanningProblem(model(), devices)
    assert found(problem, line((1, 4, 8), (2, 8, 12))).line == line((1, 0, 8), (2, 8, 12))
    assert found(problem, line((0, 0, 4), (1, 4, 8))).line == line((0, 0, 4), (1, 4, 12))
    assert found(problem, line((1, 4, 8))).line == line((1, 0, 12))


def test_who_is_warm_goes_before_who_must_load() -> None:
    """A neighbour that keeps the layers takes them all; so does a spare."""
    devices = [device(f"w{i}", held=LayerRange(4 * i, 4 * i + 4)) for i in range(3)]
    devices[2] = device("w2", held=LayerRange(8, 12), kept=(LayerRange(4, 8),))
    result = found(PlanningProblem(model(), tuple(devices)), line((0, 0, 4), (2, 8, 12)))
    assert result.line == line((0, 0, 4), (2, 4, 12))
    assert result.load_s == 0.0
    cold = [device(f"w{i}", held=LayerRange(4 * i, 4 * i + 4)) for i in range(3)]
    spare = device("spare", kept=(LayerRange(3, 9),))
    result = found(PlanningProblem(model(), (*cold, spare)), line((0, 0, 4), (2, 8, 12)))
    assert result.line == line((0, 0, 4), (3, 4, 8), (2, 8, 12))


def test_a_slow_worker_that_is_warm_loses_against_a_long_replay() -> None:
    """Time counts, not bytes: with much to be replayed, a quick worker that loads first is sooner."""
    slow = device("slow", held=LayerRange(0, 4), kept=(LayerRange(4, 8),), replay_s=0.01)
    quick = device("quick", held=LayerRange(8, 12), replay_s=0.0001)
    problem = PlanningProblem(model(8 + 4), (slow, quick))
    assert found(problem, line((0, 0, 4), (1, 8, 12)), 1).line == line((0, 0, 8), (1, 8, 12))
    assert found(problem, line((0, 0, 4), (1, 8, 12)), 1000).line == line((0, 0, 4), (1, 4, 12))


def test_two_gaps_and_one_spare() -> None:
    """It goes where most is missing; the neighbours take the rest."""
    devices = tuple(device(f"w{i}", held=LayerRange(3 * i, 3 * i + 3)) for i in range(4))
    problem = PlanningProblem(model(), (*devices, device("spare", kept=(LayerRange(0, 12),))))
    result = found(problem, line((0, 0, 3), (2, 6, 9)))
    assert {share.device for share in result.line} >= {0, 2}
    assert layers_of(share.layers for share in result.taken) == {3, 4, 5, 9, 10, 11}


def test_survivors_without_room_are_no_way_back() -> None:
    """Survivors that can't hold more, and nobody else: it can't be done in this way."""
    tight = tuple(device(f"w{i}", memory_bytes=(64 + 45) * MIB, held=LayerRange(4 * i, 4 * i + 4)) for i in range(3))
    survivors = line((0, 0, 4), (2, 8, 12))
    assert find_takeover(without(PlanningProblem(model(), tight), survivors), survivors, ReplayWork(10)) is None
    assert find_takeover(PlanningProblem(model(), tight), (), ReplayWork(10)) is None


def test_by_exhaustive_search() -> None:
    """Of all ways to fill one gap, none is sooner than the one found by more than the tolerance; among those within it
    none gives quicker steps."""
    chance = random.Random(5)
    for _ in range(200):
        num = chance.randint(3, 9)
        first = chance.randint(0, num - 1)
        stop = chance.randint(first + 1, num - (1 if first == 0 else 0))
        devices = tuple(
            device(
                f"w{i}",
                memory_bytes=chance.choice([1000, 64 + 11 * num, 64 + 60]) * MIB,
                layer_s=chance.choice([0.001, 0.002]),
                load_bytes_per_s=chance.choice([50.0, 500.0]) * MIB,
                replay_s=chance.choice([0.0, 0.0001, 0.001]),
                kept=chance.choice([(), (LayerRange(first, stop),), (LayerRange(0, num),)]),
            )
            for i in range(chance.randint(2, 4))
        )
        survivors = []
        if first:
            survivors.append(LayerShare(0, LayerRange(0, first)))
        if stop < num:
            survivors.append(LayerShare(1, LayerRange(stop, num)))
        problem = PlanningProblem(model(num), devices, takes_turns=chance.random() < 0.5)
        result = find_takeover(problem, tuple(survivors), ReplayWork(50))
        ways = list(every_way(problem, tuple(survivors), LayerRange(first, stop), 50))
        assert (result is None) == (not ways)
        if result is not None:
            limit = min(seconds for seconds, _ in ways) * (1 + NEAR) + NEAR_S
            mine = step_s(problem, result.line)
            assert result.load_s + result.replay_s <= limit * (1 + NEAR) + NEAR_S
            assert mine <= max(step for seconds, step in ways if seconds <= limit * (1 + 1e-9)) * (1 + 1e-9)


def step_s(problem: PlanningProblem, way: Line) -> float:
    parts = tables.stage_seconds(problem, way)
    return sum(parts) if problem.takes_turns else max(parts)


def every_way(problem: PlanningProblem, survivors: Line, gap: LayerRange, positions: int) -> list[tuple[float, float]]:
    """(seconds, step) of every cut between the neighbours and every spare."""
    model_, used = problem.model, {share.device for share in survivors}
    before = next((s for s in survivors if s.layers.stop == gap.first), None)
    behind = next((s for s in survivors if s.layers.first == gap.stop), None)
    spares = [None, *(i for i in range(len(problem.devices)) if i not in used)]
    result = []
    for low, high, spare in itertools.product(range(gap.first, gap.stop + 1), range(gap.first, gap.stop + 1), spares):
        if low > high or (spare is None) != (low == high):
            continue
        if (before is None and low != gap.first) or (behind is None and high != gap.stop):
            continue
        way = []
        if before is not None:
            way.append(LayerShare(before.device, LayerRange(before.layers.first, low)))
        if spare is not None:
            way.append(LayerShare(spare, LayerRange(low, high)))
        if behind is not None:
            way.append(LayerShare(behind.device, LayerRange(high, behind.layers.stop)))
        if all(model_.needed_bytes(s.layers, 0) <= problem.devices[s.device].memory_bytes for s in way):
            result.append((_seconds(problem, tuple(way), gap, positions), step_s(problem, tuple(way))))
    return result


def _seconds(problem: PlanningProblem, way: Line, gap: LayerRange, positions: int) -> float:
    load = replay = 0.0
    for share in way:
        one = problem.devices[share.device]
        moved = float(tables.moved_bytes(problem.model, one)[share.layers.first, share.layers.stop])
        load = max(load, moved / one.load_bytes_per_s + MIN_LOAD_S if moved else 0.0)
        taken = layers_of((share.layers,)) & layers_of((gap,))
        replay += len(taken) * positions * one.replay_s
    return load + replay


# --- copies of keys and values ----------------------------------------------------------------------------------------


def with_copies(*sequences: tuple[int, dict[str, list[int]]]) -> ReplayWork:
    return ReplayWork.from_sequences([LostSequence(length, copies) for length, copies in sequences], 256)


def warm_middle(**fields: dict[str, object]) -> PlanningProblem:
    """Three stages; the neighbours of the middle one keep its layers warm."""
    kept = {"kept": (LayerRange(4, 8),)}
    devices = tuple(
        device(f"w{i}", held=LayerRange(4 * i, 4 * i + 4), **(kept | fields.get(f"w{i}", {}))) for i in range(3)
    )
    return without(PlanningProblem(model(), devices), line((0, 0, 4), (2, 8, 12)))


def taken_over(problem: PlanningProblem, replays: ReplayWork) -> Takeover:
    result = find_takeover(problem, line((0, 0, 4), (2, 8, 12)), replays)
    assert result is not None
    return result


def test_the_holder_of_copies_takes_the_layers() -> None:
    """Both neighbours have them loaded, but only one can go on almost at once."""
    copies = [0] * 4 + [1984] * 4 + [0] * 4
    result = taken_over(warm_middle(), with_copies((2000, {"w2": copies})))
    assert result.line == line((0, 0, 4), (2, 4, 12))
    assert result.replay_s == pytest.approx(4 * 16 * 0.0001)
    even = taken_over(warm_middle(), with_copies((2000, {})))
    assert even.line == line((0, 0, 6), (2, 6, 12))
    assert even.replay_s == pytest.approx(4 * 2000 * 0.0001)


def test_a_holder_that_is_slow_may_be_the_sooner_one_still() -> None:
    """What it lacks counts, not what it holds."""
    slow: dict[str, object] = {"replay_s": 0.001}
    for held, expected in ((1984, line((0, 0, 4), (2, 4, 12))), (1000, line((0, 0, 8), (2, 8, 12)))):
        copies = [0] * 4 + [held] * 4 + [0] * 4
        result = taken_over(warm_middle(w2=slow), with_copies((2000, {"w2": copies})))
        assert result.line == expected


def test_copies_of_halves_at_both_neighbours() -> None:
    low, high = [0] * 4 + [1952] * 2 + [0] * 6, [0] * 6 + [1984] * 2 + [0] * 4
    result = taken_over(warm_middle(), with_copies((2000, {"w0": low, "w2": high}), (1000, {"w0": low, "w2": high})))
    assert result.line == line((0, 0, 6), (2, 6, 12))
    assert result.replay_s == pytest.approx((2 * 48 + 2 * 16) * 0.0001)  # the shorter one has no position to replay


def test_a_layer_computes_what_a_layer_behind_it_lacks() -> None:
    """Copies before a layer without copies save nothing: it needs what comes out of them, from the beginning."""
    problem = warm_middle()
    copies = {"w0": [0] * 4 + [2000] * 8}
    replays = with_copies((2000, copies))
    assert predict_replay_s(problem, line((0, 4, 6), (2, 6, 8)), replays) == pytest.approx(4 * 2000 * 0.0001)
    assert predict_replay_s(problem, line((2, 4, 6), (0, 6, 8)), replays) == pytest.approx(2 * 2000 * 0.0001)
    assert predict_replay_s(problem, line((0, 0, 2), (2, 6, 8)), replays) == pytest.approx(4 * 2000 * 0.0001)


def test_what_copies_leave_to_be_replayed() -> None:
    """Few chunks, with much before each position."""
    copies = {"w2": [0] * 4 + [960] * 4 + [0] * 4}
    replays = with_copies(*((1000, copies) for _ in range(8)))
    assert (replays.positions, replays.chunks, replays.context) == (8000, 32, 500)
    left = replays.reduce_to(line((2, 4, 8)), warm_middle())
    assert (left.positions, left.chunks, left.context, left.sequences) == (320, 2, 980, 2)
    assert left.overlap == pytest.approx(1 - 240 / 320)  # six share the first chunk
    assert left.predict_s(0.1, 0.05) < replays.predict_s(2.5, 0.05) / 10
    nothing = with_copies((1000, {"w2": [1000] * 12})).reduce_to(line((2, 4, 8)), warm_middle())
    assert nothing.predict_s(0.0, 0.05) == 0.0


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], (0, 0, 0)),
        ([1, 256, 257], (4, 3, 1)),
        ([40] * 8, (2, 2, 240)),
        ([600], (3, 1, 600)),
        ([300, 200, 50], (3, 2, 250)),
        ([300, 256, 30], (4, 3, 30)),
    ],
)
def test_chunks_are_packed_like_orders(lengths: list[int], expected: tuple[int, int, int]) -> None:
    assert pack_chunks(lengths, 256) == expected


def test_runs_by_exhaustive_search() -> None:
    chance = random.Random(3)
    weights = [chance.random() for _ in range(7)]
    lacking = [chance.choice([0, 16, 48, 1000]) for _ in range(7)]
    table = run_sums(weights, lacking)
    for first, stop in itertools.combinations_with_replacement(range(8), 2):
        work = sum(weights[layer] * max(lacking[layer:stop]) for layer in range(first, stop))
        assert table[first, stop] == pytest.approx(work)


# --- standby ----------------------------------------------------------------------------------------------------------


def kept(problem: PlanningProblem, shares: Line, policy: StandbyPolicy) -> dict[int, tuple[LayerRange, ...]]:
    result = choose_standby(problem, shares, policy)
    for who, ranges in result.items():
        own = [share.layers for share in shares if share.device == who]
        assert not layers_of(ranges) & layers_of(own), "nobody keeps its own"
        weights = sum(map(problem.model.weight_bytes, (*own, *ranges)))
        assert weights <= problem.devices[who].memory_bytes
    return result


def test_neighbours_keep_every_layer_once_more() -> None:
    """Each stage's halves, by those beside it; at the ends, the whole."""
    problem = PlanningProblem(model(), tuple(device(f"w{i}") for i in range(3)))
    assert kept(problem, line((0, 0, 4), (1, 4, 8), (2, 8, 12)), "neighbours") == {
        0: (LayerRange(4, 6),),
        1: (LayerRange(0, 4), LayerRange(8, 12)),
        2: (LayerRange(6, 8),),
    }
    assert kept(problem, line((0, 0, 4), (1, 4, 8), (2, 8, 12)), "none") == {}


def test_every_death_finds_its_layers_warm() -> None:
    """With room enough, whoever dies: nothing is to be loaded."""
    for num in (2, 3, 4):
        shares = line(*((i, 12 // num * i, 12 // num * (i + 1)) for i in range(num)))
        plain = PlanningProblem(model(), tuple(device(f"w{i}") for i in range(num)))
        keeps = choose_standby(plain, shares, "neighbours")
        devices = tuple(device(f"w{s.device}", held=s.layers, kept=keeps.get(s.device, ())) for s in shares)
        for dead in range(num):
            survivors = tuple(share for share in shares if share.device != dead)
            assert found(PlanningProblem(model(), devices), survivors).load_s == 0.0


def test_where_one_has_no_room_the_other_takes_more() -> None:
    devices = (device("w0", memory_bytes=110 * MIB), device("w1"), device("w2"))
    keeps = kept(PlanningProblem(model(), devices), line((0, 0, 4), (1, 4, 8), (2, 8, 12)), "neighbours")
    assert 0 not in keeps
    assert keeps[2] == (LayerRange(4, 8),)


@pytest.mark.parametrize(
    ("before", "behind", "cut"),
    [
        ({}, {}, 7),
        ({"layer_s": 0.002}, {}, 6),  # a third of the speed of both
        ({}, {"layer_s": 0.002}, 8),
        ({"memory_bytes": 139 * MIB}, {}, 6),  # room for half of them
        ({}, {"memory_bytes": 139 * MIB}, 8),
        ({"layer_s": 0.002}, {"memory_bytes": 139 * MIB}, 7),
    ],
)
def test_neighbours_are_weighed_by_speed_and_memory(
    before: dict[str, object], behind: dict[str, object], cut: int
) -> None:
    """The quicker one takes over more, and the one with little memory keeps some of it for keys and values."""
    devices = (device("w0", **before), device("w1"), device("w2", **behind))
    keeps = kept(PlanningProblem(model(14), devices), line((0, 0, 4), (1, 4, 10), (2, 10, 14)), "neighbours")
    assert (keeps[0], keeps[2]) == ((LayerRange(4, cut),), (LayerRange(cut, 10),))


@pytest.mark.parametrize(
    ("cut_now", "kept_by_both", "cut"),
    [(7, False, 7), (6, False, 6), (8, False, 8), (5, False, 7), (9, False, 7), (6, True, 7)],
)
def test_layers_that_are_kept_already_stay_where_they_are(cut_now: int, kept_by_both: bool, cut: int) -> None:
    """Unless that is far from what would be best. Where both keep them all, the best cut is as good as any."""
    before = LayerRange(4, 10) if kept_by_both else LayerRange(4, cut_now)
    behind = LayerRange(4, 10) if kept_by_both else LayerRange(cut_now, 10)
    devices = (device("w0", kept=(before,)), device("w1"), device("w2", kept=(behind,)))
    keeps = kept(PlanningProblem(model(14), devices), line((0, 0, 4), (1, 4, 10), (2, 10, 14)), "neighbours")
    assert (keeps[0], keeps[2]) == ((LayerRange(4, cut),), (LayerRange(cut, 10),))


def test_keys_and_values_keep_their_room() -> None:
    """Standby takes half of what is free at most, and nothing of what is wanted for positions."""
    shares = line((0, 0, 6), (1, 6, 12))
    devices = (device("w0", memory_bytes=165 * MIB), device("w1", memory_bytes=165 * MIB))
    problem = PlanningProblem(model(), devices)
    free = 165 * MIB - problem.model.weight_bytes(LayerRange(0, 6))
    taken = sum(map(problem.model.weight_bytes, kept(problem, shares, "all")[0]))
    assert 0 < taken <= free / 2
    wanted = PlanningProblem(model(), devices, kv_positions=problem.model.kv_positions(LayerRange(0, 6), 165 * MIB))
    assert kept(wanted, shares, "all") == {}


def test_whoever_has_no_part_keeps_what_fits() -> None:
    """The first as much as it can, the next goes on from there."""
    small = 64 * MIB + 10 * MIB * 7 + 5 * MIB
    devices = (device("w0"), device("spare", memory_bytes=small), device("other", memory_bytes=small))
    keeps = kept(PlanningProblem(model(), devices), line((0, 0, 12)), "neighbours")
    assert keeps[1] == (LayerRange(0, 7),)
    assert keeps[2] == (LayerRange(7, 12),)
