"""Doors are tried before a plan counts on them; ways that are shut are done without, named, and tried again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from swarm.broker.actions import Action, ConnectPipeline, ProbeRoute, SendToWorker, SetRelayTickets, WriteLog
from swarm.broker.events import RouteTested, WorkerMessageReceived
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import PlanPhase, Worker, WorkerState
from swarm.broker.state.workers import (
    BROKER,
    ROUTE_RETRY_MAX_S,
    ROUTE_RETRY_MIN_S,
    ROUTE_RETRY_SOON_S,
    Routes,
    RouteState,
)
from swarm.wire.messages import Denied, LayerRange, Prepare, Query, Refused
from tests.unit.broker.bench import Bench, FakeWorker, orders, ranges, settings


def order_of(bench: Bench) -> list[str]:
    return [name for name, _ in sorted(ranges(bench).items(), key=lambda each: each[1].first)]


def worker(name: str, ticket: str = "") -> Worker:
    return Worker(FakeWorker(name, f"{name}.1", ticket=ticket).hello(), b"", 0.0)


def asked(bench: Bench) -> dict[str, Prepare]:
    """The orders of the plan that is being prepared."""
    return {peer: order for peer, order in orders(bench.log, Prepare) if order.epoch == bench.state.plans.epoch}  # type: ignore[misc]


def test_another_order_is_found(bench: Bench) -> None:
    """The first can't reach the second: the plan goes the other way round, neither is blamed, and both are in it."""
    bench.mute = {"w0"}
    bench.join("w0", "w1")
    bench.tick()
    target = asked(bench)["w0.1"].edge.to
    assert target == "w1.1"
    bench.mute = set()
    bench.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="nothing answers there", cant_reach="w1.1"))
    bench.tick()
    assert order_of(bench) == ["w1", "w0"]
    assert {w.state for w in bench.state.workers.values()} == {WorkerState.MEMBER}
    told = [a for a in bench.log if isinstance(a, WriteLog) and a.event == "way_shut"]
    assert [a.fields for a in told] == [{"source": "w0", "target": "w1", "reason": "nothing answers there"}]
    (row,) = (w for w in bench.ask(Query(what="nodes")).body["workers"] if w["name"] == "w1")
    assert row["unreachable"] == "w0 can't reach it: nothing answers there"


def test_the_broker_tries_the_first(bench: Bench) -> None:
    """Aside, so nothing waits for it: what serves already is made anew in another order."""
    bench.join("w0", "w1")
    bench.tick()
    assert order_of(bench) == ["w0", "w1"]
    assert [a for a in bench.log if isinstance(a, ProbeRoute)] == [ProbeRoute(1, bench.workers["w0"].hello().endpoint)]
    bench.feed(RouteTested(1, ""))
    assert bench.epoch == 1
    bench.feed(RouteTested(1, "nothing answers"))
    bench.tick()
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert order_of(bench) == ["w1", "w0"]
    bench.feed(RouteTested(1, "nothing answers"))  # of a plan that is no more
    bench.tick()
    assert order_of(bench) == ["w1", "w0"]


