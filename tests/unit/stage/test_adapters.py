"""Adapters at run time in a stage: one load at a time, and nothing is dropped that a sequence has."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.events import AdaptersLoaded, BrokerConnected
from swarm.wire.messages import AdapterEntry, AdaptersSet, Row, SequencePosition, SetAdapters
from tests.unit.stage.bench import StageBench, opened, step_of

RED, BLUE = (AdapterEntry(name, f"/{name}", digit * 32, 10, (1,) * 6) for name, digit in (("red", "1"), ("blue", "2")))
ASKED = AdapterEntry("red", "/red")  # of whatever content


def of_adapters(actions: list[act.Action]) -> list[act.Action]:
    """What concerns adapters; of messages, only the answers."""
    kinds = (act.LoadAdapters, act.DropAdapters, act.SendHello)
    answers = [a for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, AdaptersSet)]
    return [a for a in actions if isinstance(a, kinds) or a in answers]


def answer(stage: StageBench, number: int, *adapters: AdapterEntry, problem: str = "") -> act.SendToBroker:
    message = AdaptersSet(incarnation="w0.1", number=number, adapters=adapters, problem=problem)
    return act.SendToBroker(msgspec.structs.replace(message, lineage=stage.core.lineage))


def order(stage: StageBench, number: int, *adapters: AdapterEntry) -> list[act.Action]:
    return of_adapters(stage.order(SetAdapters(number=number, adapters=adapters)))


def test_an_adapter_is_loaded_once_and_reported_with_its_digest(stage: StageBench) -> None:
    assert order(stage, 1, ASKED) == [act.LoadAdapters((ASKED,))]
    assert order(stage, 1, ASKED) == []  # repeated
    assert of_adapters(stage.feed(AdaptersLoaded((RED,)))) == [answer(stage, 1, RED)]
    assert order(stage, 1, RED) == [answer(stage, 1, RED)]  # the answer was lost
    assert stage.core.adapters.entries == (RED,)


def test_an_order_that_crosses_its_answer_does_not_load_again(stage: StageBench) -> None:
    order(stage, 1, ASKED)
    stage.feed(AdaptersLoaded((RED,)))
    assert order(stage, 1, ASKED) == [answer(stage, 1, RED)]
    assert of_adapters(stage.run(step_of(1))) == []  # nor does it drop what is loaded
    assert order(stage, 2, ASKED) == [act.LoadAdapters((ASKED,))]  # another load, maybe of other files


def test_a_number_that_another_order_had_is_a_new_order(stage: StageBench) -> None:
    """A broker counts from 1 again when it restarts, maybe while the order of the former one is followed."""
    order(stage, 1, RED)
    assert order(stage, 1, BLUE) == []
    assert of_adapters(stage.feed(AdaptersLoaded((RED,)))) == [act.LoadAdapters((BLUE,))]
    assert of_adapters(stage.feed(AdaptersLoaded((BLUE,)))) == [answer(stage, 1, BLUE), act.DropAdapters((RED.key,))]


def test_an_order_that_is_overtaken_is_ignored(stage: StageBench) -> None:
    """It came over an earlier connection, or was meant for a worker that had not joined: it drops nothing."""
    order(stage, 2, RED, BLUE)
    stage.feed(AdaptersLoaded((RED, BLUE)))
    assert order(stage, 1, RED) == []
    assert order(stage, 2, RED) == []
    assert stage.core.adapters.entries == (RED, BLUE)
    assert order(stage, 3, RED) == [answer(stage, 3, RED), act.DropAdapters((BLUE.key,))]


def test_a_failed_load_changes_nothing_and_may_succeed_later(stage: StageBench) -> None:
    order(stage, 1, RED)
    stage.feed(AdaptersLoaded((RED,)))
    order(stage, 2, RED, BLUE)
    assert of_adapters(stage.feed(AdaptersLoaded((), "no such folder"))) == [answer(stage, 2, problem="no such folder")]
    assert stage.core.adapters.entries == (RED,)
    assert order(stage, 2, RED, BLUE) == [act.LoadAdapters((BLUE,))]


def test_a_newer_order_waits_for_the_load_under_way(stage: StageBench) -> None:
    """Of what was loaded by then, what it does not name is dropped."""
    order(stage, 1, RED)
    assert order(stage, 2, BLUE) == []
    assert of_adapters(stage.feed(AdaptersLoaded((RED,)))) == [act.LoadAdapters((BLUE,))]
    assert of_adapters(stage.feed(AdaptersLoaded((BLUE,)))) == [answer(stage, 2, BLUE), act.DropAdapters((RED.key,))]


def test_an_adapter_is_dropped_when_no_sequence_has_it(stage: StageBench) -> None:
    order(stage, 1, RED)
    stage.feed(AdaptersLoaded((RED,)))
    item = msgspec.structs.replace(opened(1), params=SamplingParams(adapter=RED.key))
    stage.run(step_of(1, Row(1, 0, 3, True), open=(item,)))
    assert order(stage, 2) == [answer(stage, 2)]
    assert of_adapters(stage.run(step_of(2, Row(1, 3, 1, True)))) == []
    assert of_adapters(stage.run(step_of(3, release=(1,)))) == [act.DropAdapters((RED.key,))]


def test_an_adapter_is_dropped_while_a_retired_sequence_has_it(stage: StageBench) -> None:
    """Only its beginning is stored, for requests that will never come."""
    order(stage, 1, RED)
    stage.feed(AdaptersLoaded((RED,)))
    tokens = tuple(range(1, 34))
    item = msgspec.structs.replace(opened(1, tokens, 33), params=SamplingParams(adapter=RED.key))
    stage.run(step_of(1, Row(1, 0, 33, True), tokens=tokens, open=(item,)))
    stage.run(step_of(2, retire=(SequencePosition(1, 32),)))
    assert stage.core.sequences[1].is_retired
    assert order(stage, 2) == [answer(stage, 2), act.DropAdapters((RED.key,))]


def test_nothing_is_dropped_while_adapters_are_loading(stage: StageBench) -> None:
    """The executor does one thing at a time."""
    order(stage, 1, RED)
    stage.feed(AdaptersLoaded((RED,)))
    assert order(stage, 2, BLUE) == [act.LoadAdapters((BLUE,))]
    assert of_adapters(stage.run(step_of(1))) == []
    assert of_adapters(stage.feed(AdaptersLoaded((BLUE,)))) == [answer(stage, 2, BLUE), act.DropAdapters((RED.key,))]


def test_a_worker_that_is_not_welcomed_introduces_itself_again(make_stage: Callable[..., StageBench]) -> None:
    """Once it has what the broker waits for; not after a failure."""
    stage = make_stage()
    stage.feed(BrokerConnected())
    assert order(stage, 1, RED) == [act.LoadAdapters((RED,))]
    failed = of_adapters(stage.feed(AdaptersLoaded((), "no such folder")))
    assert failed == [answer(stage, 1, problem="no such folder")]
    order(stage, 1, RED)
    assert act.SendHello() in stage.feed(AdaptersLoaded((RED,)))
