"""What requests wait for, and how they end: counted once each, at the broker's own moments."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import Cancel, Query, Report
from tests.unit.broker.bench import CLIENT, Bench, said, submit
from tests.unit.broker.steps.test_proposals import ANSWER, Oracle

MakeBench = Callable[..., Bench]


def stats(bench: Bench) -> dict:
    (report,) = said(bench.say(Query(what="stats"), b"ctl"))
    assert isinstance(report, Report)
    return json.loads(json.dumps(report.body))


def spread(bench: Bench, name: str) -> tuple[int, float]:
    """How many values there are, and their sum."""
    histogram = stats(bench)["histograms"][name]
    assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
    return sum(histogram["counts"]), histogram["total"]


def test_each_token_is_counted_once(serving: Bench) -> None:
    """The first from the request's arrival, each other one from the one before it; the whole at the end."""
    serving.say(submit(max_tokens=4))
    for _ in range(4):
        serving.now += 0.02
        serving.finish()
    assert spread(serving, "first_token_s") == (1, pytest.approx(0.02))
    assert spread(serving, "between_tokens_s") == (3, pytest.approx(0.06))
    assert spread(serving, "request_s") == (1, pytest.approx(0.08))
    assert stats(serving)["requests"]["ended"] == {"failed": 0, "cancelled": 0, "length": 1, "stop": 0}


def test_tokens_of_one_step_share_its_time(make_bench: MakeBench) -> None:
    """None of them came at once with the one before: a step gave them all."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    bench.say(submit(max_tokens=5))
    for _ in range(2):
        bench.now += 0.2
        bench.verify({1: ANSWER})
    assert bench.sequence().reason == "length"
    assert spread(bench, "between_tokens_s") == (4, pytest.approx(0.2))
    assert [count for count in stats(bench)["histograms"]["between_tokens_s"]["counts"] if count] == [4]


def test_a_prompt_counts_with_what_was_found_of_it(serving: Bench) -> None:
    """In whole blocks, once its first token is known; time in the queue is counted then, too."""
    for name in "ab":
        serving.say(submit(name, num_prompt=70, max_tokens=2))
        serving.run_dry()
    requests = stats(serving)["requests"]
    assert (requests["prompt_tokens"], requests["cached_prompt_tokens"]) == (140, 64)
    assert spread(serving, "queue_s") == (2, 0.0)


def test_what_was_cancelled_has_no_time(serving: Bench) -> None:
    serving.say(submit(max_tokens=4))
    serving.finish()
    serving.say(Cancel(request_id="r"))
    assert stats(serving)["requests"]["ended"]["cancelled"] == 1
    assert spread(serving, "request_s") == (0, 0.0)


def test_several_continuations_are_one_request_with_the_worst_outcome(serving: Bench) -> None:
    """Each has times of its own; the request has one end."""
    serving.say(submit(max_tokens=3, n=2))
    serving.run_dry()
    assert stats(serving)["requests"]["ended"]["length"] == 1
    assert spread(serving, "first_token_s")[0] == 2
    assert spread(serving, "between_tokens_s")[0] == 4


def test_tokens_of_a_broker_before_this_one_are_in_no_figure(make_bench: MakeBench) -> None:
    """Whoever had tokens already gets no first one again, and no gap over the restart."""
    asked = submit(max_tokens=4)
    record = RequestRecord(asked, "t", 1.0, [SequenceRecord(5, 0, [7, 7], [(), ()])])
    bench = make_bench(past=JournalSnapshot(9, (), 6, (record,))).serve(1)
    bench.now += 0.5
    bench.tick(5.0)
    bench.run_dry()
    assert bench.sequence("r").reason == "length"
    assert spread(bench, "first_token_s")[0] == 0
    assert spread(bench, "between_tokens_s")[0] == 1
    assert stats(bench)["requests"]["prompt_tokens"] == 0


def test_a_recovery_is_counted_in_its_parts(serving: Bench) -> None:
    """How many there were, whether one is under way, and what each part took."""
    serving.say(submit(max_tokens=50, ignore_eos=True), CLIENT)
    serving.finish()
    serving.lose("w1")
    assert stats(serving)["recoveries"]["under_way"] == 1
    serving.join("w2")
    serving.tick()
    serving.run_dry()
    figures = stats(serving)
    assert (figures["recoveries"]["ended"], figures["recoveries"]["under_way"]) == (1, 0)
    assert spread(serving, "recovery_total_s")[0] == 1


def test_sizes_of_steps_are_spread(serving: Bench) -> None:
    serving.say(submit("a", num_prompt=5, max_tokens=2))
    serving.run_dry()
    assert spread(serving, "step_rows") == (2, 2.0)
    assert spread(serving, "step_positions") == (2, 6.0)
    assert spread(serving, "batch_rows") == (2, 2.0)
    assert spread(serving, "micro_batches") == (2, 2.0)
    assert spread(serving, "queue_depth") == (2, 0.0)
    assert spread(serving, "step_s")[0] == 0  # answers without hops tell no times
