"""Who gives way while too many shake hands: a crowd to itself, not somebody else."""

from __future__ import annotations

import pytest

from swarm.wire.transport.accept import HandshakeLimiter, source_of


def test_a_crowd_gives_way_to_itself() -> None:
    """However many come from one source, who came from another one before, or comes now, stays."""
    strangers: HandshakeLimiter[str] = HandshakeLimiter(3)
    assert strangers.add("far", "b", 0.0) is None
    assert [strangers.add(f"crowd {number}", "a", 0.0) for number in range(4)] == [None, None, "crowd 0", "crowd 1"]
    assert strangers.add("other", "c", 0.0) == "crowd 2"
    assert strangers.add("crowd 4", "a", 0.0) == "crowd 3"
    assert list(strangers) == ["far", "other", "crowd 4"]


def test_the_oldest_gives_way_among_equals() -> None:
    strangers: HandshakeLimiter[str] = HandshakeLimiter(2)
    assert [strangers.add(name, name, 0.0) for name in "abcd"] == [None, None, "a", "b"]


def test_who_is_through_counts_no_more() -> None:
    """Nor does who has gone, twice or not."""
    strangers: HandshakeLimiter[str] = HandshakeLimiter(2)
    for name in ("a", "b"):
        strangers.add(name, "same", 0.0)
    for _ in range(2):
        strangers.on_success("a")
    assert "a" not in strangers
    assert strangers.add("c", "same", 0.0) is None
    assert list(strangers) == ["b", "c"]


def fails(strangers: HandshakeLimiter[str], source: str, count: int, now: float) -> None:
    for number in range(count):
        strangers.add(f"{source} {number}", source, now)
        strangers.on_failure(f"{source} {number}", now)


def test_who_fails_again_and_again_is_not_heard() -> None:
    """For as long as it takes to forgive some; others are."""
    strangers: HandshakeLimiter[str] = HandshakeLimiter(8)
    fails(strangers, "a", 64, 0.0)
    assert not strangers.is_allowed("a", 0.0)
    assert strangers.is_allowed("b", 0.0)
    assert strangers.is_allowed("a", 1.0)
    fails(strangers, "a", 8, 1.0)
    assert not strangers.is_allowed("a", 1.0)
    assert strangers.is_allowed("a", 60.0)


def test_many_at_once_who_may_come_in_get_in() -> None:
    """Members behind one address, all at once: some give way to others, but one that gets through speaks for all."""
    strangers: HandshakeLimiter[str] = HandshakeLimiter(8)
    for number in range(63):
        strangers.add(str(number), "a", 0.0)
    assert strangers.is_allowed("a", 0.0)
    for number in range(63, 1000):
        strangers.add(str(number), "a", 0.0)
        strangers.on_success(str(number))
        assert strangers.is_allowed("a", 0.0)


def test_who_gives_way_has_failed() -> None:
    strangers: HandshakeLimiter[str] = HandshakeLimiter(2)
    for number in range(200):
        strangers.add(str(number), "a", 0.0)
    assert not strangers.is_allowed("a", 0.0)


def test_this_machine_is_always_heard() -> None:
    strangers: HandshakeLimiter[str] = HandshakeLimiter(2)
    fails(strangers, "", 1000, 0.0)
    assert strangers.is_allowed("", 0.0)


def test_not_all_that_fail_are_remembered() -> None:
    """Those that began to fail first are forgotten."""
    strangers: HandshakeLimiter[str] = HandshakeLimiter(2)
    for number in range(5000):
        fails(strangers, str(number), 1, 0.0)
    assert len(strangers._failures) <= 4096


@pytest.mark.parametrize(
    ("came_from", "source"),
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("2001:db8::1", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff:2", 1, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::ffff:192.0.2.1", 1, 0, 0), "192.0.2.1"),
        (("127.0.0.1", 1), ""),
        (("::1", 1, 0, 0), ""),
        ("", ""),
    ],
)
def test_sources(came_from: object, source: str) -> None:
    """A network of IPv6 is one."""
    assert source_of(came_from) == source