def test_who_is_reached_by_nobody_is_done_without(bench: Bench) -> None:
    bench.mute = {"w0", "w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="no", cant_reach="w1.1"))
    bench.tick()
    bench.mute = set()
    bench.feed(RouteTested(bench.state.plans.epoch, "no"))  # the other way round, the broker reaches w1 as little
    bench.tick()
    assert order_of(bench) == ["w0"]


def test_a_way_is_tried_again_the_later_the_more_often_that_was_in_vain() -> None:
    ways, target = Routes(), worker("w0")
    for wait_s in (
        ROUTE_RETRY_MIN_S,
        2 * ROUTE_RETRY_MIN_S,
        4 * ROUTE_RETRY_MIN_S,
        8 * ROUTE_RETRY_MIN_S,
        16 * ROUTE_RETRY_MIN_S,
        ROUTE_RETRY_MAX_S,
    ):
        assert ways.block("a", target, "no", 0.0) is RouteState.BLOCKED
        assert ways.routes_from("a", RouteState.BLOCKED, wait_s - 1) == {"w0.1": "no"}
        assert ways.routes_from("a", RouteState.BLOCKED, wait_s) == {}
    assert ways.routes_from("b", RouteState.BLOCKED, 0.0) == {}


def test_of_who_is_gone_nothing_is_kept() -> None:
    ways = Routes()
    for source, target in (("a", "w1"), (BROKER, "w0"), (BROKER, "w1"), ("b", "w0"), ("w0.1", "w2")):
        ways.block(source, worker(target), "no", 0.0)
    ways.retain(["w0.1", "w2.1"])
    assert sorted(ways.blocked) == [(BROKER, "w0.1"), ("w0.1", "w2.1")]


def test_who_can_t_reach_the_broker_s_door_is_not_the_last(bench: Bench) -> None:
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.mute = set()
    bench.tell("w1", Refused(epoch=1, incarnation="w1.1", reason="no", cant_reach="broker"))
    bench.tick()
    assert order_of(bench) == ["w1", "w0"]
    (row,) = (w for w in bench.ask(Query(what="nodes")).body["workers"] if w["name"] == "w1")
    assert row["unreachable"] == "it can't reach the broker's data endpoint: no"


def test_where_only_it_could_be_the_last_it_is_asked_again_soon(bench: Bench) -> None:
    """A firewall was wrong for a moment: nobody waits for half a minute."""
    bench.mute = {"w0"}
    bench.join("w0")
    bench.tick()
    bench.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="no", cant_reach="broker"))
    bench.tick()
    bench.mute = set()
    assert "w0 can't reach the broker's data port" in bench.state.plans.waits_for
    began = bench.now
    while bench.state.plans.phase is not PlanPhase.SERVING:
        bench.tick(0.5)
        assert bench.now - began < ROUTE_RETRY_SOON_S + 2


def test_who_says_it_can_t_reach_somebody_unknown_is_asked_later(bench: Bench) -> None:
    """That is its own refusal."""
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.tell("w1", Refused(epoch=1, incarnation="w1.1", reason="no", cant_reach="nobody.7"))
    bench.tick()
    assert order_of(bench) == ["w0"]
    assert bench.state.workers["w1.1"].state is WorkerState.REFUSED


def test_where_nothing_goes_without_a_way_it_is_tried_again_soon(bench: Bench) -> None:
    """The only worker, which the broker can't reach: nobody waits for half a minute when it can be reached again."""
    bench.join("w0")
    bench.tick()
    bench.feed(RouteTested(1, "nothing answers"))
    bench.tick()
    assert "the broker can't reach w0" in bench.state.plans.waits_for
    began = bench.now
    while bench.state.plans.phase is not PlanPhase.SERVING:
        bench.tick(0.5)
        assert bench.now - began < ROUTE_RETRY_SOON_S + 2
    assert order_of(bench) == ["w0"]


# --- around them, by relay --------------------------------------------------------------------------------------------

RELAY = "tcp://*:5704"
T0, T1 = "0" * 32, "1" * 32


@pytest.fixture
def relaying(make_bench: Callable[..., Bench]) -> Bench:
    """Two workers that are about to load, of a broker that has a relay. There is no other order for them."""
    pins = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
    bench = make_bench(
        settings(relay=RELAY, key="b" * 64, plan=ReconfigurationSettings(settle_s=0.0, rules=PlanRules(pins=pins)))
    )
    bench.mute = {"w0", "w1"}
    bench.join("w0", ticket=T0, key="c" * 64)
    bench.join("w1", ticket=T1, key="d" * 64)
    bench.tick()
    return bench


def cant(bench: Bench, source: str, target: str) -> list[Action]:
    """It tries the door of the next one, in vain; all that are asked next can do what they are asked."""
    bench.mute = set()
    epoch = bench.state.plans.epoch
    said = Refused(epoch=epoch, incarnation=f"{source}.1", reason="nothing answers", cant_reach=f"{target}.1")
    so_far = len(bench.log)
    bench.tell(source, said)
    bench.tick()
    return bench.log[so_far:]


def tickets(actions: Iterable[Action]) -> list[frozenset[str]]:
    return [action.tickets for action in actions if isinstance(action, SetRelayTickets)]


