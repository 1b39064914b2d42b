"""After a loss: who takes what, what is kept warm for it, and what is told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.core import CoreSettings
from swarm.broker.planner.takeover import CHUNK_S, FIRST_CHUNK_S, ORDERS_S
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import PlanPhase
from swarm.broker.state.recoveries import FirstAndLast
from swarm.wire.messages import (
    Cancel,
    DataPathError,
    Finished,
    KeepWarm,
    KeptWarm,
    LayerRange,
    Prepare,
    Query,
    Refused,
    Report,
)
from tests.unit.broker.bench import Bench, orders, ranges, said, settings, submit


def three(make_bench: Callable[..., Bench], **rules: object) -> Bench:
    """Three stages of two layers each, on machines of their own, and a request that decodes."""
    bench = make_bench(ruled(**rules)).serve(3)
    assert ranges(bench) == {"w0": LayerRange(0, 2), "w1": LayerRange(2, 4), "w2": LayerRange(4, 6)}
    bench.say(submit(max_tokens=64, ignore_eos=True))
    bench.finish()
    bench.finish()
    bench.take()
    return bench


def ruled(**rules: object) -> CoreSettings:
    return settings(plan=ReconfigurationSettings(settle_s=0.0, rules=PlanRules(**rules)))  # type: ignore[arg-type]


def recoveries(bench: Bench) -> list[dict[str, Any]]:
    (answer,) = said(bench.say(Query(what="recoveries")), Report)
    assert isinstance(answer, Report)
    found = answer.body["recoveries"]
    assert isinstance(found, list)
    return found


# --- who takes what ---------------------------------------------------------------------------------------------------


def test_neighbours_take_what_they_keep_warm(make_bench: Callable[..., Bench]) -> None:
    """Survivors hold what they held, and each its half of what was lost: nothing is to be loaded."""
    bench = three(make_bench)
    bench.lose("w1")
    assert ranges(bench) == {"w0": LayerRange(0, 3), "w2": LayerRange(3, 6)}
    current = bench.state.plans.current
    assert current is not None
    assert [stage.load_bytes for stage in current.stages] == [0, 0]


@pytest.mark.parametrize(("lost", "left"), [("w0", {"w1": (0, 4), "w2": (4, 6)}), ("w2", {"w0": (0, 2), "w1": (2, 6)})])
def test_the_neighbour_takes_over_from_the_first_or_last(
    make_bench: Callable[..., Bench], lost: str, left: dict[str, tuple[int, int]]
) -> None:
    """The neighbour of the first or last stage takes all of it; nobody else's layers move."""
    bench = three(make_bench)
    bench.lose(lost)
    assert ranges(bench) == {name: LayerRange(*layers) for name, layers in left.items()}


def test_a_spare_that_is_warm(make_bench: Callable[..., Bench]) -> None:
    """A worker without a part keeps all that fits, and steps in for whoever dies, if that gives quicker steps."""
    bench = three(make_bench, caps={"w0": 2, "w1": 2, "w2": 2, "spare": 2})
    bench.join("spare")
    asked = bench.tick() + bench.tick()
    assert ("spare.1", KeepWarm(epoch=1, layers=(LayerRange(0, 6),))) in [
        (who, KeepWarm(epoch=o.epoch, layers=o.layers)) for who, o in orders(asked, KeepWarm) if isinstance(o, KeepWarm)
    ]
    bench.lose("w1")
    assert ranges(bench) == {"w0": LayerRange(0, 2), "spare": LayerRange(2, 4), "w2": LayerRange(4, 6)}
    assert recoveries(bench)[-1]["warm"]


def test_a_second_loss_on_the_way_back(make_bench: Callable[..., Bench]) -> None:
    """What is left of the plan that fell is what counts, not the way back that came to nothing."""
    bench = three(make_bench)
    bench.mute = {"w0", "w2"}
    bench.lose("w1")
    assert bench.state.plans.phase is PlanPhase.PREPARING
    bench.mute = set()
    bench.lose("w2")
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    bench.finish()
    (recovery,) = recoveries(bench)
    assert recovery["workers"] == ["w1", "w2"]
    assert recovery["lost"] == [[2, 4]], "the second one had lost nothing yet"
    assert recovery["resumed_all_at"] is not None


