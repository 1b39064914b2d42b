"""Who reads the journal beside the broker: submissions wait for no list, and lists take no more than their share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.broker.actions import ReadList, ReadRequest, WriteEnd
from swarm.broker.events import ListRead, RequestRead
from swarm.broker.journal.reader import MAX_TOGETHER, REST_FACTOR, JournalReader
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.broker.reports.ended_requests import build_row
from swarm.wire.messages import Query
from tests.unit.broker.journal.test_journal import accept, tokens

WAIT_S = 10.0
ALL = Query(what="requests", all=True)


class Clock:
    """A clock that the test moves: an answer takes as long as it says."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self._now = 0.0
        self._asked = 0

    def now(self) -> float:
        self._asked += 1
        self._now += self.takes_s * (self._asked % 2 == 0)
        return self._now


class Reports:
    """A thread for reports over two requests that have ended."""

    def __init__(self, directory: Path) -> None:
        self._writes = JournalStore(directory)
        for number, request_id in ((1, "a"), (2, "b")):
            writes = [accept(request_id, number), tokens(number, 0, 5, 6), WriteEnd(number, "length", 2)]
            self._writes.write(writes, Timestamp.now())
        self.found: list[list[Any]] = []
        self.come = threading.Semaphore(0)
        self.rests: list[float] = []
        self.clock = Clock()
        self.reader = JournalReader(
            self._writes.open_read_only(),
            self._told,
            self._failed,
            max_waiting=8,
            rest_factor=REST_FACTOR,
            clock=self.clock,
        )

    def _told(self, found: list[Any]) -> None:
        self.found.append(found)
        self.come.release()

    def _failed(self, error: BaseException) -> None:
        raise error

    def close(self) -> None:
        self.reader.close()
        self._writes.close()


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    reports = Reports(tmp_path)
    monkeypatch.setattr(JournalReader, "_pause", lambda _, seconds: reports.rests.append(seconds))
    yield reports
    reports.close()


def test_who_asks_the_same_shares_an_answer(reports: Reports) -> None:
    """A few at a time, in their order; each gets it for itself. Another question has its own."""
    for number in range(MAX_TOGETHER + 1):
        assert reports.reader.submit(ReadList(b"%d" % number, ALL)) is None
    assert reports.reader.submit(ReadList(b"other", Query(what="requests"))) is None
    reports.reader.start()
    for _ in range(3):
        assert reports.come.acquire(timeout=WAIT_S)
    clients = [[each.client for each in found] for found in reports.found]
    assert clients == [[b"%d" % number for number in range(MAX_TOGETHER)], [b"%d" % MAX_TOGETHER], [b"other"]]
    first = reports.found[0][0]
    assert isinstance(first, ListRead)
    assert sorted(row["request_id"] for row in first.rows) == ["a", "b"]
    assert all(each.rows == first.rows for each in reports.found[0])


def test_it_rests_as_long_as_it_worked_and_longer(reports: Reports) -> None:
    """However much is asked, a part of the time is the most that reports take."""
    reports.clock.takes_s = 2.0
    for number in range(3):
        reports.reader.submit(ReadList(b"c", Query(what="trace", request_id=f"x{number}")))
    reports.reader.start()
    for _ in range(3):
        assert reports.come.acquire(timeout=WAIT_S)
    reports.reader.close()
    assert reports.rests == [2.0 * REST_FACTOR] * 3


def test_no_more_wait_than_may(reports: Reports) -> None:
    """Whoever comes when there are too many is told so at once."""
    for number in range(8):
        assert reports.reader.submit(ReadList(b"%d" % number, ALL)) is None
    refused = reports.reader.submit(ReadList(b"late", ALL))
    assert isinstance(refused, ListRead)
    assert "try again in a moment" in refused.problem
    reports.reader.start()


def test_requests_are_read_one_by_one(reports: Reports) -> None:
    """Each submission has its own answer."""
    for request_id in ("a", "a", "nobody"):
        reports.reader.submit(ReadRequest(request_id))
    reports.reader.start()
    for _ in range(3):
        assert reports.come.acquire(timeout=WAIT_S)
    found = [each for answers in reports.found for each in answers]
    assert all(isinstance(each, RequestRead) for each in found)
    assert [each.record is not None for each in found] == [True, True, False]


def test_a_journal_that_was_begun_anew_is_read_from_then_on(reports: Reports, tmp_path: Path) -> None:
    """What is asked after that is answered from it, and the old one is closed."""
    anew = JournalStore(tmp_path / "anew")
    anew.write([accept("c", 1), tokens(1, 0, 5), WriteEnd(1, "length", 1)], Timestamp.now())
    reports.reader.start()
    reports.reader.submit(ReadRequest("a"))
    assert reports.come.acquire(timeout=WAIT_S)
    before = reports.reader.store
    reports.reader.switch_store(anew.open_read_only())
    for request_id in ("a", "c"):
        reports.reader.submit(ReadRequest(request_id))
    for _ in range(2):
        assert reports.come.acquire(timeout=WAIT_S)
    found = [each for answers in reports.found for each in answers]
    assert [each.record is not None for each in found] == [True, False, True]
    assert before.is_closed
    anew.close()


def test_a_list_counts_tokens_and_reads_nothing_beside_them(tmp_path: Path) -> None:
    """Its rows are those of the whole record."""
    store = JournalStore(tmp_path)
    store.write([accept("a", 1), tokens(1, 0, 5, 6), WriteEnd(1, "length", 2)], Timestamp.now())
    now = Timestamp.now()
    whole = store.read_request("a", now)
    (listed,) = store.list_ended(now)
    assert whole is not None
    assert whole.sequences[0].logprobs
    assert not listed.sequences[0].logprobs
    assert build_row(listed) == build_row(whole)
    store.close()
