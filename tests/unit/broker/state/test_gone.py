"""What is remembered of requests that are gone stays within its bounds."""

from __future__ import annotations

import pytest

from swarm.broker.state import Request, Sequence
from swarm.broker.state import ended_requests as gone
from swarm.broker.state.ended_requests import ForgottenRequests
from tests.unit.broker.bench import submit


def _request(name: str, *sequences: int) -> Request:
    request = Request(submit(name), None, 0.0, None, "tenant")
    request.sequences += [
        Sequence(id=number, request=request, index=index, seed=0, tokens=[1], limit=2)
        for index, number in enumerate(sequences)
    ]
    return request


def test_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest are remembered."""
    monkeypatch.setattr(gone, "MAX_ANSWERS", 2)
    monkeypatch.setattr(gone, "MAX_UNWRITTEN", 3)
    kept, read = ForgottenRequests(), ForgottenRequests()
    for number, name in enumerate("abc"):
        kept.record_dropped(_request(name, 2 * number, 2 * number + 1), has_journal=True)
        read.record_read_by_another(_request(name))
    assert [kept.refusal_for(name, "full").code for name in "abc"] == ["unknown", "journal", "journal"]
    assert [read.refusal_for(name, "").code for name in "abc"] == ["unknown", "superseded", "superseded"]


def test_one_of_two_continuations_is_lost() -> None:
    """It is said as soon as the journal has answered for both."""
    of = ForgottenRequests()
    of.record_dropped(_request("a", 1, 2), has_journal=True)
    of.record_end(1, is_written=False)
    assert of.refusal_for("a", "").code == "journal"
    of.record_end(2, is_written=True)
    assert "submit it again" in of.refusal_for("a", "").reason
    of.record_end(3, is_written=False)  # of one that is in memory


def test_read_by_another_before_it_was_dropped() -> None:
    """Without a journal that says more than that it is not kept."""
    of = ForgottenRequests()
    of.record_read_by_another(_request("a"))
    of.record_dropped(_request("a", 1), has_journal=False)
    of.record_dropped(_request("b", 2), has_journal=False)
    assert [of.refusal_for(name, "").code for name in "ab"] == ["superseded", "unknown"]
