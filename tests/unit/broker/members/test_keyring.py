"""Where doors go by keys: who is heard where, whose beats count, and what follows when a key is revoked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from swarm.broker.actions import Action, DisconnectPipeline, SendToWorker, SetAllowedKeys
from swarm.broker.events import KeyRevoked
from swarm.broker.members import keyring
from swarm.broker.members.keyring import Keyring
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.state import State, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import (
    AllowKey,
    BlockKey,
    Denied,
    Fence,
    Finished,
    KeptWarm,
    LayerRange,
    Prepare,
    Recheck,
    Rejoin,
)
from tests.unit.broker.bench import Bench, orders, said, settings, submit

BROKER, K0, K1, K2 = (digit * 64 for digit in "b012")
KEYS = {"w0": K0, "w1": K1, "w2": K2}
KEYED = settings(key=BROKER)
MakeBench = Callable[..., Bench]


def join(bench: Bench, *names: str) -> None:
    for name in names:
        bench.join(name, key=KEYS[name])


def beat(bench: Bench, name: str, key: str) -> list[Action]:
    """Somebody with this key beats in this worker's name."""
    former, bench.workers[name].key = bench.workers[name].key, key
    actions = bench.beat(name)
    bench.workers[name].key = former
    return actions


@pytest.fixture
def keyed(make_bench: MakeBench) -> Bench:
    """Two workers with keys, serving."""
    bench = make_bench(KEYED)
    join(bench, "w0", "w1")
    bench.tick(0.3)
    assert bench.state.plans.is_serving
    return bench


def admitted(actions: list[Action], door: str) -> list[frozenset[str]]:
    return [action.keys for action in actions if isinstance(action, SetAllowedKeys) and action.socket == door]


def names_of(bench: Bench) -> list[str]:
    assert bench.state.plans.current is not None
    return [stage.name for stage in bench.state.plans.current.stages]


def test_each_stage_is_told_who_is_before_it(keyed: Bench) -> None:
    """The first one that it is the broker."""
    first, last = names_of(keyed)
    found = {peer: order.before for peer, order in orders(keyed.log, Prepare) if isinstance(order, Prepare)}
    assert found == {f"{first}.1": BROKER, f"{last}.1": KEYS[first]}


def test_the_brokers_doors_hear_who_has_business_there(keyed: Bench) -> None:
    """Beats: whoever said Hello, before it is told where to send them. Data: the last stage, before anybody begins.
    Each is told once."""
    assert admitted(keyed.log, "beat") == [frozenset((K0,)), frozenset((K0, K1))]
    assert admitted(keyed.log, "data") == [frozenset((KEYS[names_of(keyed)[-1]],))]
    kinds = [type(a.message).__name__ if isinstance(a, SendToWorker) else type(a).__name__ for a in keyed.log]
    assert kinds.index("SetAllowedKeys") < kinds.index("Welcome")
    data = next(i for i, a in enumerate(keyed.log) if isinstance(a, SetAllowedKeys) and a.socket == "data")
    assert kinds.index("Prepare") < data < kinds.index("Activate")


def test_the_data_door_is_shut_without_a_plan(keyed: Bench) -> None:
    """As soon as the plan has fallen."""
    keyed.take()
    actions = keyed.lose(names_of(keyed)[-1])
    assert admitted(actions, "data") == [frozenset()]
    # By its beats the broker finds out who lives after all: so these are heard still.
    assert admitted(actions, "beat") == []


def test_without_a_key_of_its_own_nothing_is_told(make_bench: MakeBench) -> None:
    """The doors go by no keys, whatever workers say of theirs; beats count without them."""
    bench = make_bench()
    join(bench, "w0", "w1")
    bench.tick(0.3)
    assert bench.state.plans.is_serving
    assert not [action for action in bench.log if isinstance(action, SetAllowedKeys)]
    first, last = names_of(bench)
    found = {peer: order.before for peer, order in orders(bench.log, Prepare) if isinstance(order, Prepare)}
    assert found == {f"{first}.1": None, f"{last}.1": KEYS[first]}


def test_a_beat_under_anothers_name_does_not_count(keyed: Bench) -> None:
    """It is refused and counted; whoever is silent is out, whatever others say in its place."""
    keyed.silent = {"w1"}
    for _ in range(20):
        beat(keyed, "w1", K0)
        keyed.tick()
    assert keyed.state.counters["foreign_beats"] == 20
    assert keyed.state.workers["w1.1"].state is WorkerState.OUT
    assert beat(keyed, "w1", K0) == []
    # By its own beat it is noticed, and called back.
    keyed.now += 10.0
    assert [order for _, order in orders(beat(keyed, "w1", K1), Rejoin)]


# --- revoked ---------------------------------------------------------------------------------------------------------