def test_where_a_way_is_shut_steps_go_by_relay(relaying: Bench) -> None:
    """In the order that was best: the sender is told to go there, the receiver to wait there, the relay to let both."""
    actions = cant(relaying, "w0", "w1")
    assert order_of(relaying) == ["w0", "w1"]
    first, second = relaying.workers["w0"].prepare, relaying.workers["w1"].prepare
    assert first is not None
    assert second is not None
    assert (first.edge.endpoint, first.relay) == (f"tcp://{RELAY.removeprefix('tcp://')}/{T1}", "")
    assert second.relay == f"{RELAY}/{T1}"
    assert tickets(actions) == [frozenset((T1,))]
    kinds = [type(a.message) if isinstance(a, SendToWorker) else type(a) for a in actions]
    assert kinds.index(SetRelayTickets) < kinds.index(Prepare)


def test_it_is_said_who_is_reached_by_relay(relaying: Bench) -> None:
    cant(relaying, "w0", "w1")
    told = [a.fields for a in relaying.log if isinstance(a, WriteLog) and a.event == "way_relayed"]
    assert told == [{"source": "w0", "target": "w1", "reason": "nothing answers"}]
    rows = {row["name"]: row["unreachable"] for row in relaying.ask(Query(what="nodes")).body["workers"]}
    assert rows == {"w0": "", "w1": "w0 can't reach it except through the relay: nothing answers"}
    stages = relaying.ask(Query(what="plan")).body["stages"]
    assert [(stage["worker"], stage["by_relay"]) for stage in stages] == [("w0", False), ("w1", True)]


def test_the_broker_goes_by_its_own_relay(relaying: Bench) -> None:
    """It does not try that."""
    relaying.mute = set()
    relaying.feed(RouteTested(relaying.state.plans.epoch, "nothing answers"))
    actions = relaying.tick()
    assert order_of(relaying) == ["w0", "w1"]
    opened = [a.endpoint for a in (*relaying.log, *actions) if isinstance(a, ConnectPipeline)]
    assert opened[-1] == f"{RELAY}/{T0}"
    assert len([a for a in relaying.log if isinstance(a, ProbeRoute)]) == 1


def test_what_is_relayed_stays_so_until_a_try_that_nobody_waits_for() -> None:
    """Whoever waits for an answer after a death shall not wait for another try of a door that was shut."""
    ways, target = Routes(relay=RELAY), worker("w1", T1)
    ways.block("a", target, "no", 0.0)
    assert ways.state_of("a", "w1.1", 2 * ROUTE_RETRY_MAX_S) is RouteState.RELAYED
    assert ways.take_due("a", "w1.1", ROUTE_RETRY_MIN_S)
    ways.test_directly("a", "w1.1")
    assert ways.state_of("a", "w1.1", ROUTE_RETRY_MIN_S) is RouteState.OPEN
    ways.end_tests(are_open=False)
    assert ways.state_of("a", "w1.1", ROUTE_RETRY_MIN_S) is RouteState.RELAYED
    assert not ways.take_due("a", "w1.1", ROUTE_RETRY_MIN_S + 1)


def is_relayed(bench: Bench) -> list[bool]:
    return [bool(stage.relay) for stage in bench.state.plans.current.stages] if bench.state.plans.current else []


def test_a_way_by_relay_is_tried_directly_while_the_plan_serves(relaying: Bench) -> None:
    """A firewall was opened: the same plan once more, with that way direct. The one in force runs on meanwhile."""
    cant(relaying, "w0", "w1")
    assert is_relayed(relaying) == [False, True]
    relaying.mute = {"w0"}
    relaying.tick(ROUTE_RETRY_MIN_S)
    assert asked(relaying)["w0.1"].edge.endpoint == relaying.workers["w1"].hello().endpoint
    assert (relaying.state.plans.phase, is_relayed(relaying)) == (PlanPhase.PREPARING, [False, True])
    relaying.mute = set()
    relaying.tell("w0", relaying.workers["w0"].prepared(relaying.state.plans.epoch))
    relaying.tick()
    assert (relaying.state.plans.phase, is_relayed(relaying)) == (PlanPhase.SERVING, [False, False])
    assert order_of(relaying) == ["w0", "w1"]
    assert relaying.state.routes.blocked == {}


