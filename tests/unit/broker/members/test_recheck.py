"""Comparing what a stage computed with what others compute: who is asked for what, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.members.recheck import MAX_DRAWN, TIMEOUT_S, RecheckSettings
from swarm.testing import fake_manifest
from swarm.testing_images import FAKE_VISION, fake_image
from swarm.wire.messages import (
    Cancel,
    Edge,
    GetDigest,
    KeptWarm,
    LayerRange,
    LogDigest,
    Recheck,
    Rechecked,
    RecheckHop,
)
from tests.unit.broker.bench import TOKEN, Bench, orders, settings, submit

EVERY_S = 5.0
KERNELS = "plain; float32, exact"
MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """Two workers on one host, each with the layers of the other warm, and a sequence with some tokens."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S, positions=10)))
    bench.serve(2, host="one", kernels=KERNELS)
    for name in ("w0", "w1"):
        keep(bench, name, LayerRange(0, 6))
    bench.say(submit(max_tokens=200))
    for _ in range(5):
        bench.finish()
    bench.tick(0.1)
    bench.take()
    return bench


def keep(bench: Bench, name: str, *layers: LayerRange) -> None:
    bench.tell(name, KeptWarm(incarnation=f"{name}.1", layers=layers, wanted=layers, load_s=0.1))


def asked(bench: Bench, within_s: float = EVERY_S + 0.1) -> tuple[str, Recheck, str | None]:
    """Who is to send what went in, the order, and who is to tell its digest."""
    bench.take()
    bench.tick(within_s)
    found = orders(bench.take())
    rechecks = [(peer, order) for peer, order in found if isinstance(order, Recheck)]
    digests = [(peer, order) for peer, order in found if isinstance(order, GetDigest)]
    ((peer, recheck),) = rechecks
    for _, order in digests:
        assert (order.ticket, order.stop) == (recheck.trial.ticket, recheck.stop)
        assert order.boundary == recheck.trial.legs[-1].layers.stop
    return peer, recheck, digests[0][0] if digests else None


def answer(bench: Bench, recheck: Recheck, **fields: object) -> None:
    """The last leg says what came out."""
    incarnation = recheck.trial.legs[-1].to.to
    said = Rechecked(epoch=recheck.epoch, incarnation=incarnation, ticket=recheck.trial.ticket, **fields)  # type: ignore[arg-type]
    bench.tell(incarnation.partition(".")[0], said)


def digested(bench: Bench, recheck: Recheck, who: str, digest: str) -> None:
    said = LogDigest(epoch=recheck.epoch, incarnation=who, ticket=recheck.trial.ticket, digest=digest)
    bench.tell(who.partition(".")[0], said)


def counted(bench: Bench) -> dict[str, float]:
    names = ("rechecks", "rechecks_agreed", "rechecks_disagreed", "rechecks_void", "rechecks_impossible")
    return {name: bench.state.counters[name] for name in names if name in bench.state.counters}


def names(bench: Bench) -> tuple[str, str]:
    assert bench.state.plans.current is not None
    first, last = bench.state.plans.current.stages
    return first.name, last.name


def test_off_by_default(make_bench: MakeBench) -> None:
    """Nobody is asked for anything."""
    bench = make_bench().serve(2, host="one", kernels=KERNELS)
    for name in ("w0", "w1"):
        keep(bench, name, LayerRange(0, 6))
    bench.say(submit(max_tokens=100))
    bench.finish()
    bench.tick(60.0)
    assert orders(bench.take(), Recheck) == []


def test_nothing_is_asked_of_what_drew_nothing_that_is_looked_at(make_bench: MakeBench) -> None:
    """A prompt that is longer than what is compared: of the last stage there is nothing to hold against it."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S, positions=10)))
    bench.serve(2, host="one", kernels=KERNELS)
    for name in ("w0", "w1"):
        keep(bench, name, LayerRange(0, 6))
    bench.say(submit(num_prompt=40, max_tokens=200))
    for _ in range(5):
        bench.finish()
    bench.take()
    boundaries = []
    for _ in range(4):
        bench.tick(EVERY_S + 0.1)
        for _, order in orders(bench.take(), Recheck):
            assert isinstance(order, Recheck)
            boundaries.append(order.boundary)
            answer(bench, order, digest="abc")
            digested(bench, order, f"{names(bench)[0]}.1", "abc")
    assert boundaries
    assert set(boundaries) == {0}


def test_sequences_with_images_are_not_compared(make_bench: MakeBench) -> None:
    """Another worker may begin behind a layer to whose output the first stage adds features."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S, positions=10)))
    bench.serve(2, host="one", kernels=KERNELS, manifest=fake_manifest(sees=True))
    for name in ("w0", "w1"):
        keep(bench, name, LayerRange(0, 6))
    image, pixels = fake_image(0, 1, 2, 7)
    seeing = submit(prompt=(FAKE_VISION.token,) * 2 + (5,) * 4, images=(image,), max_tokens=200)
    bench.say(msgspec.structs.replace(seeing, pixels=(pixels,)))
    for _ in range(5):
        bench.finish()
    assert bench.sequence().num_generated > 1
    bench.tick(EVERY_S + 0.1)
    assert orders(bench.take(), Recheck) == []
    assert counted(bench) == {"rechecks_impossible": 1}


