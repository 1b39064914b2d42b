"""Figures of the pipeline, causes, and what is logged of a request."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from swarm.broker.actions import Dispatch, SendToClient, SendToWorker, WriteLog, add_cause
from swarm.broker.admin.status import nest
from swarm.broker.requests.tokens import build_timing
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import (
    Fence,
    Hop,
    LayerRange,
    Query,
    Report,
    Stats,
    Step,
)
from tests.unit.broker.bench import Bench, holds, said, scheduling, settings, submit

MakeBench = Callable[..., Bench]

HOPS = (
    Hop("w0", LayerRange(0, 3), 0.001, 0.002, 0.0, 0.5, 100, 0.004),
    Hop("w1", LayerRange(3, 6), 0.0, 0.003, 0.001, 0.5, 4000, 0.005),
)


def pipeline(bench: Bench) -> dict:
    (report,) = said(bench.say(Query(what="stats"), b"ctl"))
    assert isinstance(report, Report)
    return json.loads(json.dumps(report.body))["pipeline"]


def notes(bench: Bench, event: str) -> list[WriteLog]:
    return [a for a in bench.log if isinstance(a, WriteLog) and a.event == event]


def test_times_of_a_step(serving: Bench) -> None:
    """What the stages say, and the bridge: what is left of the step's way."""
    serving.say(submit(max_tokens=3))
    for _ in range(2):
        serving.now += 0.02
        serving.finish(hops=HOPS)
    figures = pipeline(serving)
    assert figures["calls"] == 3  # two are answered, the third is under way
    times = figures["microseconds"]
    assert times["total"] == {"total": 40000.0, "last": 20000.0, "average": 20000.0}
    assert times["bridge"]["average"] == pytest.approx(11000.0)
    assert (times["compute"]["average"], times["sample"]["average"]) == (5000.0, 1000.0)
    assert {name: t["last"] for name, t in times["stages"].items()} == {"w0": 2000.0, "w1": 3000.0}
    assert figures["sizes"]["bytes_bridged"] == {"total": 8200, "last": 4100, "average": 4100, "most": 4100}


def test_micro_batches(make_bench: MakeBench) -> None:
    """Overlapped: two steps in flight share the batch; the second of them is an overlapped call."""
    bench = make_bench(scheduling(mode="overlapped")).serve(2)
    bench.say(submit(max_tokens=4, n=4))
    bench.finish()
    while len(bench.pipe) < 2:
        bench.finish()
    figures = pipeline(bench)
    assert figures["in_flight"] == 2
    assert figures["sizes"]["micro_batches"]["last"] == 2
    assert figures["overlapped_calls"] >= 1
    assert figures["sizes"]["batch_rows"]["most"] >= figures["sizes"]["rows"]["most"]


def test_a_queue_shows(make_bench: MakeBench) -> None:
    """Who waits while a step goes out."""
    bench = make_bench().serve(1, max_sequences=1)
    for request_id in "abcd":
        bench.say(submit(request_id, max_tokens=1))
    bench.run_dry()
    depths = pipeline(bench)["sizes"]["queue_depth"]
    assert (depths["total"], depths["most"]) == (2 + 1, 2)  # behind b, behind c; a and d had nobody behind them


def test_steps_without_rows_are_no_calls(serving: Bench) -> None:
    """Those that only tell the stages something."""
    serving.say(submit(max_tokens=1))
    serving.run_dry()
    figures = pipeline(serving)
    assert (figures["steps"], figures["calls"]) == (2, 1)


def test_profile_lines_on_request(make_bench: MakeBench) -> None:
    """Every so many steps one line with the averages since the last one; never without being asked for."""
    bench = make_bench(settings(profile_every=2)).serve(2)
    bench.say(submit(max_tokens=5))
    for number in range(1, 6):
        bench.now += number / 100
        bench.finish(hops=HOPS)
    first, second = notes(bench, "profile")
    assert (first.fields["total_us"], second.fields["total_us"]) == (15000.0, 35000.0)
    assert first.fields["rows"] == 1
    quiet = make_bench().serve(1)
    quiet.say(submit(max_tokens=5))
    quiet.run_dry()
    assert notes(quiet, "profile") == []


def test_flat_names_become_levels(serving: Bench) -> None:
    """A worker's figures are shown as a tree; a name that is in the way stays whole."""
    assert nest({"a": 1.0, "b.c": 2.0, "b.d.e": 3.0}) == {"a": 1.0, "b": {"c": 2.0, "d": {"e": 3.0}}}
    assert nest({"a": 1.0, "a.b": 2.0}) == {"a": 1.0, "a.b": 2.0}
    serving.tell("w0", Stats(incarnation="w0.1", values={"sizes.rows.last": 4.0}))
    (report,) = said(serving.say(Query(what="stats"), b"ctl"))
    assert isinstance(report, Report)
    assert report.body["stages"]["w0"] == {"sizes": {"rows": {"last": 4.0}}}  # type: ignore[index]