def test_who_can_not_load_is_not_asked_again(make_bench: Callable[..., Bench]) -> None:
    """A refusal on the way back: a plan is made without it."""
    bench = three(make_bench, standby="none")
    bench.mute = {"w2"}
    bench.lose("w1")
    epoch = bench.state.plans.epoch
    bench.mute = set()
    bench.tell("w2", Refused(epoch=epoch, incarnation="w2.1", reason="the disk is gone"))
    bench.tick()
    current = ranges(bench)
    assert [layers for name, layers in current.items() if name == "w2"] in ([], [LayerRange(4, 6)])
    assert bench.state.plans.is_serving
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_without_requests_the_best_plan_is_made(make_bench: Callable[..., Bench]) -> None:
    """Nobody waits: there is nothing to come back to."""
    bench = make_bench(ruled()).serve(3)
    bench.lose("w2")
    assert ranges(bench) == {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}


def test_trouble_changes_no_layers(make_bench: Callable[..., Bench]) -> None:
    """All live: the same stages in a new epoch, and the recovery says why."""
    bench = three(make_bench)
    before = ranges(bench)
    bench.tell("w1", DataPathError(epoch=bench.epoch, incarnation="w1.1", reason="a step is missing"))
    assert ranges(bench) == before
    bench.finish()
    assert recoveries(bench)[-1]["choice"] == "every worker keeps its layers"


def test_capacity_gone_for_good(make_bench: Callable[..., Bench]) -> None:
    """The swarm says what it waits for, keeps what it accepted, and goes on when a worker comes."""
    bench = three(make_bench)
    bench.mute = {"w0", "w1", "w2"}  # all die before a way back is found
    for name in ("w0", "w1", "w2"):
        bench.lose(name)
    bench.tick(30.0)
    assert not bench.state.plans.is_serving
    assert "a worker" in bench.state.plans.waits_for
    assert bench.sequence().reason is None
    bench.join("w9")
    bench.tick()
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_a_deadline_ends_the_waiting(make_bench: Callable[..., Bench]) -> None:
    """A request that nobody can compute is kept to its deadline, not longer."""
    bench = make_bench(ruled()).serve(1)
    bench.say(submit(max_tokens=64, ignore_eos=True, deadline_s=20.0))
    bench.finish()
    bench.lose("w0")
    bench.tick(10.0)
    assert bench.sequence().reason is None
    (end,) = said(bench.tick(15.0), Finished)
    assert isinstance(end, Finished)
    assert end.reason == "failed"
    assert "deadline" in end.detail


# --- standby ----------------------------------------------------------------------------------------------------------


def test_only_what_a_worker_said_is_warm(make_bench: Callable[..., Bench]) -> None:
    """What it was asked to keep counts for nothing until it says that it has it, and what it lost is lost."""
    bench = make_bench(ruled()).serve(3)
    worker = bench.state.workers["w0.1"]
    assert worker.warm_layers == (LayerRange(2, 3),)
    bench.tell("w0", KeptWarm(incarnation="w0.1", layers=(), wanted=(LayerRange(2, 3),), load_s=1.0))
    assert worker.warm_layers == ()
    bench.say(submit(max_tokens=64, ignore_eos=True))
    bench.finish()
    bench.lose("w1")
    current = bench.state.plans.current
    assert current is not None
    assert current.stages[-1].layers == LayerRange(2, 6) or current.stages[0].load_bytes > 0


def test_what_is_warm_stays_so_over_a_lost_connection(make_bench: Callable[..., Bench]) -> None:
    """A worker that says Hello again says what it has warm, and isn't asked for it again; unless it ever lied."""
    bench = three(make_bench, caps={"w0": 2, "w1": 2, "w2": 2, "spare": 2})
    bench.join("spare")
    bench.tick()
    bench.tick()
    whole = (LayerRange(0, 6),)
    bench.tell("spare", bench.workers["spare"].hello())
    assert bench.state.workers["spare.1"].warm_layers == whole
    asked = bench.tick() + bench.tick()
    assert "spare.1" not in [who for who, _ in orders(asked, KeepWarm)]
    bench.state.workers["spare.1"].num_corrupt_results = 1
    bench.tell("spare", bench.workers["spare"].hello())
    assert bench.state.workers["spare.1"].warm_layers == ()


def test_nobody_is_asked_twice(make_bench: Callable[..., Bench]) -> None:
    """What a worker could not load, it is not asked for again until there is another plan."""
    bench = make_bench(ruled()).serve(2)
    wanted = (LayerRange(0, 3),)
    bench.tell("w1", KeptWarm(incarnation="w1.1", layers=(), wanted=wanted, load_s=1.0))
    bench.take()
    assert orders(bench.tick(1.0), KeepWarm) == []
    bench.join("w2")
    bench.tick()
    bench.tick()
    assert "w1.1" in [who for who, _ in orders(bench.log, KeepWarm)]