def test_where_it_is_still_shut_the_relay_goes_on(relaying: Bench) -> None:
    """Nothing of the plan in force changes, and the next try is later each time."""
    cant(relaying, "w0", "w1")
    began, tries = relaying.epoch, []
    relaying.mute = {"w0"}
    while len(tries) < 3:
        relaying.tick(1.0)
        if relaying.state.plans.phase is PlanPhase.PREPARING:
            tries.append(relaying.now)
            epoch = relaying.state.plans.epoch
            relaying.tell("w0", Refused(epoch=epoch, incarnation="w0.1", reason="no", cant_reach="w1.1"))
            assert (relaying.state.plans.phase, is_relayed(relaying)) == (PlanPhase.SERVING, [False, True])
            assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is RouteState.RELAYED
    first, second = (later - sooner for sooner, later in itertools.pairwise(tries))
    assert first >= ROUTE_RETRY_MIN_S
    assert second == pytest.approx(2 * first, abs=2)  # one try, counted once
    assert relaying.state.plans.current is not None
    assert relaying.state.plans.current.epoch == began


def test_a_try_that_comes_to_nothing_leaves_the_way_by_relay(relaying: Bench) -> None:
    """The worker behind the door dies meanwhile."""
    cant(relaying, "w0", "w1")
    relaying.mute = {"w0"}
    relaying.tick(ROUTE_RETRY_MIN_S)
    assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is RouteState.OPEN
    relaying.lose("w1")
    assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is not RouteState.OPEN


@pytest.mark.slow
def test_the_broker_tries_its_own_way_before_a_plan_counts_on_it(relaying: Bench) -> None:
    relaying.mute = set()
    relaying.feed(RouteTested(relaying.state.plans.epoch, "nothing answers"))
    relaying.tick()
    assert is_relayed(relaying) == [True, False]
    endpoint = relaying.workers["w0"].hello().endpoint
    actions = relaying.tick(2 * ROUTE_RETRY_MIN_S)
    assert [a for a in actions if isinstance(a, ProbeRoute)] == [ProbeRoute(relaying.epoch, endpoint)]
    assert relaying.state.plans.phase is PlanPhase.SERVING
    relaying.feed(RouteTested(relaying.epoch, "nothing answers"))
    assert (relaying.state.plans.phase, is_relayed(relaying)) == (PlanPhase.SERVING, [True, False])
    relaying.tick(ROUTE_RETRY_MAX_S)
    relaying.feed(RouteTested(relaying.epoch, ""))
    relaying.tick()
    assert (relaying.state.plans.phase, is_relayed(relaying)) == (PlanPhase.SERVING, [False, False])


def test_where_the_relay_is_shut_too_there_is_no_way(relaying: Bench) -> None:
    """It is tried again, as others are."""
    relaying.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="no", cant_reach="w1.1"))
    assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is RouteState.RELAYED
    relaying.tick()
    relaying.tell("w0", Refused(epoch=2, incarnation="w0.1", reason="no", cant_reach="w1.1"))
    assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is RouteState.BLOCKED
    relaying.mute = set()
    relaying.tick()
    assert "w0 can't reach w1" in relaying.state.plans.waits_for
    relaying.tick(ROUTE_RETRY_SOON_S)
    assert order_of(relaying) == ["w0", "w1"]
    assert relaying.state.routes.state_of("w0.1", "w1.1", relaying.now) is RouteState.OPEN


def test_who_has_no_ticket_is_not_relayed() -> None:
    ways = Routes(relay=RELAY)
    assert ways.block("a", worker("w0"), "no", 0.0) is RouteState.BLOCKED
    assert ways.block("a", worker("w1", T1), "no", 0.0) is RouteState.RELAYED


def test_the_relay_passes_on_what_plans_say_and_no_longer(relaying: Bench) -> None:
    cant(relaying, "w0", "w1")
    actions = relaying.lose("w1")
    assert tickets([*actions, *relaying.tick()]) == [frozenset()]


# --- who names an address that is not its own ------------------------------------------------------------------------

WHY = "it names the address 192.0.2.9, and comes from 192.0.2.2"


