"""What a key may use: times go in, yes or a time to come back go out."""

from __future__ import annotations

from swarm.api_keys.keys import ApiKey, KeyLimits
from swarm.gateway.errors import ApiError
from swarm.gateway.middleware.rate_limiter import DAY_S, RateLimiter

NOON = 20_000 * DAY_S + DAY_S / 2


def key(**limits: float) -> ApiKey:
    return ApiKey("alice", "0" * 12, "00" * 16, "", "", KeyLimits(**limits))  # type: ignore[arg-type]


def refused(problem: ApiError | None, code: str) -> float:
    assert problem is not None
    assert (problem.status, problem.code) == (429, code)
    assert problem.retry_after_s is not None
    return problem.retry_after_s


def test_without_limits_everything_is_let_in() -> None:
    book = RateLimiter()
    assert [book.admit(key(), NOON) for _ in range(1000)] == [None] * 1000


def test_the_rate_is_a_minutes_worth_and_then_evenly() -> None:
    """The time to come back is true: a moment before it is refused, at it is let in."""
    book, mine = RateLimiter(), key(rate_per_min=6)
    assert [book.admit(mine, NOON) for _ in range(6)] == [None] * 6
    wait_s = refused(book.admit(mine, NOON), "rate_limit_exceeded")
    assert wait_s == 10.0
    refused(book.admit(mine, NOON + wait_s - 0.01), "rate_limit_exceeded")
    assert book.admit(mine, NOON + wait_s + 0.001) is None
    refused(book.admit(mine, NOON + wait_s + 0.001), "rate_limit_exceeded")


def test_a_rate_below_one_a_minute_lets_one_in() -> None:
    book, mine = RateLimiter(), key(rate_per_min=0.5)
    assert book.admit(mine, NOON) is None
    assert refused(book.admit(mine, NOON), "rate_limit_exceeded") == 120.0


def test_refusals_cost_nothing() -> None:
    """Whoever asks too often is not put off for longer by that."""
    book, mine = RateLimiter(), key(rate_per_min=60)
    for _ in range(60):
        assert book.admit(mine, NOON) is None
    for _ in range(500):
        refused(book.admit(mine, NOON), "rate_limit_exceeded")
    assert book.admit(mine, NOON + 1.001) is None


def test_so_many_at_a_time() -> None:
    book, mine = RateLimiter(), key(concurrency=2)
    assert book.admit(mine, NOON) is None
    assert book.admit(mine, NOON) is None
    assert refused(book.admit(mine, NOON), "concurrency") == 1.0
    book.release("alice")
    assert book.admit(mine, NOON) is None


def test_tokens_of_a_day() -> None:
    """Until the day turns, in UTC; an answer that was begun in time is served whole."""
    book, mine = RateLimiter(), key(tokens_per_day=100)
    assert book.admit(mine, NOON) is None
    book.charge("alice", 99, NOON)
    assert book.admit(mine, NOON) is None
    book.charge("alice", 50, NOON)
    assert refused(book.admit(mine, NOON), "tokens_per_day") == DAY_S / 2
    refused(book.admit(mine, NOON + DAY_S / 2 - 1), "tokens_per_day")
    assert book.admit(mine, NOON + DAY_S / 2) is None


def test_a_clock_that_goes_back_gives_nothing() -> None:
    book, mine = RateLimiter(), key(rate_per_min=1)
    assert book.admit(mine, NOON) is None
    refused(book.admit(mine, NOON - 1000), "rate_limit_exceeded")


def test_keys_that_are_gone_are_forgotten_when_nothing_runs() -> None:
    book, mine = RateLimiter(), key()
    book.admit(mine, NOON)
    book.retain(set())
    assert "alice" in book.used
    book.release("alice")
    book.retain(set())
    assert not book.used
    book.charge("alice", 5, NOON)  # a late word is no accident