def test_the_first_stage_and_then_the_last(bench: Bench) -> None:
    """The first stage is computed again from the tokens, by the other worker; its own log's digest is asked for. The
    last one's input comes from the stage before it, and the tokens that it drew are what must come out."""
    first, last = names(bench)
    peer, recheck, suspect = asked(bench)
    kv = bench.sequence().kv
    assert recheck.stop == kv
    assert recheck.open.tokens == tuple(bench.sequence().tokens[: kv + 1])
    assert (peer, recheck.boundary, suspect) == (f"{last}.1", 0, f"{first}.1")
    assert recheck.trial.legs == (RecheckHop(Edge(f"{last}.1", f"tcp://{last}.1"), LayerRange(0, 3)),)
    answer(bench, recheck, digest="abc")
    digested(bench, recheck, f"{first}.1", "abc")
    assert counted(bench) == {"rechecks": 1, "rechecks_agreed": 1}
    assert bench.state.workers[f"{first}.1"].num_confirmed == 1
    peer, recheck, suspect = asked(bench)
    assert (peer, recheck.boundary, suspect) == (f"{first}.1", 3, None)
    assert recheck.trial.legs == (RecheckHop(Edge(f"{first}.1", f"tcp://{first}.1"), LayerRange(3, 6)),)
    assert recheck.trial.drawn == min(MAX_DRAWN, bench.sequence().num_generated)
    answer(bench, recheck, tokens=(TOKEN,) * recheck.trial.drawn)
    assert counted(bench) == {"rechecks": 2, "rechecks_agreed": 2}


def test_the_input_comes_from_the_stage_before_whoever_computes(make_bench: MakeBench) -> None:
    """Of three stages the first one sends what the second got, to the third, which has those layers warm."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S)))
    bench.serve(3, host="one", kernels=KERNELS)
    assert bench.state.plans.current is not None
    first, middle, last = (stage.name for stage in bench.state.plans.current.stages)
    keep(bench, last, bench.state.plans.current.stages[1].layers)
    bench.say(submit(max_tokens=200))
    for _ in range(5):
        bench.finish()
    found = {}
    for _ in range(2):
        peer, recheck, suspect = asked(bench)
        assert suspect is not None
        found[suspect] = peer, [leg.to.to for leg in recheck.trial.legs]
        answer(bench, recheck, digest="abc")
        digested(bench, recheck, suspect, "abc")
    assert found[f"{middle}.1"] == (f"{first}.1", [f"{last}.1"])


def test_who_computes_in_another_form_is_not_asked(bench: Bench) -> None:
    """Its bits would differ, and mean nothing."""
    _, last = names(bench)
    worker = bench.state.workers[f"{last}.1"]
    worker.hello = msgspec.structs.replace(worker.hello, dtype="bfloat16")
    bench.tick(EVERY_S + 0.1)
    assert orders(bench.take(), Recheck) == []
    assert counted(bench) == {"rechecks_impossible": 1}


def test_a_disagreement_names_both_and_touches_nothing(bench: Bench) -> None:
    """Logged as an error, counted, and shown at both workers; the sequence goes on, nobody is out."""
    first, last = names(bench)
    _, recheck, _ = asked(bench)
    digested(bench, recheck, f"{first}.1", "abc")
    bench.log.clear()
    answer(bench, recheck, digest="abd")
    (note,) = [a for a in bench.log if isinstance(a, WriteLog) and a.event == "recheck_disagreed"]
    assert note.level == "error"
    assert (note.fields["worker"], note.fields["checkers"], note.fields["layers"]) == (first, [last], "0–2")
    assert counted(bench) == {"rechecks": 1, "rechecks_disagreed": 1}
    assert bench.state.workers[f"{first}.1"].disagreed_with == {last: 1}
    assert bench.state.workers[f"{last}.1"].disagreed_with == {first: 1}
    assert bench.epoch == 1
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_wrong_tokens_of_the_last_stage(bench: Bench) -> None:
    """It drew what nobody else draws."""
    _, recheck, who = asked(bench)
    assert who is not None
    answer(bench, recheck, digest="a")
    digested(bench, recheck, who, "a")
    _, recheck, _ = asked(bench)
    answer(bench, recheck, tokens=(*((TOKEN,) * (recheck.trial.drawn - 1)), TOKEN + 1))
    assert counted(bench)["rechecks_disagreed"] == 1


def test_several_may_share_the_work(make_bench: MakeBench) -> None:
    """If nobody has all layers of a stage, those who have a part of them compute one after the other."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S)))
    bench.serve(3, host="one", kernels=KERNELS)
    assert bench.state.plans.current is not None
    first, middle, last = (stage.name for stage in bench.state.plans.current.stages)
    keep(bench, first, LayerRange(2, 3))
    keep(bench, last, LayerRange(3, 4))
    bench.say(submit(max_tokens=50))
    for _ in range(3):
        bench.finish()
    answer(bench, asked(bench)[1], problem="the first stage's turn")
    peer, recheck, suspect = asked(bench)
    assert (peer, suspect) == (f"{first}.1", f"{middle}.1")
    assert [(leg.to.to, leg.layers) for leg in recheck.trial.legs] == [
        (f"{first}.1", LayerRange(2, 3)),
        (f"{last}.1", LayerRange(3, 4)),
    ]


