"""What a gateway counts: each request once, each token once, and no more names than are bearable."""

from __future__ import annotations

import time

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarm.metrics.http import CONNECTION, MAX_NAMES, HttpMetrics


class HandClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def numbers(clock: HandClock) -> HttpMetrics:
    return HttpMetrics(clock)


def samples(numbers: HttpMetrics, name: str) -> dict[tuple[str, ...], float]:
    """Values by their labels, in the order of their names, as a scrape finds them."""
    text = generate_latest(numbers.registry).decode()
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {tuple(s.labels.values()): s.value for s in found if s.name == name}


def test_a_request_is_counted_from_its_beginning_to_its_end(numbers: HttpMetrics, clock: HandClock) -> None:
    watch = numbers.start_request("chat", "village")
    assert samples(numbers, "swarm_http_open_requests") == {("chat",): 1}
    clock.time += 0.5
    watch.on_first_token()
    for _ in range(3):
        clock.time += 0.01
        watch.on_tokens()
    clock.time += 0.1
    watch.finish("stop", prompt=10, cached=8, answer=4)
    assert samples(numbers, "swarm_http_open_requests") == {("chat",): 0}
    assert samples(numbers, "swarm_http_requests_total") == {("chat", "village", "stop"): 1}
    assert samples(numbers, "swarm_http_tokens_total") == {
        ("chat", "prompt", "village"): 10,
        ("chat", "cached", "village"): 8,
        ("chat", "answer", "village"): 4,
    }
    assert samples(numbers, "swarm_http_first_token_seconds_sum") == {("chat",): 0.5}
    assert samples(numbers, "swarm_http_inter_token_seconds_count") == {("chat",): 3}
    assert samples(numbers, "swarm_http_inter_token_seconds_sum")[("chat",)] == pytest.approx(0.03)
    assert samples(numbers, "swarm_http_request_seconds_sum")[("chat",)] == pytest.approx(0.63)


def test_an_end_counts_once(numbers: HttpMetrics) -> None:
    """It may be said again where a request is cleaned up."""
    watch = numbers.start_request("chat", "village")
    watch.finish("stop", 1, 0, 1)
    watch.finish("failed", 1, 0, 1)
    assert samples(numbers, "swarm_http_requests_total") == {("chat", "village", "stop"): 1}
    assert samples(numbers, "swarm_http_open_requests") == {("chat",): 0}


def test_tokens_that_come_together_share_the_gap(numbers: HttpMetrics, clock: HandClock) -> None:
    """The first may be among them: nobody waited for it between two tokens."""
    watch = numbers.start_request("chat", "village")
    clock.time += 1.0
    watch.on_tokens(3)
    assert samples(numbers, "swarm_http_first_token_seconds_sum") == {("chat",): 1.0}
    assert samples(numbers, "swarm_http_inter_token_seconds_count") == {("chat",): 2}
    clock.time += 0.2
    watch.on_tokens(2)
    assert samples(numbers, "swarm_http_inter_token_seconds_count") == {("chat",): 4}
    assert samples(numbers, "swarm_http_inter_token_seconds_sum")[("chat",)] == pytest.approx(0.2)
    assert [count for count in numbers.inter_token_times["chat"].counts if count] == [2, 2]


def test_the_first_token_is_said_once(numbers: HttpMetrics, clock: HandClock) -> None:
    watch = numbers.start_request("chat", "village")
    watch.on_first_token()
    clock.time += 1.0
    watch.on_first_token()
    assert samples(numbers, "swarm_http_first_token_seconds_count") == {("chat",): 1}


def test_names_are_bounded(numbers: HttpMetrics) -> None:
    """Whoever invents models or APIs makes no more series: they are counted as "other"."""
    for number in range(MAX_NAMES + 10):
        numbers.start_request("chat", f"model-{number}").finish("stop", 0, 0, 0)
        numbers.count_refused(f"api-{number}", 404)
    found = samples(numbers, "swarm_http_requests_total")
    assert len(found) == MAX_NAMES + 1
    assert found["chat", "other", "stop"] == 10
    refused = samples(numbers, "swarm_http_refused_total")
    assert len(refused) <= MAX_NAMES + 1
    assert sum(refused.values()) == MAX_NAMES + 10


def test_what_was_no_request_has_a_name_of_its_own(numbers: HttpMetrics) -> None:
    """However many APIs there are."""
    for number in range(MAX_NAMES + 1):
        numbers.count_refused(f"api-{number}", 404)
    numbers.count_bad_connection(408)
    assert samples(numbers, "swarm_http_refused_total")[CONNECTION, "408"] == 1


def test_a_request_that_is_refused_after_all_is_none_that_was_answered(numbers: HttpMetrics) -> None:
    """It is not open any more, and has no outcome, whatever is said of it afterwards."""
    watch = numbers.start_request("chat", "village")
    watch.mark_refused()
    watch.finish("failed")
    assert samples(numbers, "swarm_http_open_requests") == {("chat",): 0}
    assert samples(numbers, "swarm_http_requests_total") == {}


def test_how_other_servers_did_is_told(numbers: HttpMetrics) -> None:
    numbers.upstream_counts["other:8000", "failed"] += 2
    assert samples(numbers, "swarm_http_upstream_requests_total") == {("failed", "other:8000"): 2}


def test_what_the_process_takes_is_told(numbers: HttpMetrics) -> None:
    assert samples(numbers, "swarm_gateway_resident_bytes")[()] > 1e6
    assert (
        0 < samples(numbers, "swarm_gateway_descriptors")[()] < samples(numbers, "swarm_gateway_descriptor_limit")[()]
    )


def test_a_token_costs_next_to_nothing() -> None:
    """Streams run at over 10,000 tokens a second: measured 0.4 µs, and ten times that is still bearable."""
    watch = HttpMetrics().start_request("chat", "village")
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10_000):
            watch.on_tokens()
        times.append((time.perf_counter() - began) / 10_000)
    assert min(times) < 10e-6
