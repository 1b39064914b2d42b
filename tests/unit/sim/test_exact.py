"""What the audit holds continuations to, to the last digit: each rule is able to fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from swarm.client.events import Deliver
from swarm.params import SamplingParams
from swarm.sim.checks.exact import Expectation
from swarm.testing import fake_continuation, fake_draws, fake_manifest
from swarm.wire.messages import Finished, Hop, LayerRange, Submit, Timing

MANIFEST = fake_manifest(4)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
SUBMIT = Submit(request_id="r", prompt=(5, 6, 7), params=PARAMS, seed=3, hops=True)
DRAWS = fake_draws(SUBMIT.prompt, PARAMS, 3, MANIFEST)
WAYS = [
    (Hop("a", LayerRange(0, 2), 0.0, float(i), 0.0, 0.0, 0), Hop("b", LayerRange(2, 4), 0.0, 0.0, 0.0, 0.0, 0))
    for i in range(6)
]


def expectation(stop_at: int | None = None, submit: Submit = SUBMIT) -> Expectation:
    case = Expectation(submit, 0, DRAWS, MANIFEST, stop_at)
    for index, way in enumerate(WAYS):
        case.add_route(index, way)
    return case


def told(start: int, stop: int) -> Deliver:
    ids, logprobs = zip(*DRAWS[start:stop], strict=True)
    return Deliver("r", 0, start, ids, logprobs, tuple(WAYS[start:stop]))


def finished(num_tokens: int, reason: str, num_prompt: int = 3) -> Finished:
    done = partial(Finished, request_id="r", index=0, timing=Timing(0.0, 0.0, 0.0, 0))
    return done(reason=reason, num_prompt=num_prompt, num_tokens=num_tokens)


def test_the_oracles_agree() -> None:
    """With and without logprobs the tokens are the same; no two logprobs are."""
    assert [token for token, _ in DRAWS] == fake_continuation(SUBMIT.prompt, PARAMS, 3, MANIFEST)
    assert len({each.logprob for _, (each,) in DRAWS}) == len(DRAWS)
    silent = msgspec.structs.replace(PARAMS, logprobs=None)
    assert fake_draws(SUBMIT.prompt, silent, 3, MANIFEST) == [(token, ()) for token, _ in DRAWS]


def test_what_is_right_passes() -> None:
    """In parts too, and by each of the ways by which a token came that was lost and computed again."""
    assert expectation().delivery_error(told(0, 6)) == expectation().delivery_error(told(2, 4)) == ""
    case = expectation()
    case.add_route(1, WAYS[5])
    assert case.delivery_error(replace(told(1, 2), hops=(WAYS[5],))) == ""


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (replace(told(1, 3), ids=told(1, 3).ids[::-1]), "is not"),
        (replace(told(1, 3), logprobs=told(2, 4).logprobs), "logprobs of 1 to 3"),
        (replace(told(1, 3), logprobs=()), "logprobs of 1 to 3"),
        (replace(told(1, 3), hops=told(2, 4).hops), "token 1 is reported to have come by"),
        (replace(told(1, 3), hops=((WAYS[1][:1]), WAYS[2])), "token 1 is reported to have come by"),
        (replace(told(1, 3), hops=told(1, 2).hops), "1 routes came with 2 tokens"),
    ],
)
def test_what_is_wrong_is_named(wrong: Deliver, what: str) -> None:
    """Another token, another one's logprob, none, another one's way, a part of it, too few."""
    assert what in expectation().delivery_error(wrong)


def test_who_asked_for_nothing_gets_nothing() -> None:
    """No logprobs and no ways."""
    submit = msgspec.structs.replace(SUBMIT, hops=False, params=msgspec.structs.replace(PARAMS, logprobs=None))
    assert "logprobs" in expectation(submit=submit).delivery_error(told(0, 1))
    assert "routes" in expectation(submit=submit).delivery_error(replace(told(0, 1), logprobs=()))


def test_only_the_end_that_was_due_is_right() -> None:
    """The natural one, or that of the stop string: by its own reason, with its own number of tokens."""
    assert expectation().end_error(finished(6, "length")) == ""
    assert expectation(stop_at=2).end_error(finished(2, "stop")) == ""
    assert expectation(stop_at=2).end_error(finished(6, "length")) == ""
    assert "6 tokens by stop" in expectation().end_error(finished(6, "stop"))
    assert "2 tokens by stop" in expectation().end_error(finished(2, "stop"))
    assert "2 tokens by length" in expectation(stop_at=2).end_error(finished(2, "length"))
    assert "3 tokens by stop" in expectation(stop_at=2).end_error(finished(3, "stop"))
    assert "its prompt" in expectation().end_error(finished(6, "length", num_prompt=4))
