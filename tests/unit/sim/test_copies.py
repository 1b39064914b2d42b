"""Copies of keys and values in the simulation: their links and faults, and the states that they are compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from swarm.params import SamplingParams
from swarm.sim.checks.chains import ExpectedStates
from swarm.sim.network import Network, Weather
from swarm.sim.run import run, run_many
from swarm.sim.schedules import variations
from swarm.sim.schedules.draw import KV_FAULTS
from swarm.sim.schedules.variations import make_full_schedule
from swarm.sim.world import Durations, World
from swarm.stage.executor import KvData
from swarm.testing import FakeExecutor, fake_draws, fake_manifest
from swarm.wire.messages import LayerRange


@pytest.mark.parametrize("seed", range(10))
def test_parts_are_late_or_lost_but_in_order(seed: int) -> None:
    """Bad weather delays what a connection for copies carries; nothing overtakes, and nothing comes twice. What was
    sent before a death may arrive after it."""
    world, arrived = World(seed, Durations()), []
    network = Network(world, Weather(late=0.5, jitter_s=1.0, twice=0.5, overtaken=0.5))
    link = network.link("a", "b", "kv", (0.0, 0.1))
    for number in range(20):
        link.send(lambda n=number: arrived.append(n), extra_s=0.1)  # type: ignore[misc]
    world.schedule(0.3, link.close)
    while world.step():
        pass
    assert arrived == list(range(len(arrived)))


def test_connections_for_copies_draw_from_random_numbers_of_their_own() -> None:
    """So the rest of a seed's story is the same with them."""
    world = World(1, Durations())
    before = world.random.getstate()
    link = Network(world).link("a", "b", "kv", (0.0, 0.1))
    for _ in range(5):
        link.send(lambda: None)
    link.close()
    assert world.random.getstate() == before


@pytest.mark.parametrize("seed", range(5))
def test_expected_states_follow_the_tokens(seed: int) -> None:
    """They are the same however they were asked for, also after the number stood for another history."""
    random, manifest = Random(seed), fake_manifest(4)
    histories = [[random.randrange(97) for _ in range(40)] for _ in range(2)]
    histories[1][:10] = histories[0][:10]
    states, fresh = ExpectedStates(manifest.num_layers), ExpectedStates(manifest.num_layers)
    for _ in range(20):
        history = histories[random.randrange(2)][: random.randint(1, 40)]
        found = [layer[: len(history)] for layer in states.of(7, history, SamplingParams())]
        again = fresh.of(random.randrange(1 << 30), history, SamplingParams())
        assert found == [layer[: len(history)] for layer in again]
    assert fake_draws(histories[0], SamplingParams(max_tokens=1), 1, manifest)


def test_most_schedules_have_copies_and_some_have_each_of_their_faults() -> None:
    schedules = [make_full_schedule(seed) for seed in range(400)]
    kinds = Counter(fault.kind for schedule in schedules for fault in schedule.faults if fault.kind in KV_FAULTS)
    assert kinds.keys() == set(KV_FAULTS)
    assert all(10 < count < 140 for count in kinds.values())
    policies = Counter(schedule.settings.plan.rules.standby_kv for schedule in schedules)
    assert policies["neighbours"] > policies["all"] > policies["none"] / 3 > 0


@pytest.mark.schedules
@pytest.mark.parametrize("kind", KV_FAULTS)
def test_faults_of_copies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies lag, are lost, evicted or damaged, and die with their owners: every answer is right all the same."""
    monkeypatch.setattr(variations, "KV_FAULTS", (kind,))
    monkeypatch.setattr(variations, "KV_OFTEN", 1.0)
    monkeypatch.setattr(variations, "NO_COPIES", 0.0)
    played = [run(seed) for seed in range(300, 312)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_copied for o in played) > 0


@pytest.mark.schedules
def test_a_sender_that_lies_is_noticed_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that were altered before their checksum was made are believed, like false hidden states: only rechecks
    can find their sender. So schedules draw no such fault, and the audit compares what is stored."""
    real = FakeExecutor.read_kv

    def altered(self: FakeExecutor, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        data = real(self, sequence, layers, start, stop)
        numbers = data.numbers.copy()
        numbers.view("uint64").flat[-1] ^= 1 << 20
        return replace(data, numbers=numbers)

    monkeypatch.setattr(FakeExecutor, "read_kv", altered)
    failures = [played.failure for played in run_many(0, 10) if played.failure]
    assert failures
    assert all(failure.startswith("Violation: I16") for failure in failures)
