"""The search for the best plan, against looking at everything; and what must hold of any plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.broker.planner import tables
from swarm.broker.planner.bound import lower_bound, most_layers
from swarm.broker.planner.ordering import heuristic_line
from swarm.broker.planner.problem import (
    OVERHEAD_BYTES,
    Device,
    LayerShare,
    Line,
    ModelSizes,
    NetworkLink,
    PlanningProblem,
    Shortage,
)
from swarm.broker.planner.search import search_order
from swarm.broker.planner.solve import MAX_EXACT, solve
from swarm.wire.messages import LayerRange

MIB = 1 << 20
NUM_CASES = 2000


def model_of(*layers: int, embed: int = 0, head: int = 0, **fields: object) -> ModelSizes:
    """Sizes in MiB; all layers take equally long."""
    num = len(layers)
    defaults: dict[str, object] = {"kv_bytes": (0,) * num, "layer_weights": (1.0,) * num}
    sizes = tuple(n * MIB for n in layers)
    return ModelSizes("m", sizes, embed * MIB, head * MIB, **(defaults | fields))  # type: ignore[arg-type]


def device(name: str, mib: int = 1000, **fields: object) -> Device:
    """With so many MiB for weights; a second per layer unless told otherwise."""
    return Device(name, OVERHEAD_BYTES + mib * MIB, **({"layer_s": 1.0, "host": name} | fields))  # type: ignore[arg-type]


def cut(problem: PlanningProblem) -> list[tuple[str, int, int]]:
    line = solve(problem)
    assert not isinstance(line, Shortage), line.text
    return [(problem.devices[s.device].name, s.layers.first, s.layers.stop) for s in line]


# --- against everything there is --------------------------------------------------------------------------------------


def may_hold(problem: PlanningProblem, index: int, layers: LayerRange) -> bool:
    """Said once more, in other words than the search's."""
    chosen = problem.devices[index]
    needed = problem.model.needed_bytes(layers, problem.kv_positions, chosen.kv_share) + chosen.standby_bytes
    if needed > chosen.memory_bytes or (chosen.max_layers is not None and len(layers) > chosen.max_layers):
        return False
    return chosen.pinned is None or chosen.pinned == layers


def everything(problem: PlanningProblem) -> float:
    """The best step of all orders of all sets of devices, and all cuts; infinite if there is none."""
    num, devices, best = problem.model.num_layers, range(len(problem.devices)), float("inf")
    must = {i for i in devices if problem.devices[i].pinned is not None}
    for size in range(1, min(len(devices), num) + 1):
        for order in itertools.permutations(devices, size):
            for inner in itertools.combinations(range(1, num), size - 1) if must <= set(order) else ():
                bounds = (0, *inner, num)
                line = tuple(
                    LayerShare(i, LayerRange(*r)) for i, r in zip(order, itertools.pairwise(bounds), strict=True)
                )
                if all(may_hold(problem, share.device, share.layers) for share in line):
                    best = min(best, tables.step_seconds(problem, line))
    return best


def chance_problem(random: Random) -> PlanningProblem:
    """Small, with everything in it that a problem can have, twins among the devices included."""
    num = random.randint(1, 6)
    model = ModelSizes(
        "m",
        tuple(random.randint(1, 4) * MIB for _ in range(num)),
        random.randint(0, 3) * MIB,
        random.randint(0, 5) * MIB,
        kv_bytes=tuple(random.choice([0, 1000]) for _ in range(num)),
        layer_weights=tuple(random.choice([1.0, 1.0, 2.0, 0.5]) for _ in range(num)),
        hop_bytes=random.choice([0, 10**6]),
    )
    return PlanningProblem(
        model,
        tuple(chance_device(random, f"d{i}", num) for i in range(random.randint(1, 4))),
        takes_turns=random.random() < 0.5,
        free_hops=random.random() < 0.5,
        kv_positions=random.choice([0, 100, 5000]),
        tolerance=0.0,
    )