@pytest.mark.parametrize(
    ("one", "other"), [(KERNELS, "own; float32, exact"), (*["plain; float32, inexact"] * 2,)], ids=["unlike", "inexact"]
)
def test_only_like_with_like(make_bench: MakeBench, one: str, other: str) -> None:
    """Workers whose kernels are not the same, or promise nothing, have other bits honestly: they are not compared."""
    bench = make_bench(settings(recheck=RecheckSettings(EVERY_S)))
    bench.join("w0", host="one", kernels=one)
    bench.join("w1", host="one", kernels=other)
    bench.tick()
    for name in ("w0", "w1"):
        keep(bench, name, LayerRange(0, 6))
    bench.say(submit(max_tokens=50))
    bench.finish()
    bench.take()
    bench.tick(2 * EVERY_S)
    assert orders(bench.take(), Recheck) == []
    assert counted(bench).keys() == {"rechecks_impossible"}


@pytest.mark.parametrize("what", ["cancelled", "no log", "a problem", "no answer", "another plan"])
def test_what_comes_between_voids_it(bench: Bench, what: str) -> None:
    """It counts for nothing, and the next one comes in its time."""
    first, last = names(bench)
    _, recheck, suspect = asked(bench)
    assert suspect is not None
    match what:
        case "cancelled":
            bench.say(Cancel(request_id="r"))
            answer(bench, recheck, digest="abc")
        case "no log":
            digested(bench, recheck, suspect, "")
        case "a problem":
            answer(bench, recheck, problem="there is no time")
        case "no answer":
            bench.tick(TIMEOUT_S + 0.2)
        case _:
            bench.join("w2", host="one", kernels=KERNELS)
            bench.tick(0.3)
            assert bench.epoch == 2
    assert counted(bench)["rechecks_void"] == 1
    # What comes late is nobody's.
    before = counted(bench)
    digested(bench, recheck, suspect, "abd")
    answer(bench, recheck, digest="abc")
    assert counted(bench) == before
    assert bench.state.counters["stale_rechecks"] == 2
    assert bench.state.workers[f"{first}.1"].disagreed_with == {}
    assert bench.state.workers[f"{last}.1"].disagreed_with == {}


def test_nobody_speaks_for_another(bench: Bench) -> None:
    """The suspect alone tells its digest, and the last of the checkers alone what came out."""
    first, last = names(bench)
    _, recheck, _ = asked(bench)
    digested(bench, recheck, f"{last}.1", "abd")
    ticket = recheck.trial.ticket
    bench.tell(first, Rechecked(epoch=1, incarnation=f"{first}.1", ticket=ticket, digest="abd"))
    answer(bench, recheck, digest="abc")
    digested(bench, recheck, f"{first}.1", "abc")
    assert counted(bench)["rechecks_agreed"] == 1
