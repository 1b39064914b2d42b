"""Where each token's time went."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from swarm.broker.reports import trace
from swarm.broker.reports.trace import PARTS
from swarm.broker.state import Sequence
from swarm.wire.messages import Ack, Hop, LayerRange, Query, Report
from tests.unit.broker.bench import Bench, said, settings, submit

MakeBench = Callable[..., Bench]


def ask(bench: Bench, request_id: str = "") -> dict:
    (report,) = said(bench.say(Query(what="trace", request_id=request_id), b"ctl"))
    assert isinstance(report, Report)
    body = json.loads(json.dumps(report.body))
    assert report.ok == ("error" not in body)
    return body


def hop(worker: str, *, wait: float = 0.0, compute: float = 0.0, sample: float = 0.0, held: float = 0.0) -> Hop:
    return Hop(worker, LayerRange(0, 3), wait, compute, sample, 0.0, 100, held)


def after(bench: Bench, seconds: float, **how: object) -> None:
    """Time passes, then the oldest step is answered."""
    bench.now += seconds
    bench.finish(**how)  # type: ignore[arg-type]


def sums_up(token: dict) -> bool:
    return sum(token[part] for part in PARTS) == pytest.approx(token["total_s"], abs=1e-5)


def test_parts_of_each_token(serving: Bench) -> None:
    """Queue, wire, what the stages say, and the rest: together exactly what passed."""
    serving.say(submit(max_tokens=2))
    after(serving, 0.1, hops=(hop("w0", wait=0.01, compute=0.02, held=0.035), hop("w1", compute=0.03, sample=0.004)))
    after(serving, 0.2, hops=(hop("w0", compute=0.05, held=0.05), hop("w1", compute=0.06, sample=0.01, held=0.08)))
    body = ask(serving, "r")
    (sequence,) = body["sequences"]
    first, second = sequence["tokens"]
    assert (body["request_id"], body["state"], sequence["num_traced"]) == ("r", "ended", 2)
    # A stage that doesn't say how long it had the step had it for as long as it says to have worked on it.
    assert first["wire_s"] == pytest.approx(0.1 - 0.035 - 0.034)
    assert first["unaccounted_s"] == pytest.approx(0.005)
    assert (first["wait_s"], first["compute_s"], first["sample_s"]) == (0.01, 0.05, 0.004)
    assert second["wire_s"] == pytest.approx(0.2 - 0.05 - 0.08)
    assert second["total_s"] == pytest.approx(0.2)
    assert all(sums_up(token) for token in (first, second, sequence["sums"]))
    assert [(s["worker"], s["compute_s"], s["wire_bytes"]) for s in sequence["stages"]] == [
        ("w0", 0.07, 200),
        ("w1", 0.09, 200),
    ]


def test_a_request_under_way_has_a_trace(serving: Bench) -> None:
    """Of the tokens that are done."""
    serving.say(submit(max_tokens=3))
    assert ask(serving, "r")["sequences"][0]["tokens"] == []
    after(serving, 0.1)
    body = ask(serving, "r")
    assert (body["state"], body["sequences"][0]["num_traced"], body["sequences"][0]["reason"]) == ("running", 1, None)


def test_waiting_for_a_turn_is_queue(make_bench: MakeBench) -> None:
    """From the arrival to the first step, and between two steps, nothing of it is under way."""
    bench = make_bench().serve(1, max_sequences=1)
    bench.say(submit("a", max_tokens=1))
    bench.say(submit("b", max_tokens=1))
    after(bench, 0.3)
    while bench.pipe:
        after(bench, 0.05)
    (sequence,) = ask(bench, "b")["sequences"]
    assert sequence["admitted_s"] == pytest.approx(0.3)
    assert sequence["tokens"][0]["queue_s"] == pytest.approx(0.3)
    assert sums_up(sequence["tokens"][0])


def test_chunks_that_overlap_count_once(make_bench: MakeBench) -> None:
    """Two chunks of a prompt under way at a time: the first counts until the second was dispatched."""
    bench = make_bench().serve(2)
    bench.say(submit(num_prompt=300, max_tokens=1))
    while bench.pipe and not bench.sequence().num_generated:
        bench.now += 0.1
        bench.finish(hops=(hop("w0", compute=0.01, held=0.01), hop("w1", compute=0.01, held=0.01)))
    (sequence,) = ask(bench)["sequences"]
    (token,) = sequence["tokens"]
    assert token["num_steps"] >= 2
    assert token["total_s"] == pytest.approx(bench.now - bench.state.requests["r"].arrived_at)
    assert sums_up(token)
    assert token["unaccounted_s"] == pytest.approx(0.0, abs=1e-5)


def test_a_reader_who_is_slow_shows_in_the_broker_part(make_bench: MakeBench) -> None:
    """Tokens beyond the window are sent when the client has acknowledged; until then they are the broker's."""
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=260))
    for _ in range(260):
        after(bench, 0.01)
    bench.now += 5.0
    bench.say(Ack(request_id="r", index=0, next_index=256))
    tokens = {token["index"]: token for token in ask(bench, "r")["sequences"][0]["tokens"]}
    assert tokens[0]["broker_s"] == 0.0
    assert tokens[259]["broker_s"] == pytest.approx(5.0)
    assert sums_up(tokens[259])


def test_forgotten_requests_are_remembered_for_a_while(serving: Bench) -> None:
    """All is delivered and the request forgotten, its trace is there; after ``retain_s`` it is not."""
    serving.say(submit(max_tokens=2))
    serving.run_dry()
    serving.say(Ack(request_id="r", index=0, next_index=2))
    assert "r" not in serving.state.requests
    assert ask(serving, "r")["sequences"][0]["num_traced"] == 2
    serving.tick(serving.settings.requests.retain_s + 1)
    assert "no request 'r' found" in ask(serving, "r")["error"]