def chance_device(random: Random, name: str, num_layers: int) -> Device:
    first = random.randrange(num_layers)
    return Device(
        name,
        OVERHEAD_BYTES + random.randint(1, 20) * MIB,
        layer_s=random.choice([1.0, 1.0, 2.0, 3.3]),
        stage_s=random.choice([0.0, 0.0, 0.3]),
        embed_s=random.choice([0.0, 0.5]),
        head_s=random.choice([0.0, 2.0]),
        host=random.choice(["a", "b", ""]),
        link=NetworkLink(random.choice([0.0, 0.1]), random.choice([1e6, 1e7])),
        broker_s=random.choice([0.0, 0.0, 0.1]),
        max_layers=random.choice([None, None, 1, 3]),
        pinned=LayerRange(first, random.randint(first + 1, num_layers)) if random.random() < 0.1 else None,
        held=LayerRange(0, 1) if random.random() < 0.3 else None,
        standby_bytes=random.choice([0, 0, MIB]),
        kv_share=random.choice([0.25, 0.25, 0.1, 0.6]),
    )


@pytest.mark.slow
def test_as_good_as_looking_at_everything() -> None:
    """On thousands of small cases of every kind, the plan's step takes exactly as long as the best of all plans', there
    is a plan whenever there can be one, and no bound is above it."""
    random, num_short = Random(3), 0
    for _ in range(NUM_CASES):
        problem = chance_problem(random)
        best, line = everything(problem), solve(problem)
        if isinstance(line, Shortage):
            num_short += 1
            assert best == float("inf"), problem
            continue
        assert tables.step_seconds(problem, line) == pytest.approx(best, rel=1e-9), problem
        assert lower_bound(problem) <= best * (1 + 1e-6), problem
    assert 100 < num_short < NUM_CASES / 2  # both kinds of cases were there


@pytest.mark.slow
def test_the_search_for_many_is_close_to_the_exact_one() -> None:
    """On cases that are small enough for both, the heuristics' plan is hardly ever slower, and never by much."""
    random, ratios = Random(4), []
    for _ in range(300):
        problem = chance_problem(random)
        exact = everything(problem)
        combine = np.add if problem.takes_turns else np.maximum
        must = frozenset(i for i, d in enumerate(problem.devices) if d.pinned is not None)
        found = heuristic_line(problem, combine, tables.hop_seconds(problem), must)
        if found is not None:
            check(problem, found[1])
            ratios.append(found[0] / exact)
            assert found[0] >= exact * (1 - 1e-9)
    assert len(ratios) > 100
    assert np.mean([ratio < 1 + 1e-9 for ratio in ratios]) > 0.9
    assert np.mean(ratios) < 1.05


# --- what must hold of any plan ---------------------------------------------------------------------------------------


def check(problem: PlanningProblem, line: Line) -> None:
    """Every layer once, in order; nobody twice; memory, caps and pins kept."""
    covered = [layer for share in line for layer in range(share.layers.first, share.layers.stop)]
    assert covered == list(range(problem.model.num_layers))
    assert len({share.device for share in line}) == len(line)
    assert all(may_hold(problem, share.device, share.layers) for share in line)
    pinned = {i for i, each in enumerate(problem.devices) if each.pinned is not None}
    assert pinned <= {share.device for share in line}


SEEDS = st.integers(0, 2**32)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 14), st.integers(1, 12))
def test_every_plan_is_a_pipeline_within_its_limits(seed: int, num_devices: int, num_layers: int) -> None:
    """Also with more devices than are looked at exactly."""
    random = Random(seed)
    model = replace(chance_problem(random).model)
    num = model.num_layers
    devices = tuple(chance_device(random, f"d{i}", num) for i in range(num_devices))
    problem = PlanningProblem(model, devices, random.random() < 0.5, random.random() < 0.5, random.choice([0, 1000]))
    line = solve(problem)
    if isinstance(line, Shortage):
        assert line.text
    else:
        check(problem, line)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_within_the_tolerance_of_the_best(seed: int) -> None:
    """Taking a plan that moves less never costs more than the tolerance."""
    problem = chance_problem(Random(seed))
    best, line = solve(problem), solve(replace(problem, tolerance=0.05))
    if not isinstance(best, Shortage) and not isinstance(line, Shortage):
        assert tables.step_seconds(problem, line) <= tables.step_seconds(problem, best) * 1.05 * (1 + 1e-6)


