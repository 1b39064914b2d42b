"""The simulated network does what networks do, and nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from swarm.sim.network import ANY_NODE, Network, SimLink, Weather, garble_step
from swarm.sim.schedules.draw import BROKER_POINTS, FAULT_KINDS, make_schedule
from swarm.sim.world import Durations, World
from swarm.wire.messages import Row, Step


def _run(world: World, until: float = 1e9) -> None:
    while world.now < until and world.step():
        pass


def _sender(link: SimLink, arrived: list[int]) -> list[int]:
    for number in range(8):
        link.send(lambda n=number: arrived.append(n))  # type: ignore[misc]
    return list(range(8))


@pytest.mark.parametrize("seed", range(5))
def test_a_blocked_way_holds_everything_back(seed: int) -> None:
    """Nothing arrives while the way is blocked, all of it in order afterwards; the other way is free."""
    world, arrived, back = World(seed, Durations()), [], []
    network = Network(world)
    link = network.link("a", "b", "data", (0.0, 0.1))
    network.block("a", ANY_NODE)
    sent = _sender(link, arrived)
    network.link("b", "a", "data", (0.0, 0.1)).send(lambda: back.append(1))
    world.schedule(5.0, lambda: network.unblock("a", ANY_NODE))
    _run(world, until=4.0)
    assert (arrived, back) == ([], [1])
    _run(world)
    assert arrived == sent


def test_who_connects_over_a_blocked_way_notices() -> None:
    """A connection that stood before does not: what it took is under way for all that its sender knows."""
    world = World(1, Durations())
    network = Network(world)
    before = network.link("a", "b", "data", (0.0, 0.1))
    network.block("a", "b")
    after = network.link("a", "b", "data", (0.0, 0.1))
    for link in (before, after):
        link.send(lambda: None)
    assert (before.is_stuck, after.is_stuck) == (False, True)
    network.heal()
    _run(world)
    assert not after.is_stuck


@pytest.mark.parametrize(("keeps", "later"), [(True, [98, 99]), (False, [99])])
def test_a_connection_that_drops_loses_the_last_and_comes_back(keeps: bool, later: list[int]) -> None:
    """A beginning of what was under way arrives, then what was given to it meanwhile if that is kept, then the rest."""
    for seed in range(20):
        world, arrived = World(seed, Durations()), []
        link = Network(world).link("a", "b", "data", (0.0, 0.1))
        _sender(link, arrived)
        link.drop(1.0, keeps=keeps)
        link.send(lambda: arrived.append(98))  # noqa: B023
        world.schedule(2.0, lambda: link.send(lambda: arrived.append(99)))  # noqa: B023
        _run(world)
        first = arrived[: len(arrived) - len(later)]
        assert first == list(range(len(first)))
        assert arrived[len(first) :] == later


def test_who_lost_the_other_end_says_nothing_until_it_is_back() -> None:
    """The other end died with all that it had not read; what is said meanwhile is lost, too, later words arrive."""
    for seed in range(20):
        world, arrived = World(seed, Durations()), []
        link = Network(world).link("a", "b", "control", (0.0, 0.1))
        _sender(link, arrived)
        link.kill()
        link.send(lambda: arrived.append(98))  # noqa: B023
        world.schedule(1.0, link.reconnect)
        world.schedule(2.0, lambda: link.send(lambda: arrived.append(99)))  # noqa: B023
        _run(world)
        assert arrived == [99]


def test_whoever_keeps_what_he_cannot_send() -> None:
    """The other end died: a beginning of what was under way, and what is given to the connection meanwhile, waits."""
    for seed in range(20):
        world, arrived = World(seed, Durations()), []
        link = Network(world).link("a", "b", "data", (0.0, 0.1))
        _sender(link, arrived)
        link.go_down()
        link.send(lambda: arrived.append(98))  # noqa: B023
        _run(world, until=0.5)
        assert arrived == []
        assert link.is_stuck
        link.restore()
        _run(world)
        assert arrived == [*range(len(arrived) - 1), 98]


def test_bad_weather_repeats_and_overtakes_but_loses_nothing() -> None:
    """Everything arrives at least once; only data is overtaken."""
    weather = Weather(late=0.5, jitter_s=0.2, twice=0.5, overtaken=0.5)
    orders, repeats = set(), 0
    for seed in range(10):
        world, arrived = World(seed, Durations()), []
        _sender(Network(world, weather).link("a", "b", "data", (0.0, 0.01)), arrived)
        _run(world)
        assert set(arrived) == set(range(8))
        repeats += len(arrived) - 8
        orders.add(tuple(dict.fromkeys(arrived)))
    assert repeats > 0
    assert len(orders) > 1


@pytest.mark.parametrize("seed", range(30))
def test_what_flips_or_is_cut_off_is_refused(seed: int) -> None:
    """By the codec of production, in words."""
    step = Step(epoch=1, step=1, rows=(Row(1, 0, 2, False),), tokens=(1, 2))
    assert isinstance(garble_step(step, np.ones((2, 2), np.float32), Random(seed)), str)


@pytest.mark.slow
def test_every_kind_of_fault_strikes() -> None:
    """Each is drawn about as often as any other, alone and together with others."""
    drawn = [fault for seed in range(2000) for fault in make_schedule(seed).faults]
    for kind in FAULT_KINDS:
        assert sum(fault.kind == kind for fault in drawn) > 60, kind
    points = {fault.point for fault in drawn if fault.kind == "crash_at"}
    assert len(points) == 16
    points = {fault.broker_point for fault in drawn if fault.kind == "broker_crash_at"}
    assert len(points) > len(BROKER_POINTS)  # each before and after, nearly all of them
    together = [s for s in map(make_schedule, range(300)) if len({f.at for f in s.faults}) < len(s.faults)]
    assert len(together) > 20


def test_who_is_not_heard_keeps_what_it_sends_and_knocks_again() -> None:
    """It comes in order once the door opens. Who is hung up on loses of it what was on its way, the first of it."""
    world, arrived, is_open = World(1, Durations()), [], [False]
    link = Network(world).link("a", "b", "data", (0.0, 0.1), opens=lambda: is_open[0])
    sent = _sender(link, arrived)
    _run(world, until=1.0)
    assert (arrived, link.is_stuck) == ([], True)
    is_open[0] = True
    _run(world)
    assert (arrived, link.is_stuck) == (sent, False)
    is_open[0] = False
    again = [number + 8 for number in sent]
    for number in again:
        link.send(lambda n=number: arrived.append(n))  # type: ignore[misc]
    world.schedule(0.5, lambda: is_open.__setitem__(0, True))
    _run(world)
    assert arrived[8:] == again[16 - len(arrived) :] if len(arrived) < 16 else arrived[8:] == again
