"""What is kept of ended requests, and who waits for the journal to tell of one: both are bounded."""

from __future__ import annotations

import pytest

from swarm.broker.state import Request, Sequence, ended_requests
from swarm.broker.state.ended_requests import MAX_PER_REQUEST, EndedRequests, JournalLookups, request_weight
from swarm.params import SamplingParams
from swarm.wire.messages import Ack, Attach, GetRequest, Submit

CLIENT, OTHER = b"client", b"other"


def request(name: str, num_generated: int = 1, **params: int) -> Request:
    """One that has ended."""
    submit = Submit(request_id=name, prompt=(1, 2, 3), params=SamplingParams(**params), seed=5)
    found = Request(submit, CLIENT, 0.0, None)
    tokens = [*submit.prompt, *range(num_generated)]
    found.sequences.append(Sequence(id=1, request=found, index=0, seed=5, tokens=tokens, limit=99))
    return found


# --- the shelf --------------------------------------------------------------------------------------------------------


def test_what_left_the_shelf_weighs_nothing() -> None:
    """However often it comes and goes, and whatever it weighed when it came."""
    shelf = EndedRequests()
    first, second = request("a", 10), request("b", 20)
    shelf.add(first)
    shelf.add(second)
    first.sequences[0].tokens.append(7)
    shelf.add(first)
    assert shelf.weight == request_weight(first) + request_weight(second)
    shelf.remove("a")
    shelf.remove("nobody")
    assert (shelf.weight, list(shelf.weights)) == (request_weight(second), ["b"])
    shelf.remove("b")
    assert shelf.weight == 0


def test_log_probabilities_weigh_more_than_tokens() -> None:
    """For each alternative, and for the token itself."""
    plain, more = request_weight(request("a", 10)), request_weight(request("a", 10, logprobs=2))
    assert more - plain == 10 * 3 * ended_requests.LOGPROB_WEIGHT


def test_hops_weigh_too() -> None:
    """Each stage's of each token."""
    some = request("a", 2)
    before = request_weight(some)
    some.sequences[0].hops.extend([(), ((), ())])  # type: ignore[list-item]
    assert request_weight(some) - before == 2 * ended_requests.HOP_WEIGHT


def test_the_newest_stays_whatever_it_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are too much together are; one alone is not. And too many are too many, be they light."""
    monkeypatch.setattr(ended_requests, "MAX_ENDED_WEIGHT", 30)
    monkeypatch.setattr(ended_requests, "MAX_ENDED", 3)
    shelf = EndedRequests()
    shelf.add(request("long", 100))
    assert not shelf.exceeds_limits
    shelf.add(request("short"))
    assert shelf.exceeds_limits
    assert list(shelf.iter_oldest()) == ["long"]
    shelf.remove("long")
    for name in "abc":
        assert not shelf.exceeds_limits
        shelf.add(request(name, 0))
    assert shelf.exceeds_limits


# --- questions to the journal -----------------------------------------------------------------------------------------


def attach(request_id: str, *next_index: int) -> Attach:
    return Attach(request_id=request_id, next_index=next_index)


def test_the_first_question_asks_the_others_wait() -> None:
    """All are answered together, in their order; and then the next one is the first again."""
    asked = JournalLookups()
    assert asked.enqueue(CLIENT, attach("r", 0)) is True
    assert asked.enqueue(OTHER, attach("r", 0)) is False
    assert asked.enqueue(OTHER, GetRequest(request_id="r")) is False
    assert asked.enqueue(OTHER, GetRequest(request_id="q")) is True
    said = [(CLIENT, attach("r", 0)), (OTHER, attach("r", 0)), (OTHER, GetRequest(request_id="r"))]
    assert asked.take("r") == [(client, message, None) for client, message in said]
    assert asked.take("r") == []
    assert asked.enqueue(CLIENT, attach("r", 0)) is True


def test_a_clients_later_word_counts() -> None:
    """Of the same kind, about the same continuation; it keeps its place."""
    asked = JournalLookups()
    for message in (attach("r", 1), Ack(request_id="r", index=0, next_index=1), GetRequest(request_id="r")):
        asked.enqueue(CLIENT, message)
    later = [attach("r", 5), Ack(request_id="r", index=0, next_index=5)]
    for message in later:
        assert asked.enqueue(CLIENT, message) is False  # type: ignore[arg-type]
    assert asked.enqueue(CLIENT, Ack(request_id="r", index=1, next_index=2)) is False
    found = [message for _, message, _ in asked.take("r")]
    assert found == [*later, GetRequest(request_id="r"), Ack(request_id="r", index=1, next_index=2)]


def test_who_withdraws_is_not_answered_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a submission was among it, is told; the others wait on."""
    monkeypatch.setattr(ended_requests, "MAX_WAITING", 3)
    asked = JournalLookups()
    asked.enqueue(CLIENT, request("r").submit)
    asked.enqueue(CLIENT, attach("r", 0))
    asked.enqueue(OTHER, attach("r", 0))
    assert asked.enqueue(OTHER, GetRequest(request_id="q")) is None
    assert asked.withdraw(CLIENT, "r") is True
    assert asked.withdraw(CLIENT, "r") is False
    assert asked.withdraw(CLIENT, "nobody") is False
    assert asked.take("r") == [(OTHER, attach("r", 0), None)]
    for number in range(3):
        assert asked.enqueue(OTHER, GetRequest(request_id=f"q{number}")) is True
    assert asked.enqueue(OTHER, GetRequest(request_id="late")) is None


def test_no_more_wait_for_one_request_than_may() -> None:
    """Whoever comes then is told that there is no room; those of others have theirs."""
    asked = JournalLookups()
    for number in range(MAX_PER_REQUEST):
        assert asked.enqueue(b"%d" % number, attach("r", 0)) is (number == 0)
    assert asked.enqueue(CLIENT, attach("r", 0)) is None
    assert asked.enqueue(CLIENT, attach("q", 0)) is True


def test_as_many_dropped_ones_are_remembered_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest; and none that nobody was reading."""
    monkeypatch.setattr(ended_requests, "MAX_DROPPED", 2)
    some = JournalLookups()
    unread = request("unread")
    unread.client = None
    for each in (request("a"), request("b"), unread, request("c")):
        some.record_dropped(each)
    assert dict(some.dropped_readers) == {"b": CLIENT, "c": CLIENT}
