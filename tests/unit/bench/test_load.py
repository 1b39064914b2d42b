"""What is sent and when: arrivals, shares, prompts, waits. All seeded: the same seed, the same load."""

from __future__ import annotations

import itertools
import statistics
from datetime import UTC, datetime
from random import Random

import pytest

from swarm.bench.lengths import parse_lengths
from swarm.bench.plan import EXACT, LoadPoint, RequestShape, Scale
from swarm.bench.prompts import PromptSource
from swarm.bench.retry import MAX_WAIT_S, backoff_s, retry_after_s
from swarm.bench.schedule import arrivals, share_arrivals, split_point


def shape(prompt: str = "20", output: str = "10", **more: object) -> RequestShape:
    return RequestShape(parse_lengths(prompt, str), parse_lengths(output, str), **more)  # type: ignore[arg-type]


def test_arrivals_are_a_poisson_process_of_their_rate() -> None:
    at = list(itertools.islice(arrivals(50.0, 3), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # as great as the mean: nothing but chance
    assert at == sorted(at)


def test_arrivals_are_the_same_for_the_same_seed_only() -> None:
    first, again, other = (list(itertools.islice(arrivals(9.0, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_processes_send_together_exactly_what_one_would() -> None:
    """Each request once, at its time, whoever sends it."""
    point = LoadPoint(rate=10.0, duration_s=5.0)
    together: list[tuple[int, float]] = []
    for share in split_point(point, 3):
        together += itertools.takewhile(lambda pair: pair[1] < 100, share_arrivals(10.0, 7, share))
    alone = itertools.takewhile(lambda at: at < 100, arrivals(10.0, 7))
    assert sorted(together) == list(enumerate(alone))


@pytest.mark.parametrize(("concurrency", "count", "num_processes"), [(8, 100, 3), (2, 10, 4), (5, 3, 4), (1, None, 4)])
def test_shares_add_up_and_none_is_empty(concurrency: int, count: int | None, num_processes: int) -> None:
    found = split_point(LoadPoint(concurrency, count=count), num_processes)
    assert sum(share.point.concurrency or 0 for share in found) == concurrency
    assert all(share.point.concurrency for share in found)
    if count is not None:
        assert sum(share.point.count or 0 for share in found) == count
        numbers = {s.first + n * s.step for s in found for n in range(s.point.count or 0)}
        assert numbers == set(range(count))


def test_a_requests_number_decides_its_text_and_lengths() -> None:
    mine, yours = (
        PromptSource(shape("uniform:10:50", "uniform:1:9"), EXACT),
        PromptSource(shape("uniform:10:50", "uniform:1:9"), EXACT),
    )
    yours.make_request(99)  # what was made before has no influence
    assert mine.make_request(5) == yours.make_request(5)
    assert mine.make_request(5) != mine.make_request(6)


def test_a_prompt_has_the_words_that_its_tokens_ask_for() -> None:
    job = PromptSource(shape("107"), Scale(7.0, 2.0, "")).make_request(1)
    assert isinstance(job.prompt, str)
    assert len(job.prompt.split()) == 50
    assert job.prompt_tokens == 107
    long = PromptSource(shape("30000"), EXACT).make_request(1)  # more than the pool has
    assert isinstance(long.prompt, str)
    assert len(long.prompt.split()) == 30_000


def test_prompts_share_no_beginning_unless_asked_to() -> None:
    prompts = PromptSource(shape("50"), EXACT)
    beginnings = {" ".join(str(prompts.make_request(n).prompt).split()[:4]) for n in range(300)}
    assert len(beginnings) == 300


def test_shared_prefixes_are_as_many_as_asked_for_and_the_rest_differs() -> None:
    prompts = PromptSource(shape("8", shared_prefix=12, num_prefixes=3), EXACT)
    texts = [str(prompts.make_request(n).prompt).split() for n in range(60)]
    assert len({" ".join(text[:12]) for text in texts}) == 3
    assert len({" ".join(text[12:]) for text in texts}) == 60
    assert {len(text) for text in texts} == {20}


def test_prompts_of_token_ids_have_exactly_their_length_and_range() -> None:
    prompts = PromptSource(shape("16", shared_prefix=4, token_ids=(100, 120)), EXACT)
    ids = prompts.make_request(1).prompt
    assert isinstance(ids, list)
    assert len(ids) == 20
    assert all(100 <= number <= 120 for number in ids)
    assert prompts.make_request(2).prompt[:4] == ids[:4]


def test_a_wait_is_what_the_server_asks_for_else_it_doubles_up_to_a_bound() -> None:
    assert backoff_s(1, 7.5, Random(1)) == 7.5
    waits = [backoff_s(attempt, None, Random(1)) for attempt in range(1, 12)]
    assert waits == sorted(waits)
    assert 0.125 <= waits[0] <= 0.25
    assert waits[-1] <= MAX_WAIT_S
    assert backoff_s(3, None, Random(1)) != backoff_s(3, None, Random(2))


NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("Thu, 01 Jan 2026 12:00:09 GMT", 9.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("1e300", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, NOW) == seconds
