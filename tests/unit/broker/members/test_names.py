"""Who may have a name: a process that is started anew takes the place of its dead former self at once, one that is
started beside a living one is refused, and no process that lives is put out for another one of its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.events import HeartbeatReceived, WorkerDisconnected, WorkerMessageReceived
from swarm.broker.members.admission import MAX_REMEMBERED
from swarm.broker.members.worker_names import PROOF_S
from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.state import WorkerState
from swarm.broker.state.newcomers import MAX_CLAIMS, MAX_REFUSALS, REPORT_INTERVAL_S, Newcomers
from swarm.wire.messages import NO_LINEAGE, Denied, LayerRange, Leaving, Lineage, Order, Query, Welcome
from tests.unit.broker.bench import Bench, FakeWorker, beat_of, orders, ranges, submit

MakeBench = Callable[..., Bench]
BEFORE = Lineage("a journal", 3)


def knocks(bench: Bench, name: str = "w1", incarnation: str = "w1.2", **fields: object) -> FakeWorker:
    """A second process of this name says Hello; the first one goes on."""
    worker = FakeWorker(name, incarnation, **fields)  # type: ignore[arg-type]
    bench.feed(WorkerMessageReceived(worker.peer, worker.hello()))
    return worker


def answers(bench: Bench, incarnation: str = "w1.2") -> list[type[Order]]:
    """What this process has been told, of whether it is let in."""
    kinds = [type(order) for peer, order in orders(bench.take()) if peer == incarnation]
    return [kind for kind in kinds if kind in (Welcome, Denied)]


def lives(bench: Bench, incarnation: str) -> bool:
    worker = bench.state.workers.get(incarnation)
    return worker is not None and not worker.is_gone


def test_a_second_process_is_refused_while_the_first_lives(serving: Bench) -> None:
    """The first one's work is not touched: no plan is made, and it hears nothing of it."""
    serving.say(submit(max_tokens=4))
    serving.take()
    knocks(serving, host="elsewhere")
    assert answers(serving) == []  # the first may have died just now
    serving.tick(PROOF_S + 0.3)
    told = orders(serving.take())
    ((reason, peer),) = [(order.reason, peer) for peer, order in told if isinstance(order, Denied)]
    assert peer == "w1.2"
    assert reason == (
        "the name w1 is taken by a running worker (process 1 on w1); give this one a name of its own "
        "(--name), or stop that one first (swarmctl stop w1)"
    )
    assert (lives(serving, "w1.1"), lives(serving, "w1.2"), serving.epoch) == (True, False, 1)
    serving.run_dry()
    assert serving.sequence().reason == "length"
    assert serving.sequence().num_deaths == 0


def test_who_takes_a_dead_ones_place_is_let_in_as_soon_as_its_end_is_known(serving: Bench) -> None:
    """Its connection closes a moment after the new process has said Hello: no clock has to tick for that."""
    new = knocks(serving)
    serving.workers["w1"] = new
    serving.feed(WorkerDisconnected(b"w1.1"))
    assert answers(serving) == [Welcome]
    serving.tick()
    assert set(ranges(serving)) == {"w0", "w1"}
    assert "w1.1" not in serving.state.workers


def test_who_takes_the_place_of_one_that_is_known_to_be_dead_waits_for_nothing(serving: Bench) -> None:
    serving.lose("w1")
    serving.take()
    serving.workers["w1"] = knocks(serving)
    assert answers(serving) == [Welcome]


def test_one_that_fell_silent_is_replaced_when_that_is_known(serving: Bench) -> None:
    """Its machine lost its power, or it is frozen: no connection closes. A beat that was on its way proves nothing."""
    serving.silent = {"w1"}
    new = knocks(serving)
    serving.feed(HeartbeatReceived(beat_of("w1.1")))
    serving.workers["w1"] = new
    serving.tick(serving.settings.health.beat_timeout_s + 0.3)
    assert answers(serving) == [Welcome]
    # Should it only have been frozen, it is the second one now.
    serving.silent.clear()
    serving.tick(0.2)
    knocks(serving, incarnation="w1.1")
    serving.tick(PROOF_S + 0.3)
    assert (answers(serving, "w1.1"), lives(serving, "w1.2")) == ([Denied], True)