# --- what a plan looks like -------------------------------------------------------------------------------------------


def test_even_when_all_are_equal() -> None:
    """Equal shares, the first ones one larger."""
    problem = PlanningProblem(model_of(*(1,) * 8), tuple(map(device, "abc")))
    assert cut(problem) == [("a", 0, 3), ("b", 3, 6), ("c", 6, 8)]


def test_shares_follow_speed() -> None:
    """Twice as quick, twice the layers."""
    problem = PlanningProblem(model_of(*(1,) * 9), (device("slow"), device("quick", layer_s=0.5)))
    assert {name: stop - first for name, first, stop in cut(problem)} == {"slow": 3, "quick": 6}


def test_the_head_counts_as_time() -> None:
    """Whoever has it gets fewer layers."""
    problem = PlanningProblem(model_of(*(1,) * 8), (device("a", head_s=2.0), device("b", head_s=2.0)))
    assert cut(problem) == [("a", 0, 5), ("b", 5, 8)]


def test_a_small_memory_limits_a_share() -> None:
    """What a small one can't take goes to the others."""
    lengths = {
        name: stop - first
        for name, first, stop in cut(
            PlanningProblem(model_of(*(1,) * 6), (device("a"), device("small", 1), device("c")))
        )
    }
    assert lengths in ({"a": 3, "small": 1, "c": 2}, {"a": 2, "small": 1, "c": 3})


def test_who_gives_more_of_its_memory_to_keys_and_values_holds_more_layers_beside_them() -> None:
    """Each by its own share: what is promised to positions must be there."""
    model = model_of(*(1,) * 6, kv_bytes=(MIB,) * 6)
    half, quarter = device("half", 200, kv_share=0.5), device("quarter", 200)
    lengths = {
        name: stop - first for name, first, stop in cut(PlanningProblem(model, (half, quarter), kv_positions=28))
    }
    assert lengths == {"half": 4, "quarter": 2}
    assert most_layers(PlanningProblem(model, (half, quarter), kv_positions=28)).tolist() == [4, 2]
    assert model.kv_positions(LayerRange(0, 1), 101 * MIB, 0.5) == 2 * model.kv_positions(LayerRange(0, 1), 101 * MIB)


def test_a_device_that_would_make_it_slower_is_left_out() -> None:
    """One layer of it takes longer than all layers of the others."""
    problem = PlanningProblem(model_of(*(1,) * 6), (device("a"), device("b"), device("snail", layer_s=10.0)))
    assert cut(problem) == [("a", 0, 3), ("b", 3, 6)]


def test_latency_leaves_out_whoever_is_only_a_hop() -> None:
    """With one sequence, two equal devices are no quicker than one, and the hop between them is lost."""
    far = NetworkLink(latency_s=0.5)
    problem = PlanningProblem(model_of(*(1,) * 6), (device("a", link=far), device("b", link=far)), takes_turns=True)
    assert len(cut(problem)) == 1


def test_in_turns_on_one_machine_shares_are_even() -> None:
    """Any cut is as quick there: everybody gets the same, the newcomer too, whatever the others hold."""
    together = [device(name, host="here") for name in "abc"]
    together[0] = replace(together[0], held=LayerRange(0, 3))
    together[1] = replace(together[1], held=LayerRange(3, 6))
    problem = PlanningProblem(model_of(*(1,) * 6), tuple(together), takes_turns=True, free_hops=True)
    assert [stop - first for _, first, stop in cut(problem)] == [2, 2, 2]


