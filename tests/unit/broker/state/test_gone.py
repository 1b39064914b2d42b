"""What is remembered of requests that are gone stays within its bounds."""

from __future__ import annotations

import pytest

from swarm.broker.state import Request, Sequence
from swarm.broker.state import archive as gone
from swarm.broker.state.archive import Gone
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
    kept, read = Gone(), Gone()
    for number, name in enumerate("abc"):
        kept.dropped(_request(name, 2 * number, 2 * number + 1), has_journal=True)
        read.read_by_another(_request(name))
    assert [kept.answer(name, "full").code for name in "abc"] == ["unknown", "journal", "journal"]
    assert [read.answer(name, "").code for name in "abc"] == ["unknown", "superseded", "superseded"]


def test_one_of_two_continuations_is_lost() -> None:
    """It is said as soon as the journal has answered for both."""
    of = Gone()
    of.dropped(_request("a", 1, 2), has_journal=True)
    of.settled(1, is_written=False)
    assert of.answer("a", "").code == "journal"
    of.settled(2, is_written=True)
    assert "submit it again" in of.answer("a", "").reason
    of.settled(3, is_written=False)  # of one that is in memory


def test_read_by_another_before_it_was_dropped() -> None:
    """Without a journal that says more than that it is not kept."""
    of = Gone()
    of.read_by_another(_request("a"))
    of.dropped(_request("a", 1), has_journal=False)
    of.dropped(_request("b", 2), has_journal=False)
    assert [of.answer(name, "").code for name in "ab"] == ["superseded", "unknown"]
