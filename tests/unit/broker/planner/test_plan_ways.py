"""Ways that are shut: an order that does without them where there is one, else the reason in words."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from swarm.broker.planner import tables
from swarm.broker.planner.explain import describe_forecast, make_forecast
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planner.problem import NetworkLink, PlanningProblem, Shortage
from swarm.broker.planner.solve import solve, solve_fixed_order
from tests.unit.broker.planner.test_plan_search import cut, device, model_of

NAMES = ("a", "b", "c", "d", "e")


def shut(problem: PlanningProblem, *ways: str) -> PlanningProblem:
    """``ab``: a can't reach b; ``-a``: the broker can't reach a; ``a-``: nor a the broker's data door."""
    found = []
    for each in problem.devices:
        targets = frozenset(way[1:] for way in ways if way[0] == each.name)
        found.append(
            replace(each, cant_reach=targets, is_shut=f"-{each.name}" in ways, is_mute=f"{each.name}-" in ways)
        )
    return replace(problem, devices=tuple(found))


def three(layers: int = 6, mib: int = 2) -> PlanningProblem:
    """Each holds two layers, so that all are needed."""
    return PlanningProblem(model_of(*[1] * layers), tuple(device(name, mib) for name in NAMES[:3]))


def test_the_order_avoids_what_is_shut() -> None:
    assert [name for name, _, _ in cut(shut(three(), "ab", "ba", "-b", "-c"))] == ["a", "c", "b"]


def test_who_is_not_needed_is_left_out() -> None:
    """Nobody reaches it."""
    free = PlanningProblem(model_of(*[1] * 6), tuple(device(name) for name in NAMES[:3]))
    assert {name for name, _, _ in cut(shut(free, "ac", "bc", "-c"))} == {"a", "b"}


def test_where_there_is_no_order_the_ways_are_named() -> None:
    found = solve(shut(three(), "ac", "bc", "-c"))
    assert isinstance(found, Shortage)
    assert "the broker can't reach c" in found.text
    assert "a can't reach c" in found.text
    assert "worker.data_ports" in found.text
    assert solve_fixed_order(shut(three(), "ab", "ac", "bc", "-c")) is None


@pytest.mark.parametrize("seed", range(60))
def test_there_is_a_plan_exactly_if_there_is_an_open_order(seed: int) -> None:
    chance = Random(seed)
    num = chance.randrange(2, 6)
    ways = [f"-{a}" for a in NAMES[:num] if chance.random() < 0.4]
    ways += [f"{a}-" for a in NAMES[:num] if chance.random() < 0.3]
    ways += [a + b for a, b in itertools.permutations(NAMES[:num], 2) if chance.random() < 0.5]
    problem = PlanningProblem(
        model_of(*[1] * (2 * num)),
        tuple(device(name, 2) for name in NAMES[:num]),
        takes_turns=chance.random() < 0.5,
    )
    problem = shut(problem, *ways)
    exists = any(
        f"-{order[0]}" not in ways
        and f"{order[-1]}-" not in ways
        and all(a + b not in ways for a, b in itertools.pairwise(order))
        for order in itertools.permutations(NAMES[:num])
    )
    found = solve(problem)
    assert isinstance(found, Shortage) is not exists
    if not isinstance(found, Shortage):
        assert tables.is_connected(problem, found)


def test_of_many_devices_too() -> None:
    """Half of twelve can't reach the other half; those can."""
    names = [f"d{i:02}" for i in range(12)]
    problem = PlanningProblem(model_of(*[1] * 24), tuple(device(name, 2) for name in names))
    first = frozenset(names[:6])
    devices = tuple(
        replace(d, cant_reach=frozenset(names[6:]) if d.name in first else frozenset()) for d in problem.devices
    )
    found = solve(replace(problem, devices=devices))
    assert not isinstance(found, Shortage), found.text
    assert tables.is_connected(replace(problem, devices=devices), found)
    assert [names[share.device] in first for share in found] == [False] * 6 + [True] * 6


# --- around them, by relay --------------------------------------------------------------------------------------------


def relayed(problem: PlanningProblem, *ways: str) -> PlanningProblem:
    """As ``shut``, where the relay goes around it."""
    return replace(
        problem,
        devices=tuple(
            replace(
                each,
                relayed_to=frozenset(way[1:] for way in ways if way[0] == each.name),
                is_relayed=f"-{each.name}" in ways,
            )
            for each in problem.devices
        ),
    )


def linked(*latencies: float, bytes_per_s: float = 1e6) -> PlanningProblem:
    """Devices with these ways to the broker, all of which are needed; a step carries 1,000 bytes, and takes turns."""
    devices = tuple(
        replace(device(name, 2), link=NetworkLink(latency, bytes_per_s))
        for name, latency in zip(NAMES, latencies, strict=False)
    )
    model = replace(model_of(*[1] * (2 * len(devices))), hop_bytes=1000)
    return PlanningProblem(model, devices, takes_turns=True)


def test_what_is_relayed_takes_both_ways() -> None:
    problem = relayed(linked(0.01, 0.03), "ab")
    table = tables.hop_seconds(problem)
    assert table[0, 1] == pytest.approx(0.01 + 0.03 + 2 * 0.001 + tables.RELAY_S)
    assert table[1, 0] == pytest.approx(0.03 + 0.001)


def test_an_order_without_a_relay_is_better() -> None:
    """Where nothing else speaks for one."""
    assert [name for name, _, _ in cut(relayed(linked(0.01, 0.01, 0.01), "ab", "ca", "-a", "-b"))] == ["c", "b", "a"]


def test_where_no_order_does_without_one_it_is_taken() -> None:
    problem = relayed(shut(linked(0.01, 0.01), "ba", "-b"), "ab")
    assert [name for name, _, _ in cut(problem)] == ["a", "b"]
    found = solve(problem)
    assert not isinstance(found, Shortage)
    assert tables.is_connected(problem, found)


def test_the_relay_s_price_is_in_the_step() -> None:
    free, around = linked(0.01, 0.03), relayed(linked(0.01, 0.03), "ab", "ba", "-a", "-b")
    line = solve(around)
    assert not isinstance(line, Shortage)
    more = tables.step_seconds(around, line) - tables.step_seconds(free, line)
    assert more == pytest.approx(0.01 + 0.001 + 2 * tables.RELAY_S)


def test_it_is_told_who_is_reached_by_relay_and_what_that_costs() -> None:
    problem = relayed(shut(linked(0.01, 0.03), "ba", "-b"), "ab", "-a")
    line = solve(problem)
    assert not isinstance(line, Shortage)
    told = make_forecast(problem, line, PlannedLoad(1, 1, 0.0), "latency")
    assert [stage.by_relay for stage in told.stages] == [True, True]
    said = [each for each in describe_forecast(told) if "relay" in each]
    assert said == [
        "a is reached only through the broker's relay",
        "b is reached only through the broker's relay, in 42.1 ms from a",
    ]