def test_among_equals_the_one_that_moves_least() -> None:
    """Whoever holds layers keeps them; a newcomer goes where it disturbs nobody."""
    devices = (device("a", held=LayerRange(0, 3)), device("b", held=LayerRange(3, 6)), device("new"))
    assert cut(PlanningProblem(model_of(*(1,) * 6), devices)) == [("a", 0, 2), ("new", 2, 4), ("b", 4, 6)]
    swapped = (device("a", held=LayerRange(3, 6)), device("b", held=LayerRange(0, 3)))
    assert cut(PlanningProblem(model_of(*(1,) * 6), swapped)) == [("b", 0, 3), ("a", 3, 6)]


@pytest.mark.parametrize("takes_turns", [False, True])
def test_among_equals_layers_stay_with_their_keys_and_values(takes_turns: bool) -> None:
    """Also where everybody keeps everything warm, so that nothing is loaded: the worker between has left."""
    kept = (LayerRange(0, 6),)
    for first, last in (("a", "b"), ("b", "a")):
        held = {first: LayerRange(0, 2), last: LayerRange(4, 6)}
        devices = tuple(device(name, host="here", held=held[name], kept=kept) for name in "ab")
        problem = PlanningProblem(model_of(*(1,) * 6), devices, takes_turns=takes_turns, free_hops=takes_turns)
        assert cut(problem) == [(first, 0, 3), (last, 3, 6)]


def test_pins_and_caps_are_kept() -> None:
    """By hand is by hand, also where it is slower."""
    devices = (device("a"), device("b", pinned=LayerRange(0, 1)), device("c", max_layers=2))
    shares = {name: (first, stop) for name, first, stop in cut(PlanningProblem(model_of(*(1,) * 8), devices))}
    assert shares["b"] == (0, 1)
    assert shares["c"][1] - shares["c"][0] == 2


def test_hosts_stay_together_over_slow_links() -> None:
    """Two machines with two workers each: one slow hop, not three."""
    slow = NetworkLink(latency_s=0.2, bytes_per_s=1e6)
    devices = tuple(device(name, host=host, link=slow) for name, host in zip("abcd", "xyxy", strict=True))
    problem = PlanningProblem(model_of(*(1,) * 8, hop_bytes=1000), devices, takes_turns=False)
    hosts = [problem.devices[share.device].host for share in solve(problem)]  # type: ignore[union-attr]
    assert sum(one != other for one, other in itertools.pairwise(hosts)) == 1


# --- no plan ----------------------------------------------------------------------------------------------------------


def test_nobody_is_a_shortage() -> None:
    assert solve(PlanningProblem(model_of(1), ())) == Shortage("a worker: none is here", 0)


def test_a_shortage_says_how_much_is_missing() -> None:
    """All memory together is too little: in words, with the numbers, and in bytes."""
    short = solve(PlanningProblem(model_of(10, 10, 10, 10, embed=1, head=1), (device("w0", 20), device("w1", 10))))
    assert short == Shortage(
        "12 MiB more memory: m needs 170 MiB on 2 workers, joined are w0 84 MiB, w1 74 MiB", 12 * MIB
    )


def test_a_shortage_of_packing_is_told_apart() -> None:
    """There would be memory enough, were the layers not so large; who lacks how much for even one is told."""
    short = solve(PlanningProblem(model_of(10, 10, 10), (device("w0", 9), device("w1", 9), device("w2", 19))))
    assert isinstance(short, Shortage)
    assert short.missing_bytes == 0
    assert short.text == (
        "workers with more memory each: the layers don't pack into w0 73 MiB (1 MiB short of one layer), w1 73 MiB "
        "(1 MiB short of one layer), w2 83 MiB"
    )