def join_from_elsewhere(bench: Bench, name: str, not_at: str = WHY, **fields: object) -> list[Action]:
    bench.add(name, **fields)
    peer, hello = bench.workers[name].peer, bench.workers[name].hello()
    return bench.feed(WorkerMessageReceived(peer, hello, owner="far", address_error=not_at))


@pytest.fixture
def keyed(make_bench: Callable[..., Bench]) -> Bench:
    pins = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
    rules = PlanRules(pins=pins, standby=False)
    return make_bench(settings(relay=RELAY, key="b" * 64, plan=ReconfigurationSettings(settle_s=0.0, rules=rules)))


@pytest.mark.parametrize("which", ["w0", "w1"])
def test_nobody_connects_to_an_address_that_is_another_s(keyed: Bench, which: str) -> None:
    """Neither the broker nor a stage, to try it or to send steps: all goes by relay, from the first plan on."""
    for name, ticket, key in (("w0", T0, "c" * 64), ("w1", T1, "d" * 64)):
        join_from_elsewhere(keyed, name, WHY if name == which else "", ticket=ticket, key=key)
    keyed.tick()
    assert order_of(keyed) == ["w0", "w1"]
    named = keyed.workers[which].hello().endpoint
    told = [order.edge.endpoint for _, order in orders(keyed.log, Prepare) if isinstance(order, Prepare) and order.edge]
    opened = [a.endpoint for a in keyed.log if isinstance(a, ConnectPipeline | ProbeRoute)]
    assert named not in {*told, *opened}
    assert f"{RELAY}/{T0 if which == 'w0' else T1}" in {*told, *opened}
    notes = [a.fields for a in keyed.log if isinstance(a, WriteLog) and a.event == "worker_by_relay_only"]
    assert notes == [{"worker": which, "reason": WHY}]
    rows = {row["name"]: row["unreachable"] for row in keyed.ask(Query(what="nodes")).body["workers"]}
    assert WHY in rows[which]


def test_who_names_another_s_address_and_waits_at_no_relay_is_sent_away(keyed: Bench, bench: Bench) -> None:
    """It has no ticket; or the broker has no relay."""
    for each, ticket in ((keyed, ""), (bench, T0)):
        (denied,) = [message for _, message in orders(join_from_elsewhere(each, "w0", ticket=ticket), Denied)]
        assert isinstance(denied, Denied)
        assert denied.reason == f"{WHY}; and it can't be reached by relay"
        assert not each.state.workers


def test_a_way_by_relay_alone_that_is_shut_is_shut() -> None:
    """It is tried again, by relay; nobody falls back to the address."""
    ways, target = Routes(relay=RELAY), worker("w0", T0)
    ways.set_relay_only("w0.1", WHY)
    assert ways.state_of("a", "w0.1", 0.0) is RouteState.RELAYED
    assert ways.routes_from("a", RouteState.RELAYED, 0.0) == {"w0.1": WHY}
    assert ways.endpoint_of(target) == ways.relay_endpoint(target) != target.hello.endpoint
    assert ways.block("a", target, "no", 0.0) is RouteState.BLOCKED
    assert ways.state_of("a", "w0.1", ROUTE_RETRY_MIN_S - 1) is RouteState.BLOCKED
    assert ways.state_of("a", "w0.1", ROUTE_RETRY_MIN_S) is RouteState.RELAYED
    before = ways.list_not_open(ROUTE_RETRY_MIN_S)
    ways.set_relay_only("w0.1", "")
    assert ways.state_of("a", "w0.1", ROUTE_RETRY_MIN_S) is RouteState.OPEN
    assert before != ways.list_not_open(ROUTE_RETRY_MIN_S)


def test_of_who_is_forgotten_no_address_is_avoided(keyed: Bench) -> None:
    join_from_elsewhere(keyed, "w0", ticket=T0, key="c" * 64)
    keyed.tick()
    keyed.lose("w0")
    keyed.add("w0", incarnation="w0.2", ticket=T1, key="c" * 64)
    keyed.feed(WorkerMessageReceived(b"w0.2", keyed.workers["w0"].hello(), owner="far"))
    assert keyed.state.routes.relay_only == {}
