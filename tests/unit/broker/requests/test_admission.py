"""What the broker refuses at its door, and in which words."""

from __future__ import annotations

import pytest

from swarm.broker.requests.admission import QueueQuota, check_submit, max_positions
from swarm.broker.state.ended_requests import RequestRefusal
from swarm.broker.state.queue import RequestTimers
from swarm.params import Thinking
from swarm.testing import fake_manifest
from swarm.wire.messages import Cancel, Rejected
from tests.unit.broker.bench import Bench, said, submit

MODEL = fake_manifest(vocab_size=97, context=64)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"prompt": ()}, "invalid", "the prompt is empty"),
        ({"num_prompt": 64}, "context", "the prompt has 64 tokens; chain holds 64"),
        ({"prompt": (1, 97)}, "invalid", "prompt: token 97 is out of range, the vocabulary has 97"),
        ({"logit_bias": {97: 1.0}}, "invalid", "logit_bias: token 97 is out of range"),
        ({"stop_token_ids": (5, 200)}, "invalid", "stop_token_ids: token 200 is out of range"),
        ({"thinking": Thinking(("x",), 5, (97,))}, "invalid", "thinking: token 97 is out of range"),
        ({"thinking": Thinking(())}, "invalid", "thinking.ends takes 1 to 16 texts, not 0"),
        ({"max_tokens": 0}, "invalid", "max_tokens must be between 1 and 1000000, not 0, without prompt_logprobs"),
        ({"max_tokens": -1}, "invalid", "max_tokens must be between 0"),
        ({"temperature": float("nan")}, "invalid", "temperature must be between"),
        ({"n": 0}, "invalid", "n must be between 1"),
    ],
)
def test_each_refusal_has_a_code_and_its_numbers(fields: dict, code: str, text: str) -> None:
    """Each has a stable code and a sentence with the numbers in it."""
    refusal = check_submit(submit(**fields), MODEL)
    assert isinstance(refusal, RequestRefusal)
    assert refusal.code == code
    assert text in refusal.reason
    assert refusal.retry_after_s is None  # coming back will not help


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_prompt": 63}, {"prompt": (0, 96)}, {"logit_bias": {96: 1.0}}, {"max_tokens": 1_000_000}],
)
def test_what_is_right_passes(fields: dict) -> None:
    """Up to the last value that is allowed; more tokens than the context holds are no fault, they end there."""
    assert check_submit(submit(**fields), MODEL) is None


def test_a_sequence_grows_no_longer_than_it_asks_or_the_context() -> None:
    """The most that a sequence can come to hold: what it asks for, or the context."""
    assert max_positions(submit(num_prompt=10, max_tokens=5), MODEL) == 15
    assert max_positions(submit(num_prompt=10, max_tokens=500), MODEL) == 64


@pytest.mark.parametrize(
    ("num", "tenant", "low", "normal", "high"),
    [(1, 1, 1, 1, 1), (2, 2, 1, 2, 2), (4, 3, 3, 4, 4), (20, 15, 18, 19, 20), (1024, 768, 922, 973, 1024)],
)
def test_every_class_and_tenant_may_have_a_place(num: int, tenant: int, low: int, normal: int, high: int) -> None:
    """Every class and tenant may have a place, and none but the highest all of them."""
    places = QueueQuota(num)
    assert places.max_per_tenant == tenant
    assert [places.max_for_class(priority) for priority in (-100, -50)] == [low, low]
    assert [places.max_for_class(priority) for priority in (-49, 0)] == [normal, normal]
    assert [places.max_for_class(priority) for priority in (1, 100)] == [high, high]
    most = min(tenant, low)
    assert places.refuse_too_many(most, -50) is None
    assert places.refuse_too_many(most + 1, -50) is not None


def test_a_refusal_leaves_nothing_behind(serving: Bench) -> None:
    """It is answered, counted, and forgotten; the id may be used again, and the next request is served."""
    (answer,) = said(serving.say(submit("r", prompt=(999,))))
    assert answer == Rejected(
        request_id="r",
        code="invalid",
        reason="prompt: token 999 is out of range, the vocabulary has 97",
        retry_after_s=None,
    )
    assert serving.state.counters["rejected_invalid"] == 1
    assert serving.say(Cancel(request_id="r")) == []
    serving.say(submit("r"))
    serving.run_dry()
    assert serving.sequence("r").reason == "length"


def test_timers_are_forgiven_in_place() -> None:
    """A pause moves all of them; nothing is added, however many pauses there are."""
    timers = RequestTimers()
    for number in range(100):
        timers.add(10.0 + number, f"r{number}")
    for _ in range(1000):
        timers.shift_deadlines(1.0)
    assert list(timers.pop_due(1009.9)) == []
    assert list(timers.pop_due(1011.0)) == ["r0", "r1"]
    assert len(list(timers.pop_due(1e9))) == 98


def test_an_older_stage_gets_no_thinking(make_bench) -> None:
    """It would refuse the record of such a request; all others are served."""
    bench = make_bench()
    bench.add("w0")
    bench.tell("w0", bench.workers["w0"].hello(wire_versions=(3,)))
    bench.tick()
    bench.tick()
    assert bench.state.plans.is_serving
    (answer,) = said(bench.say(submit("thinks", thinking=Thinking(("x",)))), Rejected)
    assert (answer.code, "w0 is too old" in answer.reason) == ("unavailable", True)
    assert not said(bench.say(submit("plain")), Rejected)