def test_which_request_is_meant(serving: Bench) -> None:
    """The beginning of an id if it fits one; nothing means the newest; an id that others begin with means itself."""
    for request_id in ("abc", "abd", "ab"):
        serving.say(submit(request_id, max_tokens=1))
    serving.run_dry()
    assert ask(serving, "abc")["request_id"] == "abc"
    assert ask(serving, "abd")["request_id"] == "abd"
    assert ask(serving, "ab")["request_id"] == "ab"
    assert ask(serving)["request_id"] == "ab"
    assert "3 requests begin with 'a'" in ask(serving, "a")["error"]


def test_an_empty_broker_has_no_trace(bench: Bench) -> None:
    """It says so."""
    assert "no request found" in ask(bench)["error"]


def test_only_the_newest_steps_are_kept(make_bench: MakeBench) -> None:
    """What was let go of is not guessed: those tokens are missing, the later ones are right."""
    bench = make_bench(settings(trace_steps=3)).serve(1)
    bench.say(submit(max_tokens=8))
    for number in range(1, 9):
        after(bench, number / 100)
    (sequence,) = ask(bench, "r")["sequences"]
    assert (sequence["num_tokens"], [t["index"] for t in sequence["tokens"]]) == (8, [6, 7])
    assert [t["total_s"] for t in sequence["tokens"]] == [pytest.approx(0.07), pytest.approx(0.08)]


def test_rows_are_bounded_too(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with many rows count for as many."""
    monkeypatch.setattr(trace, "MAX_ROWS_KEPT", 10)
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=8, n=4))
    bench.run_dry()
    assert sum(len(step.kv) for step in bench.core._tracer.steps) <= 10


def test_forgotten_requests_are_bounded(serving: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first."""
    monkeypatch.setattr(trace, "MAX_ENDED", 2)
    for request_id in ("a", "b", "c"):
        serving.say(submit(request_id, max_tokens=1))
        serving.run_dry()
        serving.say(Ack(request_id=request_id, index=0, next_index=1))
    assert list(serving.core._tracer.ended) == ["b", "c"]


def test_without_traces_nothing_is_kept(make_bench: MakeBench) -> None:
    """trace_steps = 0: no memory, and an answer that says how to change it."""
    bench = make_bench(settings(trace_steps=0)).serve(1)
    bench.say(submit(max_tokens=2))
    bench.run_dry()
    bench.say(Ack(request_id="r", index=0, next_index=2))
    assert (len(bench.core._tracer.steps), len(bench.core._tracer.ended)) == (0, 0)
    assert "set broker.trace_steps above 0" in ask(bench, "r")["error"]


def test_computed_again_after_a_death(serving: Bench) -> None:
    """Steps that compute a sequence again draw nothing: the token after them has their time, and none is counted
    twice."""
    serving.say(submit(num_prompt=250, max_tokens=14))
    while serving.sequence().num_generated < 10:
        after(serving, 0.1)
    serving.workers["w0"].held[serving.sequence().id] = 0
    serving.lose("w1")
    serving.tick(2.0)
    assert [r.count for r in serving.pipe[0].rows] == [256]  # it ends among the tokens that are known
    while serving.pipe:
        after(serving, 0.1)
    (sequence,) = ask(serving, "r")["sequences"]
    assert [t["index"] for t in sequence["tokens"]] == list(range(14))
    assert all(sums_up(token) for token in sequence["tokens"])
    assert sequence["tokens"][10]["num_steps"] == 2
    assert sequence["tokens"][10]["total_s"] > 2.0  # with the time in which there was no plan


def test_long_answers_are_listed_in_part(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last tokens; the sums are over all of them."""
    monkeypatch.setattr(trace, "MAX_LISTED", 4)
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=10))
    for _ in range(10):
        after(bench, 0.1)
    (sequence,) = ask(bench)["sequences"]
    assert [t["index"] for t in sequence["tokens"]] == [0, 7, 8, 9]
    assert sequence["sums"]["total_s"] == pytest.approx(1.0)


class Oracle:
    """Proposes two right tokens and a wrong one."""

    name = "suffix"

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return tuple([*ANSWER[sequence.num_generated :][:2], 9][:most])

    def forget(self, sequence: int) -> None:
        pass


ANSWER = list(range(40, 60))


def test_tokens_of_one_step_and_accepted_lengths(make_bench: MakeBench) -> None:
    """The first token of a step has its time; the accepted ones came with it. The third proposal is refused."""
    bench = make_bench(proposers=(Oracle(),)).serve(1)
    bench.say(submit(max_tokens=7))
    for seconds in (0.1, 0.2, 0.3):
        bench.now += seconds
        bench.verify({1: ANSWER})
    (sequence,) = ask(bench, "r")["sequences"]
    assert [(t["index"], t["num_steps"], round(t["total_s"], 3)) for t in sequence["tokens"]] == [
        (0, 1, 0.1),
        (1, 1, 0.2),
        (2, 0, 0.0),
        (3, 0, 0.0),
        (4, 1, 0.3),
        (5, 0, 0.0),
        (6, 0, 0.0),
    ]
    assert (sequence["proposed"], sequence["accepted"], sequence["accepted_lengths"]) == (5, 4, {"2": 2})
    assert all(sums_up(token) for token in (*sequence["tokens"], sequence["sums"]))