def test_a_revoked_worker_is_out_at_once(keyed: Bench) -> None:
    """With its evidence; nobody hears it, and it is not called back, however it beats."""
    join(keyed, "w2")
    keyed.tick(1.0)
    keyed.say(submit(max_tokens=4))
    name = names_of(keyed)[0]
    keyed.pipe.clear()
    actions = keyed.feed(KeyRevoked(KEYS[name]))
    worker = keyed.state.workers[f"{name}.1"]
    assert (worker.state, worker.reason) == (WorkerState.OUT, "its key was revoked")
    judgement = keyed.judgements_of(name)
    assert (judgement.verdict, judgement.evidence) == (Verdict.DEAD, "its key was revoked")
    assert [peer for peer, _ in orders(actions, Denied)] == [f"{name}.1"]
    assert DisconnectPipeline() in actions
    assert admitted(actions, "beat") == [frozenset(KEYS.values()) - {KEYS[name]}]
    keyed.now += 10.0
    assert beat(keyed, name, KEYS[name]) == []
    assert keyed.state.counters["foreign_beats"] == 1
    # The others go on with what it was doing.
    del keyed.workers[name]
    keyed.tick(2.0)
    keyed.run_dry()
    assert [message.reason for message in said(keyed.log, Finished) if isinstance(message, Finished)] == ["length"]


def test_the_others_are_told_who_is_out_for_good(keyed: Bench) -> None:
    """At once: the next plan's fence comes when its epoch is written, if there is one."""
    actions = keyed.feed(KeyRevoked(K1))
    ((peer, told),) = orders(actions, BlockKey)
    assert isinstance(told, BlockKey)
    assert (peer, told.key) == ("w0.1", K1)
    assert not orders(actions, Fence)


def test_a_revoked_key_that_nobody_has(keyed: Bench) -> None:
    """Nothing happens; nor the second time."""
    assert keyed.feed(KeyRevoked(K2)) == []
    keyed.feed(KeyRevoked(K1))
    lost = keyed.state.counters["workers_lost"]
    keyed.feed(KeyRevoked(K1))
    assert keyed.state.counters["workers_lost"] == lost


def test_one_that_comes_back_by_another_key_is_welcome(keyed: Bench) -> None:
    """The same process even: it was invited again."""
    keyed.feed(KeyRevoked(K1))
    keyed.tell("w1", keyed.workers["w1"].hello(key=K2))
    beat(keyed, "w1", K2)
    assert "foreign_beats" not in keyed.state.counters
    assert keyed.state.workers["w1.1"].state is WorkerState.MEMBER


def test_keys_of_former_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes."""
    monkeypatch.setattr(keyring, "MAX_FORMER", 2)
    ring = Keyring(State(), BROKER)
    for key in (K0, K1, K2):
        ring.add(key)
    assert admitted(ring.pending_actions(), "beat") == [frozenset((K1, K2))]  # type: ignore[arg-type]
    assert ring.pending_actions() == []


# --- rechecks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [KEYS, {}])
def test_who_receives_a_part_of_a_recheck_is_told_whom_to_hear(make_bench: MakeBench, keys: dict[str, str]) -> None:
    """Before the sender is told to send it; where doors go by no keys nobody is told anything."""
    bench = make_bench(settings(key=BROKER if keys else None, recheck=RecheckSettings(5.0, positions=10)))
    for name in KEYS:
        bench.join(name, host="one", kernels="plain; float32, exact", key=keys.get(name))
    bench.tick(0.3)
    keep_all(bench, names_of(bench)[-1])
    bench.say(submit(max_tokens=200))
    for _ in range(5):
        bench.finish()
    expected: list[tuple[str, AllowKey]] = []
    for _ in range(6):
        bench.take()
        bench.tick(5.1)
        told = [(peer, order) for peer, order in orders(bench.take()) if isinstance(order, AllowKey | Recheck)]
        for sender, recheck in told[-1:]:
            assert isinstance(recheck, Recheck)
            way = [sender, *(leg.to.to for leg in recheck.trial.legs)]
            pairs = [(a, b) for a, b in pairwise(way) if a != b] if keys else []
            assert told[:-1] == [(b, AllowKey(epoch=bench.epoch, key=keys[a.partition(".")[0]])) for a, b in pairs]
            expected += told[:-1]  # type: ignore[arg-type]
        bench.core.state.rechecks.end()  # another one may begin
    assert bool(expected) == bool(keys)


def keep_all(bench: Bench, name: str) -> None:
    """This worker has warm what others have."""
    layers = (LayerRange(0, 6),)
    bench.tell(name, KeptWarm(incarnation=f"{name}.1", layers=layers, wanted=layers, load_s=0.1))
