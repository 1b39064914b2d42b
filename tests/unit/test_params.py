"""SamplingParams: what is right passes, what is wrong is named."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import InvalidRequest
from swarm.params import (
    MAX_BIASES,
    MAX_IMAGE_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOPS,
    ImageSpan,
    SamplingParams,
    Thinking,
)


def refused(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields).check()  # type: ignore[arg-type]
    return caught.value


def test_the_defaults_are_right_and_greedy() -> None:
    """Nothing asked for is greedy decoding of 128 tokens."""
    params = SamplingParams()
    params.check()
    assert params.greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert (params.max_tokens, params.min_tokens, params.n, params.logprobs, params.seed) == (128, 0, 1, None, None)


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("max_tokens", 1, 1_000_000),
        ("min_tokens", 0, 1_000_000),
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 1_000_000),
        ("top_p", 0.001, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 100.0),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
        ("logprobs", 0, MAX_LOGPROBS),
        ("n", 1, MAX_N),
        ("seed", 0, MAX_SEED),
    ],
)
def test_both_ends_of_a_range_are_allowed_and_no_more(field: str, low: float, high: float) -> None:
    """Both ends are allowed, one step beyond is not; the error names field, value and range; its code is the field."""
    enough = {"max_tokens": 1_000_000} if field == "min_tokens" else {}
    for value in (low, high):
        SamplingParams(**(enough | {field: value})).check()  # type: ignore[arg-type]
    beyond = math.nextafter(high, math.inf) if isinstance(high, float) else high + 1
    error = refused(**{field: beyond})
    assert error.code == field
    assert str(error).startswith(f"{field} must be between ")
    assert str(error).endswith(f"not {beyond}")
    below = {"top_p": -0.1, "repetition_penalty": -0.1}.get(field, low - 1)
    assert refused(**{field: below}).code == field


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(field: str, value: float) -> None:
    """NaN fails every comparison; here that means refused, not passed."""
    assert refused(**{field: value}).code == field


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"top_p": 0.0}, "top_p", "top_p must be above 0; for greedy decoding set temperature to 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty must be above 0 (1 is off)"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens (9) must not exceed max_tokens (8)"),
        ({"stop": ("x",) * (MAX_STOPS + 1)}, "stop", "stop takes at most 16, not 17"),
        ({"stop_token_ids": (1,) * (MAX_STOPS + 1)}, "stop_token_ids", "stop_token_ids takes at most 16, not 17"),
        ({"stop": ("a", "")}, "stop", "a stop string must not be empty"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
            "logit_bias",
            "logit_bias takes at most 1024 tokens",
        ),
        ({"logit_bias": {7: 1000.5}}, "logit_bias", "logit_bias[7] must be between -1000 and 1000, not 1000.5"),
        ({"logit_bias": {7: math.nan}}, "logit_bias", "logit_bias[7] must be between -1000 and 1000, not nan"),
    ],
)
def test_rules_beyond_ranges(fields: dict, code: str, text: str) -> None:
    """Each in its own words."""
    error = refused(**fields)
    assert (error.code, str(error)) == (code, text)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(),
        temperature=st.floats(),
        top_p=st.floats(),
        repetition_penalty=st.floats(),
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(), max_size=3),
        stop=st.lists(st.text(max_size=2), max_size=3).map(tuple),
        seed=st.none() | st.integers(),
    )
)
def test_checking_passes_or_names_a_field(params: SamplingParams) -> None:
    """Whatever the values are: either all is in its range, or the one error that callers expect."""
    right = (
        1 <= params.max_tokens <= 1_000_000
        and 0 <= params.temperature <= 100
        and 0 < params.top_p <= 1
        and 0 < params.repetition_penalty <= 100
        and all(-1000 <= bias <= 1000 for bias in params.logit_bias.values())
        and "" not in params.stop
        and (params.seed is None or 0 <= params.seed <= MAX_SEED)
    )
    if right:
        params.check()
        return
    with pytest.raises(InvalidRequest) as caught:
        params.check()
    assert caught.value.code in SamplingParams.__struct_fields__


def test_an_image_has_no_more_tokens_than_the_first_stage_has_memory_for() -> None:
    """Whatever its shape is."""
    small, large = ImageSpan(9, 64, 64, "a" * 64), ImageSpan(9000, 2, 2049, "b" * 64)
    assert small.num_tokens == MAX_IMAGE_TOKENS
    SamplingParams(images=(small,)).check()
    with pytest.raises(
        InvalidRequest, match="image 2 has 2 × 2049 tokens, an image may have 4096: shrink it"
    ) as caught:
        SamplingParams(images=(small, large)).check()
    assert caught.value.code == "images"


def test_the_wire_carries_it_unchanged_and_refuses_the_unknown() -> None:
    """It travels as msgpack; defaults cost nothing, a field that nobody knows is an error."""
    params = SamplingParams(max_tokens=5, stop=("a", "b"), logit_bias={3: -1.5}, seed=MAX_SEED)
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == params
    assert len(msgspec.msgpack.encode(SamplingParams())) <= 3
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temprature": 1.0}), type=SamplingParams)


def test_it_can_not_be_changed() -> None:
    """The same value from the client to the last stage."""
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "thinking",
    [
        Thinking(()),
        Thinking(("",)),
        Thinking(("x" * 65,)),
        Thinking(("x",) * 17),
        Thinking(("x",), 5),
        Thinking(("x",), -1, (5,)),
        Thinking(("x",), 1_000_001, (5,)),
        Thinking(("x",), 5, (5,) * 65),
    ],
)
def test_thinking_needs_ends_and_a_budget_tokens_that_close_it(thinking: Thinking) -> None:
    assert refused(thinking=thinking).code == "thinking"
    SamplingParams(thinking=Thinking(("x",), 0, (5,))).check()
    SamplingParams(thinking=Thinking(("x",))).check()
