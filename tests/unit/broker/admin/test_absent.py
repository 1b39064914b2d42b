"""Orders and questions about a worker that is no member: they are told what became of it, and what to do."""

from __future__ import annotations

import pytest

from swarm.broker.events import WorkerMessageReceived
from swarm.wire.messages import LayerRange as Layers
from swarm.wire.messages import Leaving, Pin, PlanCommand, PlanOverrides, PlanWhatIf, Query, Report, StopWorker
from tests.unit.broker.bench import Bench, said

ORDERS = [
    StopWorker(worker="w1"),
    StopWorker(worker="w1", again=True),
    PlanCommand(verb="cordon", worker="w1"),
    PlanCommand(verb="drain", worker="w1"),
    PlanCommand(verb="plan", by_hand=PlanOverrides(pins=(Pin("w1", Layers(0, 3)),))),
    Query(what="plan", suppose=PlanWhatIf(without=("w1",))),
]


def refusal(bench: Bench, order: StopWorker | PlanCommand | Query) -> str:
    before = len(bench.log)
    bench.say(order)
    (report,) = said(bench.log[before:], Report)
    assert isinstance(report, Report)
    assert not report.ok
    return str(report.body["error"])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_of_a_frozen_worker_it_is_said_that_it_is_out(serving: Bench, order: StopWorker | PlanCommand | Query) -> None:
    """Since when, why, and which process it is; not that there is none of that name."""
    serving.silent = {"w1"}
    serving.tick(1.0)
    serving.tick(30.0)
    told = refusal(serving, order)
    assert told.startswith("w1 has been out for 30 s: no heartbeat for ")
    assert told.endswith("if it doesn't answer, end it (process 1 on w1)")
    serving.tick(170.0)
    assert "w1 has been out for 3 minutes: " in refusal(serving, order)


def test_of_one_that_has_left_it_is_said_that_it_did(serving: Bench) -> None:
    serving.tell("w1", Leaving(epoch=1, incarnation="w1.1", reason="it was asked to end by SIGTERM"))
    serving.tick(1.0)
    told = refusal(serving, StopWorker(worker="w1"))
    assert told.startswith("w1 left 1 s ago: ")
    assert told.endswith("it can be restarted where it ran (process 1 on w1)")


def test_of_the_name_that_nobody_ever_had_it_is_said_who_is_here(serving: Bench) -> None:
    assert refusal(serving, StopWorker(worker="w9")) == "no worker 'w9': the workers are w0, w1"


def test_one_that_lives_is_meant_whoever_had_its_name_before(serving: Bench) -> None:
    """Dead ones are remembered for a while."""
    serving.lose("w1")
    again = serving.add("w1", "w1.2")
    serving.feed(WorkerMessageReceived(again.peer, again.hello()))
    serving.tick()
    assert serving.ask(PlanCommand(verb="cordon", worker="w1")).ok