def test_room_is_promised_with_the_plan(make_bench: Callable[..., Bench]) -> None:
    """Each stage hears what it will keep before it reckons its room for keys and values."""
    bench = make_bench(ruled(standby="none")).serve(2)
    assert all(not worker.warm_layers for worker in bench.state.workers.values())
    bench = make_bench(ruled())
    bench.join("w0", "w1")
    bench.tick()
    prepares = [order for _, order in orders(bench.log, Prepare)]
    assert [order.standby for order in prepares if isinstance(order, Prepare)] == [
        (LayerRange(3, 6),),
        (LayerRange(0, 3),),
    ]


# --- what is told -----------------------------------------------------------------------------------------------------


def test_every_part_is_timed_beside_the_prediction(make_bench: Callable[..., Bench]) -> None:
    """From the last sign of life to the first step of everybody: no part is missing, their sum is the whole."""
    bench = three(make_bench)
    assert recoveries(bench) == []
    bench.mute = {"w0", "w2"}
    bench.lose("w1")
    (under_way,) = recoveries(bench)
    assert under_way["resumed_all_at"] is None
    bench.now += 0.5
    bench.mute = set()
    for name in ("w0", "w2"):
        bench.tell(name, bench.workers[name].prepared(bench.state.plans.epoch))
    bench.now += 0.25
    actions = bench.finish()
    (recovery,) = recoveries(bench)
    measured = recovery["measured"]
    assert recovery["sequences"] == 1
    assert recovery["evidence"] == "w1: its connection closed"
    assert recovery["choice"] == "w0 takes layer 2 (warm); w2 takes layer 3 (warm)"
    predicted = recovery["predicted"]
    assert predicted["load_s"] == ORDERS_S
    assert FIRST_CHUNK_S + CHUNK_S < predicted["replay_s"] < FIRST_CHUNK_S + 2 * CHUNK_S  # and its computing
    assert predicted["total_s"] == predicted["load_s"] + predicted["replay_s"]
    assert measured["load_s"] == pytest.approx(0.5)
    assert measured["resume_s"] == pytest.approx(0.25)
    parts = [measured[f"{name}_s"] for name in ("plan", "load", "activate", "replay", "resume")]
    assert measured["total_s"] == pytest.approx(sum(parts))
    (note,) = [a for a in actions if isinstance(a, WriteLog) and a.event == "recovered"]
    assert note.fields["predicted"] == recovery["predicted"]
    assert note.fields["measured"] == measured


def test_a_worker_that_dies_for_days(make_bench: Callable[..., Bench]) -> None:
    """However often it is lost before there is a way back: the first and the last are told, the rest is counted."""
    bench = make_bench(ruled()).serve(1)
    found = bench.state.recoveries
    for number in range(20_000):
        found.record_loss(f"w{number}", "its connection closed", LayerRange(number, number + 1), None, bench.now)
    (told,) = recoveries(bench)
    first, last = [*range(8)], [*range(19_992, 20_000)]
    assert told["losses"] == 20_000
    assert told["workers"] == [f"w{number}" for number in (*first, *last)]
    assert told["lost"] == [[number, number + 1] for number in (*first, *last)]
    assert told["cause"].startswith("w0 was lost; then w1 was lost; then ")
    assert "w7 was lost; then 19984 more; then w19992 was lost; then " in told["cause"]
    assert told["evidence"].endswith("; w19999: its connection closed")
    assert "w7: its connection closed; 19984 more; w19992: its connection closed; " in told["evidence"]


@pytest.mark.parametrize(("num", "between"), [(1, 0), (8, 0), (16, 0), (17, 1)])
def test_few_losses_are_all_told(num: int, between: int) -> None:
    """Nothing is counted that can be shown."""
    few = FirstAndLast[int]()
    for number in range(num):
        few.add(number)
    assert (few.num, len(few.items), few.num_between) == (num, num - between, between)
    assert len(few.describe()) == min(num, 17)


def test_a_recovery_ends_with_its_requests(make_bench: Callable[..., Bench]) -> None:
    """If whoever was waited for has been cancelled, nothing is under way any more."""
    bench = three(make_bench)
    bench.lose("w1")
    bench.say(Cancel(request_id="r"))
    bench.tick()
    (recovery,) = recoveries(bench)
    assert recovery["resumed_all_at"] is not None
    assert bench.state.recoveries.current is None
