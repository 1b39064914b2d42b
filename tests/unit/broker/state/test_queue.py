"""Whose turn it is: classes, equal shares, deadlines; and that the queue never loses or repeats anybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from swarm.broker.state import Request, Sequence
from swarm.broker.state.queue import MAX_IDLE_TENANTS, MIN_TOMBSTONES, WaitingQueue
from tests.unit.broker.bench import submit


def waiting(
    number: int, tenant: str = "a", priority: int = 0, deadline: float | None = None, num_prompt: int = 3
) -> Sequence:
    """A sequence that arrived as number so and so."""
    request = Request(submit(f"r{number}", num_prompt, priority=priority), b"c", 0.0, deadline, tenant)
    return Sequence(number, request, 0, 1, list(request.submit.prompt), num_prompt + 8)


def filled(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.add(sequence)
    return queue


def drained(queue: WaitingQueue) -> list[int]:
    found = []
    while (sequence := queue.pop()) is not None:
        found.append(sequence.id)
    return found


def test_a_higher_class_goes_first() -> None:
    """Whatever came when."""
    queue = filled(waiting(1, priority=-50), waiting(2), waiting(3, priority=50), waiting(4, priority=7))
    assert queue.highest_class == 50
    assert queue.counts_by_class() == {-50: 1, 0: 1, 50: 1, 7: 1}
    assert [s.id for s in queue] == [3, 4, 2, 1]
    assert drained(queue) == [3, 4, 2, 1]
    assert queue.highest_class is None


def test_of_one_tenant_the_earliest_deadline_goes_first() -> None:
    """Those without one come after, in order of arrival."""
    queue = filled(waiting(1), waiting(2, deadline=9.0), waiting(3, deadline=5.0), waiting(4))
    assert drained(queue) == [3, 2, 1, 4]


def test_a_thousand_requests_weigh_no_more_than_one() -> None:
    """Who has been given less goes first, however many the other has waiting."""
    queue = filled(*(waiting(number, "crowd") for number in range(1, 1001)))
    for _ in range(3):
        queue.pop()
        queue.charge("crowd", 100)
    queue.add(waiting(1001, "single"))
    # The newcomer starts level with the one that is served: at most one goes ahead of it.
    order = []
    for _ in range(2):
        sequence = queue.pop()
        assert sequence is not None
        order.append(sequence.request.tenant)
        queue.charge(sequence.request.tenant, 100)
    assert "single" in order


def test_two_tenants_get_equal_shares() -> None:
    """Of tokens, not of requests: who asks for longer answers is served less often."""
    queue = filled(*(waiting(number, "ab"[number % 2]) for number in range(200)))
    served = {"a": 0, "b": 0}
    for _ in range(90):
        sequence = queue.pop()
        assert sequence is not None
        tenant = sequence.request.tenant
        tokens = 30 if tenant == "a" else 10
        served[tenant] += tokens
        queue.charge(tenant, tokens)
    assert abs(served["a"] - served["b"]) <= 30


def test_silence_earns_nothing() -> None:
    """A tenant that was away while others were served doesn't get all the time it missed."""
    queue = filled(waiting(1, "quiet"))
    assert drained(queue) == [1]
    for number in range(2, 60):
        queue.add(waiting(number, "busy"))
    for _ in range(20):
        queue.pop()
        queue.charge("busy", 100)
    for number in range(60, 80):
        queue.add(waiting(number, "quiet"))
    order = []
    for _ in range(10):
        sequence = queue.pop()
        assert sequence is not None
        order.append(sequence.request.tenant)
        queue.charge(sequence.request.tenant, 100)
    assert order.count("busy") >= 4


def test_work_is_what_is_known_and_what_may_come() -> None:
    """Prompts count in full, answers by the part of their length that they usually come to."""
    queue = filled(waiting(1, num_prompt=10), waiting(2, num_prompt=20))
    assert queue.pending_tokens(1.0) == 10 + 20 + 2 * 8
    assert queue.pending_tokens(0.5) == 10 + 20 + 8
    queue.pop()
    assert queue.pending_tokens(1.0) == 20 + 8