def test_pins_that_cannot_be_kept_are_told() -> None:
    """Too large for its worker, with the bytes; or such that no order of ranges is left."""
    short = solve(PlanningProblem(model_of(*(10,) * 4), (device("a", 15, pinned=LayerRange(0, 2)), device("b"))))
    assert short == Shortage(
        "5 MiB more memory for a: it is pinned to layers 0–1, which need 84 MiB, and it has 79 MiB", 5 * MIB
    )
    clash = (device("a", pinned=LayerRange(0, 2)), device("b", pinned=LayerRange(1, 4)))
    short = solve(PlanningProblem(model_of(*(1,) * 4), clash))
    assert isinstance(short, Shortage)
    assert short.text.startswith("other pins: a and b are pinned to layers")


def test_keys_and_values_need_room() -> None:
    """Wanted positions count against memory: with them, one device no longer holds what it could hold without."""
    model = model_of(*(1,) * 4, kv_bytes=(10_000,) * 4)
    two = PlanningProblem(model, (device("a", 10), device("b", 10)), kv_positions=600)
    assert len(cut(replace(two, devices=two.devices[:1], kv_positions=0))) == 1
    assert isinstance(solve(replace(two, devices=two.devices[:1])), Shortage)
    assert len(cut(two)) == 2
    assert isinstance(solve(replace(two, kv_positions=10_000)), Shortage)


# --- many devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_turns", [False, True])
def test_many_devices_come_close_to_what_no_plan_can_beat(takes_turns: bool) -> None:
    """A hundred devices of all kinds, far from each other: found soon, and close to a bound that no plan reaches."""
    random = Random(5)
    model = model_of(*(100,) * 64, embed=300, head=300, hop_bytes=32_768)
    devices = tuple(
        device(
            f"d{i}",
            random.randint(200, 4000),
            layer_s=random.uniform(0.0005, 0.005),
            head_s=random.uniform(0.0005, 0.005),
            host=f"h{i // 4}",
            link=NetworkLink(random.uniform(1e-5, 1e-4), 1e9),
        )
        for i in range(100)
    )
    problem = PlanningProblem(model, devices, takes_turns)
    line = solve(problem)
    assert not isinstance(line, Shortage)
    check(problem, line)
    assert tables.step_seconds(problem, line) <= 1.15 * lower_bound(problem)


def test_one_order_may_leave_devices_out() -> None:
    """Along a fixed order, whoever would make it slower is passed over, unless it must be used."""
    problem = PlanningProblem(model_of(*(1,) * 4), (device("a"), device("snail", layer_s=9.0), device("b")))
    own = [tables.range_seconds(problem.model, each, 0) for each in problem.devices]
    hops = tables.hop_seconds(problem)
    free, forced = (search_order(own, hops, np.maximum, (0, 1, 2), must) for must in (frozenset[int](), frozenset({1})))
    assert free is not None
    assert forced is not None
    assert free == (2.0, (LayerShare(0, LayerRange(0, 2)), LayerShare(2, LayerRange(2, 4))))
    assert forced[0] == 9.0
    assert len(problem.devices) <= MAX_EXACT


def test_the_first_stage_has_all_layers_that_take_features_of_images() -> None:
    """However slow its device is, and whether it takes turns; a pin that leaves it fewer is named."""
    model = replace(model_of(*[10] * 8), first_layers=3)
    devices = (device("w0", layer_s=0.1), device("w1"), device("w2"))
    for takes_turns in (False, True):
        line = solve(PlanningProblem(model, devices, takes_turns))
        assert not isinstance(line, Shortage)
        assert line[0].layers.stop >= 3
    for pin, layers in ((LayerRange(0, 2), "0–1"), (LayerRange(1, 8), "1–7")):
        pinned = solve(PlanningProblem(model, (device("w0", pinned=pin), device("w1"))))
        assert isinstance(pinned, Shortage)
        assert f"w0: it is pinned to layers {layers}, and the first stage of a model that reads images" in pinned.text
    assert not isinstance(
        solve(PlanningProblem(model, (device("w0", pinned=LayerRange(3, 8)), device("w1")))), Shortage
    )
