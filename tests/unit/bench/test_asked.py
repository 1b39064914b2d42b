"""What is asked for: lengths, limits, URLs, extras; and what is refused with a clear word."""

from __future__ import annotations

from random import Random

import pytest

from swarm.bench.lengths import Lengths, parse_lengths
from swarm.bench.plan import ASSUMED, LatencyLimits, base_url, parse_extras, parse_limits, parse_seconds
from swarm.bench.processes.probe import fit_scale
from swarm.errors import InvalidRequest


def lengths(text: str, file: str = "") -> Lengths:
    return parse_lengths(text, lambda path: file)


def test_a_fixed_length_is_always_the_same() -> None:
    assert {lengths("17").draw(Random(n)) for n in range(20)} == {17}
    assert lengths("fixed:17").numbers == (17,)


def test_a_uniform_length_reaches_both_ends_and_nothing_beyond() -> None:
    chance, drawn = Random(1), set()
    for _ in range(500):
        drawn.add(lengths("uniform:3:6").draw(chance))
    assert drawn == {3, 4, 5, 6}


def test_a_lognormal_length_has_its_median_and_keeps_its_bound() -> None:
    chance, found = Random(1), lengths("lognormal:100:0.8:400")
    drawn = sorted(found.draw(chance) for _ in range(4000))
    assert 92 < drawn[2000] < 108
    assert drawn[-1] == 400
    assert drawn[0] >= 1


def test_lengths_of_a_file_are_drawn_from_its_lines_only() -> None:
    found = lengths("file:x", "5\n\n70\n900\n")
    chance = Random(1)
    assert {found.draw(chance) for _ in range(100)} == {5, 70, 900}
    assert found.mean == 325


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "1.5",
        "uniform:9:3",
        "uniform:3",
        "lognormal:10",
        "lognormal:10:-1",
        "lognormal:10:x",
        "poisson:3",
    ],
)
def test_what_is_no_distribution_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"uniform:LOW:HIGH.*lognormal:MEDIAN:SIGMA.*file:PATH"):
        lengths(text)


@pytest.mark.parametrize("file", ["", "12\nten\n", "12\n-1\n", "٣\n"])
def test_a_file_that_has_other_things_than_lengths_is_refused_by_name(file: str) -> None:
    with pytest.raises(InvalidRequest, match=r"my\.txt"):
        lengths("file:my.txt", file)


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ],
)
def test_a_url_gets_what_it_lacks_and_loses_an_endpoint(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:99999", "http://h/v1?x=1", "http://a:b@h"])
def test_what_is_no_servers_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        base_url(url)


def test_limits_have_units_and_each_may_be_left_out() -> None:
    assert parse_limits("ttft=500ms, e2e=2s") == LatencyLimits(ttft=0.5, e2e=2.0)
    assert str(parse_limits("tpot=50ms")) == "tpot ≤ 50 ms"
    assert not LatencyLimits()


@pytest.mark.parametrize("text", ["", "ttft", "ttft=1,ttft=2", "speed=3s", "ttft=fast", "ttft=-1s", "ttft=nan"])
def test_limits_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_limits(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), ("7", 7.0)]
)
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_seconds(text, "x") == pytest.approx(seconds)


def test_extras_are_json_and_may_not_take_the_place_of_what_the_tool_makes() -> None:
    assert parse_extras(["ignore_eos=true", 'stop=["a"]', "top_k=3"]) == {"ignore_eos": True, "stop": ["a"], "top_k": 3}
    for wrong in ("ignore_eos", "a=b c", "=1", "stream=true", 'prompt="x"'):
        with pytest.raises(InvalidRequest, match="--extra"):
            parse_extras([wrong])


def test_a_calibration_finds_the_template_and_the_tokens_of_a_word() -> None:
    scale = fit_scale([(16, 39), (144, 295)])
    assert (scale.base, scale.per_word) == (7.0, 2.0)
    assert scale.words(107) == 50
    assert "2.00 tokens a word and 7 around them" in scale.description


@pytest.mark.parametrize("told", [[], [(16, None), (144, None)], [(16, 1), (144, 1)]])
def test_without_figures_that_grow_with_the_prompt_the_scale_is_assumed_and_says_so(
    told: list[tuple[int, int | None]],
) -> None:
    assert fit_scale(told) == ASSUMED
    assert "assumed" in ASSUMED.description