def test_parked_ones_wait_without_a_turn() -> None:
    """They count and are seen, but are not taken before there is another plan; they may go at any time."""
    one, other = waiting(1), waiting(2)
    queue = WaitingQueue()
    queue.set_aside(one)
    queue.set_aside(other)
    assert (len(queue), queue.pop(), one in queue) == (2, None, True)
    queue.remove(other)
    queue.restore_aside()
    assert drained(queue) == [1]


def test_all_of_a_tenant_are_counted_and_patience_is_that_of_the_parked() -> None:
    """Those without a turn take places too, until they are given up: the longest aside first."""
    queue = filled(waiting(1, "a"), waiting(2, "b"), waiting(3, "a"))
    assert queue.seconds_until_given_up(1, 30.0) == 0.0
    for number, unfit_s in ((4, 5.0), (5, 20.0), (6, 50.0)):
        aside = waiting(number, "a")
        aside.unfit_s = unfit_s
        queue.set_aside(aside)
    assert [queue.num_waiting(tenant) for tenant in "abc"] == [5, 1, 0]
    assert [queue.seconds_until_given_up(num, 30.0) for num in (0, 1, 2, 3, 9)] == [0.0, 0.0, 10.0, 25.0, 25.0]


def test_tenants_are_bounded() -> None:
    """Names that come and go are forgotten, those that wait are not."""
    queue = filled(waiting(0, "waits"))
    for number in range(1, 3 * MAX_IDLE_TENANTS):
        queue.charge(f"t{number}", 1)
    names = {name for name, _, _ in queue.loads_by_tenant()}
    assert len(names) <= MAX_IDLE_TENANTS
    assert "waits" in names
    assert queue.loads_by_tenant()[0][:2] == ("waits", 1)


def test_husks_are_swept() -> None:
    """Sequences that are withdrawn out of turn don't pile up, and those among them keep their order."""
    sequences = [waiting(number, "abc"[number % 3]) for number in range(10 * MIN_TOMBSTONES)]
    queue = filled(*sequences)
    for sequence in sequences:
        if sequence.id % 10:
            queue.remove(sequence)
    heaps = [heap for group in queue._classes.values() for heap in group.heaps.values()]
    assert sum(len(heap) for heap in heaps) <= 2 * MIN_TOMBSTONES + len(queue)
    assert sorted(drained(queue)) == list(range(0, 10 * MIN_TOMBSTONES, 10))


_MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "pop", "remove", "charge", "set_aside", "bring_back"]), st.integers(0, 999))
)


@pytest.mark.slow
@effort(max_examples=200, deadline=None)
@given(_MOVES)
def test_nobody_is_lost(moves: list[tuple[str, int]]) -> None:
    """Whatever comes and goes: the queue holds exactly those that were added and not taken, and never hands out one
    while a higher class waits."""
    queue, inside, number = WaitingQueue(), {}, 0
    for what, chance in moves:
        chosen = inside[sorted(inside)[chance % len(inside)]] if inside else None
        match what:
            case "add":
                number += 1
                deadline = float(chance % 50) if chance % 3 == 0 else None
                inside[number] = waiting(number, "abcd"[chance % 4], (-50, 0, 0, 50)[chance % 4], deadline)
                queue.add(inside[number])
            case "pop":
                taken = queue.pop()
                turns = [s for s in inside.values() if s.id not in queue.aside]
                assert (taken is None) == (not turns)
                if taken is not None:
                    assert taken.priority == max(s.priority for s in turns)
                    del inside[taken.id]
            case "remove" if chosen:
                queue.remove(inside.pop(chosen.id))
            case "charge":
                queue.charge("abcd"[chance % 4], chance)
            case "set_aside" if chosen and chosen.id not in queue.aside:
                queue.remove(chosen)
                queue.set_aside(chosen)
            case "bring_back":
                queue.restore_aside()
        assert {s.id for s in queue} == inside.keys()
        assert len(queue) == len(inside)
        assert sum(queue.counts_by_class().values()) == len(inside) - len(queue.aside)
    turns = [s for s in inside.values() if s.id not in queue.aside]
    assert queue.pending_tokens(1.0) == sum(s.limit for s in turns)