def test_one_line_per_request(serving: Bench) -> None:
    """With all that one wants to know of it afterwards."""
    serving.now = 10.0
    serving.say(submit(max_tokens=4))
    for _ in range(4):
        serving.now += 0.5
        serving.finish(hops=HOPS)
    (line,) = notes(serving, "request_ended")
    assert line.fields == {
        "request": "r",
        "client": b"client".hex(),
        "reasons": ["length"],
        "prompt": 3,
        "tokens": 4,
        "queued_s": 0.0,
        "first_token_s": 0.5,
        "total_s": 2.0,
        "tokens_per_s": 2.0,
        "recomputed": 0,
        "preempted": 0,
    }


def test_the_line_of_a_request_that_never_began(bench: Bench, make_bench: MakeBench) -> None:
    """What did not happen has no time; why it ended is told."""
    full = make_bench().serve(1, max_sequences=1)
    full.say(submit("a", max_tokens=1000))
    full.say(submit("b", deadline_s=1.0))
    full.tick(2.0)
    (line,) = (n for n in notes(full, "request_ended") if n.fields["request"] == "b")
    assert (line.fields["queued_s"], line.fields["first_token_s"], line.fields["tokens_per_s"]) == (None, None, None)
    assert line.fields["reasons"] == ["failed"]
    assert "deadline" in str(line.fields["detail"])


def carried_over(make_bench: MakeBench, generated: list[int], held: int | None) -> Bench:
    """A request of two seconds, of which so much was drawn before the broker was started again. Its worker lived on and
    holds so many positions of it, or was started again, too."""
    request = RequestRecord(submit(max_tokens=16, ignore_eos=True), "", 2.0, [SequenceRecord(5, 0, generated)])
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, (request,)))
    whole = LayerRange(0, 6)
    parts = () if held is None else (holds(5, held, whole),)
    bench.tell("w0", bench.add("w0").hello(epoch=9, held_layers=whole, held=parts))
    bench.tick(0.5)
    bench.run_dry()
    return bench


@pytest.mark.parametrize(("held", "recomputed"), [(6, 0), (None, 1)])
def test_the_line_of_a_request_from_before(make_bench: MakeBench, held: int | None, recomputed: int) -> None:
    """When it began and had its first token, the dead broker knew. What is not taken back is computed again, once."""
    bench = carried_over(make_bench, [7, 7, 7, 7], held)
    (line,) = notes(bench, "request_ended")
    assert (line.fields["queued_s"], line.fields["first_token_s"], line.fields["tokens_per_s"]) == (None, None, None)
    assert (line.fields["total_s"], line.fields["tokens"]) == (2.5, 16)
    assert line.fields["recomputed"] == recomputed
    told = build_timing(bench.sequence(), bench.now)
    assert (told.queued_s, told.first_token_s, told.num_recomputed) == (0.0, 0.0, recomputed)


def test_the_line_of_a_request_without_a_token_from_before(make_bench: MakeBench) -> None:
    """Its first token came under this broker, so the times are known; and nothing is known to be computed again."""
    (line,) = notes(carried_over(make_bench, [], None), "request_ended")
    assert (line.fields["queued_s"], line.fields["first_token_s"], line.fields["recomputed"]) == (2.0, 2.5, 0)


def test_every_event_has_an_id(make_bench: MakeBench) -> None:
    """One of its own, told apart from those of a broker before this one."""
    bench = make_bench(settings(run="7f-"))
    seen = []
    for _ in range(20):
        bench.tick()
        seen.append(bench.core.cause)
    assert len(set(seen)) == 20
    assert all(cause.startswith("7f-") for cause in seen)


def test_causes_go_into_lines_steps_and_orders() -> None:
    """And nowhere else: clients are told what they are told."""
    assert add_cause(WriteLog("x", "info", {"a": 1}), "c1") == WriteLog("x", "info", {"a": 1, "cause": "c1"})
    assert add_cause(Dispatch(Step(step=1, rows=(), tokens=())), "c1") == Dispatch(
        Step(step=1, rows=(), tokens=(), cause="c1")
    )
    assert add_cause(SendToWorker(b"w", Fence(epoch=2)), "c1") == SendToWorker(b"w", Fence(epoch=2, cause="c1"))
    said_so = SendToClient(b"c", Report(what="x", ok=True, body={}))
    assert add_cause(said_so, "c1") is said_so