@pytest.mark.parametrize("comes_back", [True, False])
def test_one_whose_connection_alone_was_cut_keeps_its_name(serving: Bench, comes_back: bool) -> None:
    """It beats on while it knocks again. Should it end after all, the other one is let in."""
    serving.feed(WorkerDisconnected(b"w1.1"))
    serving.tick(0.3)
    second = knocks(serving)
    assert answers(serving) == []
    if comes_back:
        serving.tell("w1", serving.workers["w1"].hello())
    else:
        serving.workers["w1"] = second
    serving.tick(PROOF_S + 0.3)
    assert answers(serving) == [Denied if comes_back else Welcome]
    assert lives(serving, "w1.1") is comes_back


def test_one_that_has_said_that_it_leaves_is_replaced_at_once(serving: Bench) -> None:
    """A service that is restarted, say; also while others are still taking over its layers."""
    serving.mute = {"w0"}
    serving.tell("w1", Leaving(epoch=1, incarnation="w1.1", reason="it was asked to end by SIGTERM"))
    serving.tick()
    assert serving.state.workers["w1.1"].state is WorkerState.LEAVING
    serving.take()
    knocks(serving)
    assert answers(serving) == [Welcome]


def test_of_two_that_wait_the_first_gets_the_name(serving: Bench) -> None:
    """The other one is refused then, like any second process."""
    first = knocks(serving)
    knocks(serving, incarnation="w1.3")
    serving.workers["w1"] = first
    serving.feed(WorkerDisconnected(b"w1.1"))
    serving.tick(PROOF_S + 0.3)
    told = orders(serving.take())
    assert [(peer, type(order)) for peer, order in told if isinstance(order, Welcome | Denied)] == [
        ("w1.2", Welcome),
        ("w1.3", Denied),
    ]


def test_who_asks_again_waits_no_longer_for_it(serving: Bench) -> None:
    """A worker says Hello again after a while without an answer."""
    knocks(serving)
    serving.tick(PROOF_S - 0.2)
    knocks(serving)
    serving.tick(0.4)
    assert answers(serving) == [Denied]


def test_who_went_away_while_it_waited_is_not_let_in(serving: Bench) -> None:
    knocks(serving)
    serving.feed(WorkerDisconnected(b"w1.2"))
    serving.feed(WorkerDisconnected(b"w1.1"))
    serving.tick(PROOF_S + 0.3)
    assert answers(serving) == []
    assert not lives(serving, "w1.2")


def test_a_pause_of_the_brokers_own_proves_nothing(serving: Bench) -> None:
    """What is heard after it was said before, perhaps by one that has died since."""
    serving.silent = {"w1"}
    new = knocks(serving)
    serving.now += 5.0
    serving.feed(HeartbeatReceived(beat_of("w1.1")))
    serving.tick()
    assert answers(serving) == []
    serving.workers["w1"] = new
    serving.feed(WorkerDisconnected(b"w1.1"))
    assert answers(serving) == [Welcome]


def test_who_was_refused_is_told_so_again_at_once(serving: Bench) -> None:
    """Its connection breaks before that reaches it, and the worker dies meanwhile: let in now, it would end as a
    member. There is an end to how many are remembered."""
    knocks(serving)
    serving.tick(PROOF_S + 0.3)
    assert answers(serving) == [Denied]
    serving.lose("w1")
    serving.take()
    knocks(serving)
    assert answers(serving) == [Denied]
    for number in range(2 * MAX_REMEMBERED):
        knocks(serving, "w0", f"w0.{number + 2}")
    assert len(serving.state.newcomers.claims) == MAX_CLAIMS
    serving.tick(PROOF_S + 0.3)
    assert len(serving.state.replaced) == MAX_REMEMBERED
    assert not serving.state.newcomers.claims


def test_who_came_from_elsewhere_makes_room_for_the_brokers_own_machine(serving: Bench) -> None:
    """Who joins from elsewhere chose its name itself; and is not let in again though it has not heard of it."""
    far = serving.add("far", "far.1")
    serving.feed(WorkerMessageReceived(far.peer, far.hello(), "far"))
    serving.take()
    knocks(serving, "far", "far.2")
    told = [(peer, type(order)) for peer, order in orders(serving.take()) if isinstance(order, Welcome | Denied)]
    assert told == [("far.1", Denied), ("far.2", Welcome)]
    serving.feed(WorkerMessageReceived(far.peer, far.hello(), "far"))
    assert answers(serving, "far.1") == [Denied]
    assert lives(serving, "far.2")


@pytest.mark.parametrize(
    ("after_s", "first", "stays"),
    [(0.5, NO_LINEAGE, "w1.1"), (0.5, BEFORE, "w1.1"), (REJOIN_S + 1.0, NO_LINEAGE, "w1.2")],
)
def test_after_a_restart_of_the_broker_the_second_process_may_come_first(
    make_bench: MakeBench, after_s: float, first: Lineage, stays: str
) -> None:
    """The one that served before comes back second, and stays; but not for ever: then a process that was frozen all the
    time does not drive out the one that came for it. (In a crash loop the other one may have been let in, too, and have
    got no layers yet.)"""
    bench = make_bench()
    bench.join("w0", lineage=BEFORE)
    bench.join("w1", incarnation="w1.2", lineage=first)
    bench.tick(after_s)
    bench.take()
    former = FakeWorker("w1", "w1.1", lineage=BEFORE)
    bench.feed(
        WorkerMessageReceived(former.peer, former.hello(held_layers=LayerRange(0, 3) if first == BEFORE else None))
    )
    bench.tick(PROOF_S + 0.3)
    told = [(peer, type(order)) for peer, order in orders(bench.take()) if isinstance(order, Welcome | Denied)]
    assert told == ([("w1.2", Denied), ("w1.1", Welcome)] if stays == "w1.1" else [("w1.1", Denied)])
    assert [w.incarnation for w in bench.state.workers.values() if w.name == "w1" and not w.is_gone] == [stays]


# --- what is told of it ----------------------------------------------------------------------------------------------


def test_the_report_names_who_was_sent_away(serving: Bench) -> None:
    knocks(serving, host="elsewhere")
    serving.tick(PROOF_S + 0.3)
    (row,) = serving.ask(Query(what="nodes")).body["refused"]  # type: ignore[misc]
    assert (row["name"], row["host"], row["pid"], row["number"], row["times"]) == ("w1", "elsewhere", 1, 1, 1)
    assert str(row["reason"]).startswith("the name w1 is taken")


def test_who_comes_again_and_again_is_told_of_now_and_then() -> None:
    """Somebody may start it every second; it is counted all the same."""
    book = Newcomers()
    hello = FakeWorker("w1", "w1.2").hello()
    for second in range(int(REPORT_INTERVAL_S) + 1):
        book.record_refusal(hello, "taken", float(second))
    (row,) = book.report(REPORT_INTERVAL_S)
    assert (book.num_reported, row["number"], row["times"], row["ago_s"]) == (2, 2, int(REPORT_INTERVAL_S) + 1, 0.0)


def test_a_crowd_of_names_is_not_told_of_all_at_once() -> None:
    """Names are chosen freely: there are so many a minute, and no more are kept."""
    book = Newcomers()
    for number in range(10 * MAX_REFUSALS):
        book.record_refusal(FakeWorker(f"x{number}", f"x{number}.1").hello(), "another model", 0.0)
    assert (book.num_reported, len(book.refused)) == (MAX_REFUSALS, MAX_REFUSALS)
    book.record_refusal(FakeWorker("w1", "w1.2").hello(), "taken", REPORT_INTERVAL_S)
    assert [row["name"] for row in book.report(REPORT_INTERVAL_S)][-1] == "w1"
    assert len(book.refused) == MAX_REFUSALS
